//! The process around the engine: load the model, link up, end cleanly.

use crate::{
    engine::{Engine, Input},
    scheduler::{Limits, Scheduler},
    settings::Settings,
};
use tidemill_engine::{
    load::{LoadedEngine, load_engine},
    reach,
};
use tidemill_net::process;
use tidemill_proto::message::RoleInfo;

/// Blocks on their way into pools.
const PUTTING_MAX: usize = 256;

/// Runs a prefill worker until it is told to end.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    process::init_logging(&settings.worker.log);
    process::keep_freed_memory();
    let shutdown = settings.worker.shutdown();
    // Prefill never draws a token.
    let LoadedEngine { runner, info, step_tokens } = load_engine(&settings.engine, 0, settings.jobs_max)?;
    let (reach, mut links, inputs) = reach::start(&settings.worker, &settings.engine, &info, RoleInfo::Prefill(info.clone()))?;
    let limits = Limits {
        admitted_max: settings.admitted_max,
        jobs_max: settings.jobs_max,
        step_tokens,
        putting_max: reach::queue_blocks(&info, PUTTING_MAX),
    };
    let engine = Engine { scheduler: Scheduler::new(info.layout, info.device_blocks, limits), runner, reach };
    let outcome = links.drive(engine, inputs, Input::Link, Input::Drain, shutdown).await;
    links.close().await;
    Ok(outcome?)
}
