//! The scheduler as seen by its engine.

use super::Scheduler;
use std::time::Duration;
use tidemill_engine::{
    job::{JobId, ScheduledChunk},
    residency::{JobKv, Residency},
    role::{Load, MaskState, Role},
};
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::{
    ids::LinkId,
    message::{Counters, Finish, ToWorker},
    step::{Mask, Segment, SegmentResult},
};

impl Role for Scheduler {
    const DECODES: bool = true;

    fn accept(&mut self, link: LinkId, message: ToWorker, now: Duration) -> Option<ToWorker> {
        match message {
            ToWorker::Decode(job) => self.admit(link, job, now),
            ToWorker::DecodeLimited { job, limit } => self.admit_limited(link, job, Some(limit), now),
            ToWorker::CancelSequence { sequence } => self.cancel(sequence),
            ToWorker::StopWaiting { sequence } => self.stop_waiting(sequence),
            other => return Some(other),
        }
        None
    }

    fn link_down(&mut self, link: LinkId) {
        for id in self.sequences_where(|state| state.link == link) {
            self.forget(id);
        }
    }

    /// Does nothing: decode asks no node for its blocks, as its jobs name them.
    fn matched(&mut self, _: JobId, _: Result<usize, String>) {}

    fn kv(&self, job: JobId) -> Option<&JobKv> {
        Some(&self.sequences.get(&job)?.kv)
    }

    fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<u32> {
        let id = self.residency.fetching_job(fetch)?;
        let state = self.sequences.get_mut(&id).expect("a fetch belongs to a live sequence");
        let fetched = self.residency.fetched(&mut state.kv, index, arrival, now)?;
        if let Some(arrival) = arrival {
            state.note_arrival(arrival, fetched.waited);
        }
        if let Some(blocks) = fetched.finished {
            self.replicate(id, &blocks);
            self.start(id, &blocks, now);
        }
        fetched.block
    }

    /// Does nothing, as decode publishes at best effort.
    fn put_done(&mut self, _: JobId, _: usize, _: Result<(), String>, _: Duration) {}

    fn constrained(&mut self, job: JobId, generated: usize, outcome: Result<(), String>) -> bool {
        let Some(state) = self.sequences.get_mut(&job).filter(|state| state.awaits_grammar && state.generated() as usize == generated)
        else {
            return false;
        };
        state.awaits_grammar = false;
        if let Err(reason) = outcome {
            self.end(job, Finish::Failed { reason });
        }
        true
    }

    fn masked(&mut self, job: JobId, mask: MaskState) {
        if let Some(state) = self.sequences.get_mut(&job) {
            state.mask = mask;
        }
    }

    fn required(&self, job: JobId) -> Option<&Mask> {
        self.sequences.get(&job)?.required()
    }

    fn guess(&mut self, now: Duration) -> Vec<ScheduledChunk> {
        self.next_guesses(now)
    }

    fn guess_segment(&self, chunk: &ScheduledChunk) -> Segment<'_> {
        self.draft_model.as_ref().expect("only a draft model's steps have such chunks").segment(chunk)
    }

    fn guessed(&mut self, results: Vec<SegmentResult>, now: Duration) {
        if let Some(model) = &mut self.draft_model {
            model.stepped(results, now);
        }
    }

    fn plan(&mut self, now: Duration) -> Vec<ScheduledChunk> {
        let ranks = self.ranks(now);
        self.admit_waiting(&ranks, now);
        self.grow();
        self.schedule(&ranks, now)
    }

    fn segment(&self, chunk: &ScheduledChunk) -> Segment<'_> {
        self.sequences[&chunk.job].segment(chunk.start, chunk.len)
    }

    fn decode_rows(&self, chunk: &ScheduledChunk) -> usize {
        let drafted = self.sequences[&chunk.job].drafted();
        if chunk.len == 1 + drafted { chunk.len } else { 0 }
    }

    fn stepped(&mut self, chunks: &[ScheduledChunk], results: Vec<SegmentResult>, now: Duration) {
        assert_eq!(chunks.len(), results.len(), "one result per chunk");
        self.counters.steps += 1;
        let (work, planned) = self.step;
        let took = now.saturating_sub(planned);
        self.pace.observe(&work, took);
        if work.tokens == 0 {
            self.row_cost.observe(work.rows, took);
        }
        self.draft_model.iter_mut().for_each(|model| model.earn(took.as_secs_f64() * 1e3));
        let outcome = self.take_in(chunks, results, now);
        if work.tokens == 0 {
            self.note_yield(chunks.len(), &outcome, took);
        }
        for chunk in &outcome.computed {
            self.shares.serve(&self.sequences[&chunk.job].job.urgency, chunk.len);
            self.advance(chunk);
        }
        self.tell(outcome, now);
    }

    /// Hands all sequences back; they continue elsewhere from the tokens that their coordinators have.
    fn hand_back(&mut self, _reason: &str) {
        for id in self.sequences_where(|_| true) {
            self.end(id, Finish::Returned);
        }
    }

    fn residency(&self) -> &Residency {
        &self.residency
    }

    fn residency_mut(&mut self) -> &mut Residency {
        &mut self.residency
    }

    fn load(&self) -> Load {
        // The token that decoding draws next belongs to no prompt.
        let tokens_queued = self.sequences.values().map(|state| state.remaining().saturating_sub(1) as u64).sum();
        Load { waiting: self.waiting.len(), running: self.admitted.len(), tokens_queued }
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}
