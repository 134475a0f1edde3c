//! The thread that owns model and device memory: applies events, computes a step, performs the scheduler's actions, and starts over.
//!
//! ```text
//!   links, matches, fetches, puts ──► bounded inbox ──► [ role ⇄ model + KV memory ] ──► uplink; match, fetch and put tasks
//! ```
//!
//! Before a step, a decode worker's draft model may compute a few of its own.

use crate::{
    announcing::Announcer,
    drive::Driven,
    io::Io,
    job::{Action, Delivery, JobId, ScheduledChunk},
    landing::Landings,
    masks::{Constrained, Masks, narrowed::Narrowed},
    publishing::Publisher,
    role::Role,
};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use tidemill_kvpool::client::{Arrival, FetchId, FetchedBlock, Miss};
use tidemill_model::{ExecutorError, Runner};
use tidemill_net::uplink::LinkEvent;
use tidemill_proto::{
    block::Token,
    ids::LinkId,
    message::StepSample,
    step::{Allowed, Segment, SegmentResult},
};

/// An event for an engine.
#[derive(Debug)]
pub enum Event {
    Link(LinkId, LinkEvent),
    Matched {
        job: JobId,
        held: Result<usize, String>,
    },
    Fetched {
        fetch: FetchId,
        index: usize,
        result: Result<FetchedBlock, Miss>,
    },
    /// A fetched block that the device has copied; without an arrival, it is a miss after all.
    Landed {
        fetch: FetchId,
        index: usize,
        outcome: Result<Option<Arrival>, ExecutorError>,
    },
    PutDone {
        job: JobId,
        blocks: usize,
        outcome: Result<(), String>,
    },
    Constrained {
        job: JobId,
        generated: usize,
        outcome: Result<Constrained, String>,
    },
    /// A mask that a plan did without is known.
    Masked,
    /// A part of the model is lost, so that nothing can be computed any more.
    Lost(ExecutorError),
    /// Hand all jobs back and end.
    Drain,
}

/// A role with the model it computes on.
pub(crate) struct Engine<R> {
    pub(crate) role: R,
    pub(crate) runner: Runner,
    /// A second, small model that guesses the first one's draws, if there is one.
    pub(crate) draft_runner: Option<Runner>,
    pub(crate) io: Io,
    pub(crate) publisher: Publisher,
    pub(crate) announcer: Announcer,
    /// The copies by the device; if `None`, the host copies all blocks.
    pub(crate) landings: Option<Landings>,
    /// The masks of grammars; `None` if this role draws no tokens.
    pub(crate) masks: Option<Masks>,
}

impl<R: Role> Driven for Engine<R> {
    type Event = Event;
    type Error = ExecutorError;

    fn apply(&mut self, event: Event) -> Result<ControlFlow<()>, ExecutorError> {
        let now = self.io.now();
        match event {
            Event::Link(link, LinkEvent::Up) => self.announcer.up(link),
            Event::Link(link, LinkEvent::Down) => {
                self.announcer.down(link);
                self.role.link_down(link);
            }
            Event::Link(link, LinkEvent::Message(message)) => {
                if let Some(message) = self.role.accept(link, *message, now) {
                    tracing::warn!(?message, "this role has no use for this message");
                }
            }
            Event::Matched { job, held } => self.role.matched(job, held),
            Event::Fetched { fetch, index, result } => {
                let arrival = match result {
                    Ok(block) => match self.take_in(fetch, index, block)? {
                        Taken::Here(arrival) => arrival,
                        Taken::Landing => return Ok(ControlFlow::Continue(())),
                    },
                    Err(_) => None,
                };
                self.role.fetched(fetch, index, arrival, now);
            }
            Event::Landed { fetch, index, outcome } => drop(self.role.fetched(fetch, index, outcome?, now)),
            Event::PutDone { job, blocks, outcome } => self.role.put_done(job, blocks, outcome, now),
            Event::Constrained { job, generated, outcome } => self.constrained(job, generated, outcome),
            // The next plan asks for all masks.
            Event::Masked => {}
            Event::Lost(error) => return Err(error),
            Event::Drain => {
                self.role.hand_back("this worker is shutting down");
                self.act()?;
                return Ok(ControlFlow::Break(()));
            }
        }
        self.act()?;
        Ok(ControlFlow::Continue(()))
    }

