//! The process around an engine: loads the model, connects to the coordinators, drives the engine, ends cleanly.

use crate::{
    announcing::Announcer,
    draft::{DraftSettings, LoadedDraft, load_draft},
    drive::EngineEnded,
    engine::Engine,
    flags::Settings,
    io,
    landing::{DevicePin, Landings},
    load::{EngineError, LoadedEngine, load_engine},
    masks::Masks,
    publishing::Publisher,
    role::Role,
    stages::{self, StagesError},
    states::StateRule,
};
use std::{sync::Arc, time::Duration};
use tidemill_kvpool::client::Pin;
use tidemill_net::{config::ConfigError, link::LinkError, process};
use tidemill_proto::{
    message::{EngineInfo, RoleInfo},
    stage::Hello,
};
use tokio::time::timeout;

/// The most blocks in flight to the pool, for each kind of put.
const PUTTING_MAX: usize = 256;
/// The most blocks that the device is copying out of the pool. They take no memory but their leases; with fewer, those of a long prefix
/// would be copied by the engine's thread.
const LANDING_MAX: usize = 1024;
/// The time for blocks in flight to the pool when the worker ends.
const PUBLISHING_LAST: Duration = Duration::from_secs(2);

/// A role's part of its process: its own settings, checked, and the creation of its scheduler.
pub trait RoleSettings {
    type Role: Role + Send + 'static;

    /// The number of sequences that a step draws tokens for; 0 for a role that never draws any.
    fn draws_max(&self) -> usize;

    /// The `work_max` of [`EngineInfo`].
    fn work_max(&self) -> usize;

    fn role_info(info: EngineInfo) -> RoleInfo;

    /// The draft model, which guesses the model's draws.
    fn draft(&self) -> Option<&DraftSettings> {
        None
    }

    fn scheduler(&self, bounds: &EngineBounds) -> Self::Role;
}

/// Bounds that follow from the model, its device and the memory for its blocks.
#[derive(Debug)]
pub struct EngineBounds {
    pub info: EngineInfo,
    /// The number of blocks of the device's memory.
    pub device_blocks: u32,
    /// The rule by which the states of recurrent layers are kept.
    pub states: StateRule,
    /// The number of tokens in the model's vocabulary.
    pub vocab: usize,
    /// The most tokens of one step.
    pub step_tokens: usize,
    /// Whether the model reads a text as a whole, in one step.
    pub reads_whole: bool,
    /// Whether drafted tokens can be verified without changing an answer.
    pub verifies_drafts: bool,
    /// The bounds of the draft model, if there is one.
    pub draft: Option<DraftEngineBounds>,
    /// The most blocks in flight to the pool.
    pub putting_max: usize,
}

/// Bounds of a draft model and its memory.
#[derive(Clone, Copy, Debug)]
pub struct DraftEngineBounds {
    pub device_blocks: u32,
    pub vocab: usize,
    pub context_tokens: usize,
    pub step_tokens: usize,
}

/// The reason why a worker could not start, or ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum WorkerEnd {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot run an encoder as a prefill worker: it has no KV to hand over; run decode workers alone")]
    Encoder,
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Load(#[from] EngineError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Ended(#[from] EngineEnded),
}

/// Runs a worker until it is told to end.
pub fn run<S: RoleSettings>(settings: Settings<S>) -> Result<(), WorkerEnd> {
    let cores = settings.engine.cores.clone();
    match settings.engine.stage {
        Some(stage) => process::run(cores.as_ref(), stages::serve::serve(settings.worker, settings.engine, stage)),
        None => process::run(cores.as_ref(), serve(settings)),
    }
}

async fn serve<S: RoleSettings>(Settings { worker, engine, role }: Settings<S>) -> Result<(), WorkerEnd> {
    worker.log.start();
    process::keep_freed_memory();
    let shutdown = worker.shutdown();
    let meet = |hello: &Hello, blocks| stages::head::meet(&worker, &engine, hello, blocks);
    let loaded = match load_engine(&engine, role.draws_max(), role.work_max(), &meet) {
        Err(EngineError::Stages(StagesError::Told)) => return Ok(()),
        loaded => loaded?,
    };
    let LoadedEngine { mut runner, info, step_tokens, device_blocks, states, lost } = loaded;
    if runner.reads_whole() && role.draws_max() == 0 {
        return Err(WorkerEnd::Encoder);
    }
    let draft = match role.draft() {
        Some(draft) if runner.verifies_drafts() => Some(load_draft(draft, &engine, step_tokens, runner.vocab())?),
        Some(_) => {
            tracing::warn!("no draft model is loaded: guesses cannot be verified on this device, or for this model");
            None
        }
        None => None,
    };
    let device = runner.device_copies().map(|copies| Arc::new(DevicePin(copies.pinner())) as Arc<dyn Pin>);
    let copies = device.is_some();
    let (io, mut links, events) = io::start(&worker, &engine, &info, S::role_info(info.clone()), device)?;
    if let Some(lost) = lost {
        io.await_loss(lost);
    }
    let landings = copies.then(|| Landings::start(&io.runtime, LANDING_MAX, &io.inbox));
    let _registered = runner.block_memory().and_then(|memory| io.pools.register(memory));
    let putting_max = match runner.device_copies() {
        Some(copies) => {
            let computes_prompts = role.draws_max() == 0;
            let blocks = if computes_prompts {
                io::device_putting_blocks(&info, step_tokens, PUTTING_MAX)
            } else {
                io::queue_blocks(&info, PUTTING_MAX)
            };
            copies.reserve_reads(blocks).map_err(EngineError::from)?;
            tracing::info!(blocks, bytes = blocks as u64 * info.block_bytes, "pinned memory for blocks on their way into the pool");
            blocks
        }
        // A part of a state is useless, so there is room for a complete one.
        None => io::queue_blocks(&info, PUTTING_MAX).max(states.of_job()),
    };
    let (publisher, publishing) = Publisher::start(io.pools.clone(), putting_max);
    let (vocab, reads_whole, verifies_drafts) = (runner.vocab(), runner.reads_whole(), runner.verifies_drafts());
    let of_draft = draft.as_ref().map(DraftEngineBounds::of);
    let bounds =
        EngineBounds { vocab, step_tokens, reads_whole, verifies_drafts, draft: of_draft, putting_max, info, device_blocks, states };
    let rows_repeat = bounds.states.blocks == 0;
    let masks = || Masks::start(engine.model.clone(), bounds.vocab, rows_repeat, engine.threads, io.inbox.clone());
    let masks = (role.draws_max() > 0).then(masks).transpose()?;
    let engine = Engine {
        role: role.scheduler(&bounds),
        runner,
        draft_runner: draft.map(|draft| draft.runner),
        io,
        publisher,
        announcer: Announcer::default(),
        landings,
        masks,
    };
    let outcome = links.drive(engine, events, shutdown).await;
    // This is also best effort: blocks that are not in the pool by now are computed again when they are needed.
    let _ = timeout(PUBLISHING_LAST, publishing).await;
    links.close().await;
    Ok(outcome?)
}

impl DraftEngineBounds {
    fn of(draft: &LoadedDraft) -> Self {
        Self {
            device_blocks: draft.blocks,
            vocab: draft.runner.vocab(),
            context_tokens: draft.runner.context_tokens(),
            step_tokens: draft.step_tokens,
        }
    }
}
