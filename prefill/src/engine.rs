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
use tidemill_kvpool::{
    admission::FetchId,
    client::{Block, Miss},
    reach::Reach,
};
use tidemill_model::{Chunk, KvMemory, LogitRows, Model};
use tidemill_proto::{
    block::BlockKey,
    ids::LinkId,
    message::{PoolNode, StepSample, ToWorker},
    pool::Lineage,
    uplink::LinkEvent,
    worker,
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
    pub model: Model,
    pub kv: KvMemory,
    pub scheduler: Scheduler,
    pub reach: Reach<Input>,
}

impl worker::Engine for Engine {
    type Input = Input;

    fn apply(&mut self, input: Input) -> ControlFlow<()> {
        let now = self.reach.now();
        match input {
            Input::Link(_, LinkEvent::Up) => {}
            Input::Link(link, LinkEvent::Down) => self.scheduler.cancel_link(link),
            Input::Link(link, LinkEvent::Message(message)) => match *message {
                ToWorker::Prefill(job) => self.scheduler.admit(link, job, self.model.config().vocab(), now),
                ToWorker::CancelPrefill { request } => self.scheduler.cancel(request),
                other => tracing::warn!(?other, "a prefill worker has no use for this message"),
            },
            Input::Matched { job, held } => self.scheduler.matched(job, held),
            Input::Fetched { fetch, index, result } => {
                let arrival = result.as_ref().ok().map(Block::arrival);
                if let Some(device_block) = self.scheduler.fetched(fetch, index, arrival)
                    && let Ok(block) = result
                {
                    self.kv.block_mut(device_block).copy_from_slice(&block.bytes);
                }
            }
            Input::Put { job, blocks, outcome } => self.scheduler.put(job, blocks, outcome, now),
            Input::Drain => {
                self.scheduler.fail_all("this worker is shutting down");
                self.act();
                return ControlFlow::Break(());
            }
        }
        self.act();
        ControlFlow::Continue(())
    }

    fn step(&mut self) -> bool {
        let rows = self.scheduler.plan(self.reach.now());
        self.act();
        self.publish_report();
        if rows.is_empty() {
            return false;
        }
        self.compute(&rows);
        self.act();
        true
    }
}

impl Engine {
    fn compute(&mut self, rows: &[Row]) {
        let started = Instant::now();
        let chunks: Vec<Chunk<'_>> = rows
            .iter()
            .map(|row| {
                let (tokens, blocks) = self.scheduler.row(row);
                Chunk { tokens, start: row.start, blocks, logits: LogitRows::None }
            })
            .collect();
        self.model.forward(&chunks, &mut self.kv);
        self.scheduler.stepped(rows, self.reach.now());
        self.record_step(rows, started.elapsed());
    }

    fn act(&mut self) {
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
                Action::Put { job, node, lineage, blocks } => self.put(job, node, lineage, &blocks),
                Action::Send { link, event } => self.reach.send(link, event),
            }
        }
    }

    fn put(&mut self, job: JobId, node: PoolNode, lineage: Lineage, blocks: &[(BlockKey, u32)]) {
        let bytes: Vec<_> = blocks.iter().map(|&(key, block)| (key, self.kv.block(block).to_vec())).collect();
        let (pools, inbox, blocks) = (self.reach.pools.clone(), self.reach.inbox.clone(), blocks.len());
        self.reach.runtime.spawn(async move {
            let outcome = pools.put(node, lineage, bytes).await;
            let outcome = match outcome {
                Ok(report) if report.refused > 0 => Err(format!("pool node {} has no room for {} blocks", node.addr, report.refused)),
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            };
            let _ = inbox.send(Input::Put { job, blocks, outcome }).await;
        });
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
            report.blocks.hbm = self.scheduler.blocks(self.model.kv_shape().block_bytes() as u64);
            report.counters = self.scheduler.counters().clone();
        });
    }
}