    fn step(&mut self) -> Result<bool, ExecutorError> {
        for (job, mask) in self.masks.iter().flat_map(Masks::states) {
            self.role.masked(job, mask);
        }
        let guessing = self.guess()?;
        let chunks = self.role.plan(self.io.now());
        self.act()?;
        self.report_load();
        self.announce(!chunks.is_empty());
        if chunks.is_empty() {
            return Ok(false);
        }
        let started = Instant::now();
        let mut sample = self.sample(&chunks);
        let results = self.compute(&chunks)?;
        let decoded = chunks.iter().zip(&results).filter(|(chunk, _)| self.role.decode_rows(chunk) > 0);
        sample.drawn = decoded.map(|(_, result)| result.drawn.len() as u32).sum();
        let last = |result: &SegmentResult| Some((result.drawn.last()?.0, result.drawn.len()));
        let drawn: Vec<_> = chunks.iter().zip(&results).filter_map(|(chunk, result)| Some((chunk.job, last(result)?))).collect();
        self.role.stepped(&chunks, results, self.io.now());
        self.advance_masks(&drawn);
        (sample.ms, sample.drafting_ms) = (started.elapsed().as_secs_f32() * 1e3, guessing.as_secs_f32() * 1e3);
        self.io.report(|report| report.push_step(sample));
        self.act()?;
        Ok(true)
    }

    fn give_up(&mut self, error: &ExecutorError) {
        tracing::error!(%error, "all jobs go back to their coordinators");
        self.io.leave();
        self.role.hand_back(&error.to_string());
        for action in self.role.residency_mut().take_actions() {
            if let Action::Send { link, event } = action {
                self.io.send(link, event);
            }
        }
    }
}

impl<R: Role> Engine<R> {
    /// Reads a fetched block straight into its device block, or makes the device copy it. A block that is no longer wanted counts as
    /// received.
    fn take_in(&mut self, fetch: FetchId, index: usize, block: FetchedBlock) -> Result<Taken, ExecutorError> {
        let Some(device_block) = self.role.destination(fetch, index) else { return Ok(Taken::Here(Some(block.arrival()))) };
        if let (Some(from), Some(copies)) = (block.device_address(), self.runner.device_copies())
            && let Some(place) = self.landings.as_ref().and_then(Landings::place)
        {
            place.land(copies, (fetch, index), block, (from, device_block))?;
            return Ok(Taken::Landing);
        }
        let good = self.runner.write_block(device_block, &mut |memory| block.read_into(memory).is_ok())?;
        Ok(Taken::Here(good.then(|| block.arrival())))
    }

    /// Runs the draft model step after step. Returns the time that this took.
    fn guess(&mut self) -> Result<Duration, ExecutorError> {
        let Some(runner) = &mut self.draft_runner else { return Ok(Duration::ZERO) };
        let started = Instant::now();
        loop {
            let chunks = self.role.guess(self.io.now());
            if chunks.is_empty() {
                return Ok(started.elapsed());
            }
            let segments: Vec<Segment<'_>> = chunks.iter().map(|chunk| self.role.guess_segment(chunk)).collect();
            let results = runner.step(&segments)?;
            self.role.guessed(results, self.io.now());
        }
    }

    fn compute(&mut self, chunks: &[ScheduledChunk]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let by_grammar = |chunk: &ScheduledChunk| self.masks.as_ref()?.next(chunk.job);
        let narrowed = |chunk: &ScheduledChunk| Some(Narrowed::new(by_grammar(chunk)?, self.role.required(chunk.job)?));
        let narrowed: Vec<Option<Narrowed<'_>>> = chunks.iter().map(narrowed).collect();
        let mut segments: Vec<Segment<'_>> = chunks.iter().map(|chunk| self.role.segment(chunk)).collect();
        for ((segment, chunk), narrowed) in segments.iter_mut().zip(chunks).zip(&narrowed) {
            let allowed = narrowed.as_ref().map(|narrowed| narrowed as &dyn Allowed).or_else(|| by_grammar(chunk));
            if let (Some(draw), Some(allowed)) = (segment.wanted.draw_mut(), allowed) {
                draw.allowed = Some(allowed);
            }
        }
        self.runner.step(&segments)
    }

