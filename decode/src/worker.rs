//! The process around the engine: load the model, link up, pump messages, publish blocks, end cleanly.

use crate::{
    engine::{Engine, Input, Publication},
    scheduler::{Limits, Scheduler},
    settings::Settings,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_kvpool::clients::PoolClients;
use tidemill_model::SamplerScratch;
use tidemill_proto::{
    link::Endpoint,
    message::{Register, Report, RoleInfo, WorkerEvent},
    process,
    uplink::Uplink,
    worker,
};
use tokio::{runtime::Handle, sync::mpsc, time::timeout};

/// Results of fetches and messages of coordinators that the engine has not taken yet. Blocks wait here, so it is short.
const INBOX_MAX: usize = 256;
/// Blocks on their way into the pool.
const PUBLISHING_MAX: usize = 256;
/// At the end, blocks on their way into the pool get this long.
const PUBLISHING_LAST: Duration = Duration::from_secs(2);
/// Blocks put in one call.
const PUBLISH_BATCH: usize = 32;

/// Runs a decode worker until it is told to end.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    process::init_logging(&settings.worker.log);
    process::keep_freed_memory();
    let shutdown = settings.worker.shutdown();
    let (model, kv, info) = tidemill_model::load_engine(&settings.engine)?;
    let endpoint = Endpoint::bind_client(settings.worker.bind, &settings.worker.identity)?;
    let pools = PoolClients::new(endpoint.clone(), info.layout, info.block_bytes as usize, settings.engine.force_quic);
    let report = Arc::new(Mutex::new(Report::default()));
    let register = Register { name: settings.worker.name.clone(), pid: std::process::id(), role: RoleInfo::Decode(info.clone()) };
    let (uplink, mut links) = Uplink::start(&endpoint, &settings.worker.coordinators, register, pools.reporter(Arc::clone(&report)));
    let uplink = Arc::new(uplink);

    let (inbox, inputs) = mpsc::channel(INBOX_MAX);
    let (publisher, publications) = mpsc::channel(PUBLISHING_MAX);
    let limits = Limits {
        sequences_max: settings.sequences_max,
        waiting_max: settings.waiting_max,
        step_tokens: settings.engine.step_tokens,
        context_tokens: info.context_tokens as usize,
    };
    let engine = Engine {
        scheduler: Scheduler::new(info.layout, info.device_blocks, limits),
        model,
        kv,
        uplink: Arc::clone(&uplink),
        pools: pools.clone(),
        publisher,
        inbox: inbox.clone(),
        report,
        runtime: Handle::current(),
        fetches: HashMap::new(),
        scratch: SamplerScratch::default(),
        started: Instant::now(),
    };
    let mut thread = tokio::task::spawn_blocking(move || worker::drive(engine, inputs));
    let publishing = tokio::spawn(publish(pools, publications));

    worker::pump(&mut links, &inbox, Input::Link, &mut thread, shutdown).await?;
    tracing::info!("draining: sequences go back to their coordinators");
    uplink.broadcast(&WorkerEvent::Leaving);
    let _ = inbox.send(Input::Drain).await;
    thread.await?;
    // Best effort, here too: what is not in the pool by now is computed again by whoever needs it.
    let _ = timeout(PUBLISHING_LAST, publishing).await;
    if let Some(uplink) = Arc::into_inner(uplink) {
        // Messages that cross the good-bye are dropped, but taken.
        tokio::join!(uplink.close(), async { while links.recv().await.is_some() {} });
    }
    endpoint.close().await;
    Ok(())
}

/// Puts blocks into the pool as they come, until the engine ends. A block that cannot be put is computed again by whoever needs it.
async fn publish(pools: PoolClients, mut publications: mpsc::Receiver<Publication>) {
    let mut batch = Vec::new();
    while publications.recv_many(&mut batch, PUBLISH_BATCH).await > 0 {
        let mut grouped: HashMap<_, Vec<_>> = HashMap::new();
        for Publication { pool, origin, key, bytes } in batch.drain(..) {
            grouped.entry((pool, origin)).or_default().push((key, bytes));
        }
        for ((pool, origin), blocks) in grouped {
            if let Err(error) = pools.put(pool.0, origin, blocks).await {
                tracing::debug!(%error, "blocks not published");
            }
        }
    }
}
