//! The thread that owns model and device memory: it applies what arrives, runs a step, acts, and starts over.
//!
//! ```text
//!   links, fetches ──► bounded inbox ──► [ scheduler ⇄ model + KV memory ] ──► uplink, fetch tasks, publisher
//! ```

use crate::{
    scheduler::{Action, Plan, Row, RowLogits, RowResult, Scheduler},
    sequence::Draw,
};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use tidemill_kvpool::{
    admission::FetchId,
    client::{Block, Miss},
    reach::Reach,
};
use tidemill_model::{Chunk, KvMemory, LogitRows, Logits, Model, SamplerScratch, sample, token_logprob};
use tidemill_proto::{
    block::BlockKey,
    ids::LinkId,
    message::{PoolNode, StepSample, ToWorker},
    pool::Lineage,
    uplink::LinkEvent,
    worker,
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
#[derive(Debug)]
pub struct Publication {
    pub node: PoolNode,
    pub lineage: Lineage,
    pub key: BlockKey,
    pub bytes: Vec<u8>,
}

/// Everything that the engine thread owns or reaches.
pub struct Engine {
    pub model: Model,
    pub kv: KvMemory,
    pub scheduler: Scheduler,
    pub reach: Reach<Input>,
    pub publisher: mpsc::Sender<Publication>,
    pub scratch: SamplerScratch,
}

impl worker::Engine for Engine {
    type Input = Input;

    fn apply(&mut self, input: Input) -> ControlFlow<()> {
        let now = self.reach.now();
        match input {
            Input::Link(_, LinkEvent::Up) => {}
            Input::Link(link, LinkEvent::Down) => self.scheduler.cancel_link(link),
            Input::Link(link, LinkEvent::Message(message)) => match *message {
                ToWorker::Decode(job) => self.scheduler.admit(link, job, self.model.config().vocab(), now),
                ToWorker::CancelSequence { sequence } => self.scheduler.cancel(sequence),
                ToWorker::StopWaiting { sequence } => self.scheduler.stop_waiting(sequence),
                other => tracing::warn!(?other, "a decode worker has no use for this message"),
            },
            Input::Fetched { fetch, index, result } => self.fetched(fetch, index, result, now),
            Input::Drain => {
                self.scheduler.return_all();
                self.act();
                return ControlFlow::Break(());
            }
        }
        self.act();
        ControlFlow::Continue(())
    }

    fn step(&mut self) -> bool {
        let plan = self.scheduler.plan(self.reach.now());
        self.act();
        self.publish_report();
        if plan.rows.is_empty() {
            return false;
        }
        self.compute(&plan);
        self.act();
        true
    }
}

impl Engine {
    fn fetched(&mut self, fetch: FetchId, index: usize, result: Result<Block, Miss>, now: Duration) {
        let arrival = result.as_ref().ok().map(Block::arrival);
        if let Some(device_block) = self.scheduler.fetched(fetch, index, arrival, now)
            && let Ok(block) = result
        {
            self.kv.block_mut(device_block).copy_from_slice(&block.bytes);
        }
    }

    fn compute(&mut self, plan: &Plan) {
        let started = Instant::now();
        let chunks: Vec<Chunk<'_>> = plan.rows.iter().map(|row| chunk(&self.scheduler, row)).collect();
        let mut logits = self.model.forward(&chunks, &mut self.kv);
        let mut next = 0;
        let results = plan
            .rows
            .iter()
            .map(|row| {
                let (result, used) = draw(&self.scheduler, row, &mut logits, next, &mut self.scratch);
                next += used;
                result
            })
            .collect();
        self.scheduler.stepped(plan, results, self.reach.now());
        self.record_step(plan, started.elapsed());
    }

    fn act(&mut self) {
        for action in self.scheduler.take_actions() {
            match action {
                Action::Fetch { fetch, parts } => {
                    self.reach.fetch(fetch, parts, |fetch, index, result| Input::Fetched { fetch, index, result });
                }
                Action::CancelFetch { fetch } => self.reach.cancel_fetch(fetch),
                Action::Publish { node, lineage, key, block } => {
                    // Publishing serves later requests: when the pool does not keep up, this one's speed comes first.
                    let publication = Publication { node, lineage, key, bytes: self.kv.block(block).to_vec() };
                    let _ = self.publisher.try_send(publication);
                }
                Action::Send { link, event } => self.reach.send(link, event),
            }
        }
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
            report.blocks.hbm = self.scheduler.blocks(self.model.kv_shape().block_bytes() as u64);
            report.counters = self.scheduler.counters().clone();
        });
    }
}

fn chunk<'a>(scheduler: &'a Scheduler, row: &Row) -> Chunk<'a> {
    let (tokens, blocks) = scheduler.row(row);
    let logits = match row.logits {
        RowLogits::None => LogitRows::None,
        RowLogits::Draw => LogitRows::Last,
        RowLogits::Score { .. } => LogitRows::All,
    };
    Chunk { tokens, start: row.start, blocks, logits }
}

/// A row's scores and draw from the logits rows from `first` on, and how many of them are its own.
fn draw(scheduler: &Scheduler, row: &Row, logits: &mut Logits<'_>, first: usize, scratch: &mut SamplerScratch) -> (RowResult, usize) {
    let mut result = RowResult::default();
    let (used, draws) = match row.logits {
        RowLogits::None => return (result, 0),
        RowLogits::Draw => (1, true),
        RowLogits::Score { top, draw } => {
            let targets = scheduler.row_targets(row).iter().enumerate();
            result.scores = targets.map(|(i, &token)| token_logprob(logits.row(first + i), token, top)).collect();
            (row.len, draw)
        }
    };
    if draws {
        let Draw { sampling, history, index, banned } = scheduler.draw(row);
        result.drawn = Some(sample(logits.row_mut(first + used - 1), sampling, history, index, banned, scratch));
    }
    (result, used)
}