    fn constrained(&mut self, job: JobId, generated: usize, outcome: Result<Constrained, String>) {
        let (outcome, constrained) = match outcome {
            Ok(constrained) => (Ok(()), Some(constrained)),
            Err(reason) => (Err(reason), None),
        };
        if self.role.constrained(job, generated, outcome)
            && let (Some(masks), Some(constrained)) = (&mut self.masks, constrained)
        {
            masks.insert(job, constrained);
        }
    }

    /// A sample of a step before it is computed, for the cost model.
    fn sample(&self, chunks: &[ScheduledChunk]) -> StepSample {
        let mut sample = StepSample::default();
        for chunk in chunks {
            let (start, rows) = (chunk.start, self.role.decode_rows(chunk));
            if rows > 0 {
                sample.sequences += 1;
                sample.decode_rows += rows as u32;
                sample.decode_context += (rows * start) as u64;
            } else {
                sample.prefill_tokens += chunk.len as u32;
                sample.prefill_context += (start * chunk.len + chunk.len * chunk.len / 2) as u64;
            }
        }
        sample
    }

    /// Begins the masks of the next step, after the last of each job's drawn tokens, whose number is given as well. The masks of tokens
    /// before it have already been used.
    fn advance_masks(&mut self, drawn: &[(JobId, (Token, usize))]) {
        let Some(masks) = &mut self.masks else { return };
        masks.retain(|job| self.role.kv(job).is_some());
        for &(job, (token, count)) in drawn {
            masks.advance(job, token, count);
        }
    }

    fn act(&mut self) -> Result<(), ExecutorError> {
        for action in self.role.residency_mut().take_actions() {
            match action {
                Action::Match { job, node, keys } => {
                    let pools = self.io.pools.clone();
                    self.io.answer(async move {
                        let held = pools.match_prefix(node, &keys).await.map_err(|error| error.to_string());
                        Event::Matched { job, held }
                    });
                }
                Action::Fetch { fetch, parts } => self.io.fetch(fetch, parts),
                Action::CancelFetch { fetch } => self.io.cancel_fetch(fetch),
                Action::Put { node, lineage, blocks, delivery: Delivery::BestEffort } => {
                    self.publisher.offer(&mut self.runner, node, lineage, &blocks)?;
                }
                Action::Put { node, lineage, blocks, delivery: Delivery::Acknowledged(job) } => {
                    let (count, put) = (blocks.len(), self.publisher.put(&mut self.runner, node, lineage, &blocks)?);
                    self.io.answer(async move { Event::PutDone { job, blocks: count, outcome: put.await } });
                }
                Action::Constrain { job, group, constraint, generated } => {
                    let masks = self.masks.as_ref().expect("only roles that draw tokens follow grammars");
                    masks.compile(group, job, constraint, generated);
                }
                Action::Send { link, event } => self.io.send(link, event),
            }
        }
        Ok(())
    }

    fn announce(&mut self, busy: bool) {
        let now = self.io.now();
        for (link, event) in self.announcer.announce(self.role.residency_mut(), busy, now) {
            self.io.send(link, event);
        }
    }

    fn report_load(&self) {
        let load = self.role.load();
        self.io.report(|report| {
            report.waiting = load.waiting as u32;
            report.running = load.running as u32;
            report.tokens_queued = load.tokens_queued;
            report.blocks.hbm = self.role.residency().blocks(self.runner.kv_shape().block_bytes() as u64);
            report.counters = self.role.counters().clone();
            report.counters.expert_rows = self.runner.expert_rows();
        });
    }
}

/// The outcome of receiving a fetched block.
enum Taken {
    /// Received; `None` if it is a miss after all.
    Here(Option<Arrival>),
    /// In flight; [`Event::Landed`] will report it.
    Landing,
}
