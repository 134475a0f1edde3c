//! The thread that owns model and device memory: it applies what arrives, computes a chunk, acts, and starts over.
//!
//! ```text
//!   links, fetches, puts ──► bounded inbox ──► [ scheduler ⇄ model + KV memory ] ──► uplink, fetch and put tasks
//! ```

use crate::scheduler::{Action, JobId, Row, Scheduler};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use tidemill_engine::{drive, reach::Reach};
use tidemill_kvpool::{
    admission::FetchId,
    client::{Block, Miss},
};
use tidemill_model::{BlockBytes, CudaError, Runner};
use tidemill_net::uplink::LinkEvent;
use tidemill_proto::step::{Segment, Wanted};
use tidemill_proto::{
    block::BlockKey,
    ids::LinkId,
    message::{PoolNode, StepSample, ToWorker},
    pool::Lineage,
};

/// What arrives at the engine.
#[derive(Debug)]
pub enum Input {
    Link(LinkId, LinkEvent),
    Matched {
        job: JobId,
        held: Result<usize, String>,
    },
    Fetched {
        fetch: FetchId,
        index: usize,
        result: Result<Block, Miss>,
    },
    Put {
        job: JobId,
        blocks: usize,
        outcome: Result<(), String>,
    },
    /// Hand all jobs back and end.
    Drain,
}

/// Everything that the engine thread owns or reaches.
pub struct Engine {
    pub runner: Runner,
    pub scheduler: Scheduler,
    pub reach: Reach<Input>,
}

impl drive::Engine for Engine {
    type Input = Input;
    type Error = CudaError;

    fn apply(&mut self, input: Input) -> Result<ControlFlow<()>, CudaError> {
        let now = self.reach.now();
        match input {
            Input::Link(_, LinkEvent::Up) => {}
            Input::Link(link, LinkEvent::Down) => self.scheduler.cancel_link(link),
            Input::Link(link, LinkEvent::Message(message)) => match *message {
                ToWorker::Prefill(job) => self.scheduler.admit(link, job, self.runner.config().vocab(), now),
                ToWorker::CancelPrefill { request } => self.scheduler.cancel(request),
                other => tracing::warn!(?other, "a prefill worker has no use for this message"),
            },
            Input::Matched { job, held } => self.scheduler.matched(job, held),
            Input::Fetched { fetch, index, result } => {
                let arrival = result.as_ref().ok().map(Block::arrival);
                if let Some(device_block) = self.scheduler.fetched(fetch, index, arrival, now)
                    && let Ok(block) = result
                {
                    self.runner.write_block(device_block, &block.bytes)?;
                }
            }
            Input::Put { job, blocks, outcome } => self.scheduler.put(job, blocks, outcome, now),
            Input::Drain => {
                self.scheduler.fail_all("this worker is shutting down");
                self.act()?;
                return Ok(ControlFlow::Break(()));
            }
        }
        self.act()?;
        Ok(ControlFlow::Continue(()))
    }

    fn step(&mut self) -> Result<bool, CudaError> {
        let rows = self.scheduler.plan(self.reach.now());
        self.act()?;
        self.publish_report();
        if rows.is_empty() {
            return Ok(false);
        }
        self.compute(&rows)?;
        self.act()?;
        Ok(true)
    }

    fn give_up(&mut self, error: &CudaError) {
        tracing::error!(%error, "all jobs go back to their coordinators");
        self.reach.leave();
        self.scheduler.fail_all(&error.to_string());
        for action in self.scheduler.take_actions() {
            if let Action::Send { link, event } = action {
                self.reach.send(link, event);
            }
        }
    }
}

impl Engine {
    fn compute(&mut self, rows: &[Row]) -> Result<(), CudaError> {
        let started = Instant::now();
        let segments: Vec<Segment<'_>> = rows
            .iter()
            .map(|row| {
                let (tokens, blocks) = self.scheduler.row(row);
                Segment { tokens, start: row.start, blocks, wanted: Wanted::Nothing }
            })
            .collect();
        self.runner.step(&segments)?;
        self.scheduler.stepped(rows, self.reach.now());
        self.record_step(rows, started.elapsed());
        Ok(())
    }

    fn act(&mut self) -> Result<(), CudaError> {
        for action in self.scheduler.take_actions() {
            match action {
                Action::Match { job, node, keys } => {
                    let (pools, inbox) = (self.reach.pools.clone(), self.reach.inbox.clone());
                    self.reach.runtime.spawn(async move {
                        let held = pools.match_prefix(node, &keys).await.map_err(|e| e.to_string());
                        let _ = inbox.send(Input::Matched { job, held }).await;
                    });
                }
                Action::Fetch { fetch, parts } => {
                    self.reach.fetch(fetch, parts, |fetch, index, result| Input::Fetched { fetch, index, result });
                }
                Action::CancelFetch { fetch } => self.reach.cancel_fetch(fetch),
                Action::Put { job, node, lineage, blocks } => self.put(job, node, lineage, &blocks)?,
                Action::Send { link, event } => self.reach.send(link, event),
            }
        }
        Ok(())
    }

    fn put(&mut self, job: JobId, node: PoolNode, lineage: Lineage, blocks: &[(BlockKey, u32)]) -> Result<(), CudaError> {
        let (keys, ids): (Vec<_>, Vec<_>) = blocks.iter().copied().unzip();
        let bytes = self.runner.read_blocks(&ids)?;
        let (pools, inbox, blocks) = (self.reach.pools.clone(), self.reach.inbox.clone(), blocks.len());
        self.reach.runtime.spawn(async move {
            let outcome = match arrived(bytes).await {
                Ok(bytes) => pools.put(node, lineage, keys.into_iter().zip(bytes).collect()).await.map_err(|error| error.to_string()),
                Err(reason) => Err(reason),
            };
            let outcome = match outcome {
                Ok(report) if report.refused > 0 => Err(format!("pool node {} has no room for {} blocks", node.addr, report.refused)),
                outcome => outcome.map(|_| ()),
            };
            let _ = inbox.send(Input::Put { job, blocks, outcome }).await;
        });
        Ok(())
    }

    fn record_step(&mut self, rows: &[Row], took: Duration) {
        let sample = StepSample {
            prefill_tokens: rows.iter().map(|r| r.len as u32).sum(),
            prefill_context: rows.iter().map(|r| (r.start * r.len + r.len * r.len / 2) as u64).sum(),
            decode_rows: 0,
            decode_context: 0,
            ms: took.as_secs_f32() * 1e3,
        };
        self.reach.report(|report| report.push_step(sample));
    }

    fn publish_report(&self) {
        self.reach.report(|report| {
            report.waiting = self.scheduler.waiting() as u32;
            report.running = self.scheduler.running() as u32;
            report.tokens_queued = self.scheduler.tokens_queued();
            report.blocks.hbm = self.scheduler.blocks(self.runner.kv_shape().block_bytes() as u64);
            report.counters = self.scheduler.counters().clone();
        });
    }
}

/// Waits for the bytes that a device copies.
async fn arrived(bytes: BlockBytes) -> Result<Vec<Vec<u8>>, String> {
    match bytes {
        BlockBytes::Ready(blocks) => Ok(blocks),
        pending => {
            let waited = tokio::task::spawn_blocking(move || pending.wait()).await;
            waited.map_err(|panic| panic.to_string())?.map_err(|error| error.to_string())
        }
    }
}
