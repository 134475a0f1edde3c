//! The process around the engine: load the model, link up, pump messages, end cleanly.

use crate::{
    engine::{Engine, Input},
    scheduler::{Limits, Scheduler},
    settings::Settings,
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Instant};
use tidemill_kvpool::clients::PoolClients;
use tidemill_proto::{
    link::Endpoint,
    message::{Report, RoleInfo, WorkerEvent},
    process,
    uplink::Uplink,
    worker,
};
use tokio::{runtime::Handle, sync::mpsc};

/// Results of fetches and puts, and messages of coordinators that the engine has not taken yet. Blocks wait here, so it is short.
const INBOX_MAX: usize = 256;

/// Runs a prefill worker until it is told to end.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    process::init_logging(&settings.worker.log);
    let shutdown = settings.worker.shutdown();
    let (model, kv, info) = tidemill_model::load_engine(&settings.engine)?;
    let endpoint = Endpoint::bind_client(settings.worker.bind, &settings.worker.identity)?;
    let pools = PoolClients::new(endpoint.clone(), info.layout, info.block_bytes as usize, settings.engine.force_quic);
    let report = Arc::new(Mutex::new(Report::default()));
    let register = settings.worker.register(RoleInfo::Prefill(info.clone()));
    let (uplink, mut links) = Uplink::start(&endpoint, &settings.worker.coordinators, register, pools.reporter(Arc::clone(&report)));
    let uplink = Arc::new(uplink);

    let (inbox, inputs) = mpsc::channel(INBOX_MAX);
    let limits = Limits { admitted_max: settings.admitted_max, jobs_max: settings.jobs_max, step_tokens: settings.engine.step_tokens };
    let engine = Engine {
        scheduler: Scheduler::new(info.layout, info.device_blocks, limits),
        model,
        kv,
        uplink: Arc::clone(&uplink),
        pools,
        inbox: inbox.clone(),
        report,
        runtime: Handle::current(),
        fetches: HashMap::new(),
        started: Instant::now(),
    };
    let mut thread = tokio::task::spawn_blocking(move || worker::drive(engine, inputs));

    worker::pump(&mut links, &inbox, Input::Link, &mut thread, shutdown).await?;
    tracing::info!("draining: jobs go back to their coordinators");
    uplink.broadcast(&WorkerEvent::Leaving);
    let _ = inbox.send(Input::Drain).await;
    thread.await?;
    if let Some(uplink) = Arc::into_inner(uplink) {
        // Messages that cross the good-bye are dropped, but taken.
        tokio::join!(uplink.close(), async { while links.recv().await.is_some() {} });
    }
    endpoint.close().await;
    Ok(())
}
