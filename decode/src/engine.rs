//! The thread that owns model and device memory: it applies what arrives, runs a step, acts, and starts over.
//!
//! ```text
//!   links, fetches ──► bounded inbox ──► [ scheduler ⇄ model + KV memory ] ──► uplink, fetch tasks, publisher
//! ```

use crate::scheduler::{Action, Plan, Row, RowLogits, Scheduler};
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
use tokio::sync::mpsc;

/// What arrives at the engine.
#[derive(Debug)]
pub enum Input {
    Link(LinkId, LinkEvent),
    Fetched {
        fetch: FetchId,
        index: usize,
        result: Result<Block, Miss>,
    },
    /// Return all sequences to their coordinators and end.
    Drain,
}

/// A block on its way into the pool.
pub struct Publication {
    pub node: PoolNode,
    pub lineage: Lineage,
    pub key: BlockKey,
    pub bytes: BlockBytes,
}

/// Everything that the engine thread owns or reaches.
pub struct Engine {
    pub runner: Runner,
    pub scheduler: Scheduler,
    pub reach: Reach<Input>,
    pub publisher: mpsc::Sender<Publication>,
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
                ToWorker::Decode(job) => self.scheduler.admit(link, job, self.runner.config().vocab(), now),
                ToWorker::CancelSequence { sequence } => self.scheduler.cancel(sequence),
                ToWorker::StopWaiting { sequence } => self.scheduler.stop_waiting(sequence),
                other => tracing::warn!(?other, "a decode worker has no use for this message"),
            },
            Input::Fetched { fetch, index, result } => self.fetched(fetch, index, result, now)?,
            Input::Drain => {
                self.scheduler.return_all();
                self.act()?;
                return Ok(ControlFlow::Break(()));
            }
        }
        self.act()?;
        Ok(ControlFlow::Continue(()))
    }

    fn step(&mut self) -> Result<bool, CudaError> {
        let plan = self.scheduler.plan(self.reach.now());
        self.act()?;
        self.publish_report();
        if plan.rows.is_empty() {
            return Ok(false);
        }
        self.compute(&plan)?;
        self.act()?;
        Ok(true)
    }

    fn give_up(&mut self, error: &CudaError) {
        tracing::error!(%error, "all sequences go back to their coordinators");
        self.reach.leave();
        self.scheduler.return_all();
        for action in self.scheduler.take_actions() {
            if let Action::Send { link, event } = action {
                self.reach.send(link, event);
            }
        }
    }
}

impl Engine {
    fn fetched(&mut self, fetch: FetchId, index: usize, result: Result<Block, Miss>, now: Duration) -> Result<(), CudaError> {
        let arrival = result.as_ref().ok().map(Block::arrival);
        if let Some(device_block) = self.scheduler.fetched(fetch, index, arrival, now)
            && let Ok(block) = result
        {
            self.runner.write_block(device_block, &block.bytes)?;
        }
        Ok(())
    }

    fn compute(&mut self, plan: &Plan) -> Result<(), CudaError> {
        let started = Instant::now();
        let segments: Vec<Segment<'_>> = plan.rows.iter().map(|row| segment(&self.scheduler, row)).collect();
        let results = self.runner.step(&segments)?;
        self.scheduler.stepped(plan, results, self.reach.now());
        self.record_step(plan, started.elapsed());
        Ok(())
    }

    fn act(&mut self) -> Result<(), CudaError> {
        for action in self.scheduler.take_actions() {
            match action {
                Action::Fetch { fetch, parts } => {
                    self.reach.fetch(fetch, parts, |fetch, index, result| Input::Fetched { fetch, index, result });
                }
                Action::CancelFetch { fetch } => self.reach.cancel_fetch(fetch),
                Action::Publish { node, lineage, key, block } => {
                    // Publishing serves later requests: when the pool does not keep up, this one's speed comes first.
                    if let Ok(place) = self.publisher.try_reserve() {
                        place.send(Publication { node, lineage, key, bytes: self.runner.read_blocks(&[block])? });
                    }
                }
                Action::Send { link, event } => self.reach.send(link, event),
            }
        }
        Ok(())
    }

    fn record_step(&mut self, plan: &Plan, took: Duration) {
        let mut sample =
            StepSample { prefill_tokens: 0, prefill_context: 0, decode_rows: 0, decode_context: 0, ms: took.as_secs_f32() * 1e3 };
        for row in &plan.rows {
            if row.len == 1 {
                sample.decode_rows += 1;
                sample.decode_context += row.start as u64;
            } else {
                sample.prefill_tokens += row.len as u32;
                sample.prefill_context += (row.start * row.len + row.len * row.len / 2) as u64;
            }
        }
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

fn segment<'a>(scheduler: &'a Scheduler, row: &Row) -> Segment<'a> {
    let (tokens, blocks) = scheduler.row(row);
    let wanted = match row.logits {
        RowLogits::None => Wanted::Nothing,
        RowLogits::Draw => Wanted::Token(scheduler.draw(row)),
        RowLogits::Score { top, draw } => {
            Wanted::Scores { targets: scheduler.row_targets(row), top, token: draw.then(|| scheduler.draw(row)) }
        }
    };
    Segment { tokens, start: row.start, blocks, wanted }
}
