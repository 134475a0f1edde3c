//! What distinguishes the roles that compute: a scheduler.

use crate::{
    job::{JobId, ScheduledChunk},
    residency::{JobKv, Residency},
};
use std::time::Duration;
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::{
    ids::LinkId,
    message::{Counters, ToWorker},
    step::{Segment, SegmentResult},
};

/// A scheduler: which jobs it takes, which of them hold device blocks, and what the next step computes. `now` is the time since the worker
/// started. After each call, the engine takes and performs the actions that [`Residency`] queued.
pub trait Role {
    /// Whether a chunk of one token is a decode row to the cost model, and not a short prefill.
    const DECODES: bool;

    /// A coordinator's message. Returned if the role has no use for it.
    fn accept(&mut self, link: LinkId, message: ToWorker, now: Duration) -> Option<ToWorker>;

    /// A coordinator is gone: forget all it asked for.
    fn link_down(&mut self, link: LinkId);

    /// A pool node holds this many of the first blocks that it was asked about.
    fn matched(&mut self, job: JobId, held: Result<usize, String>);

    /// A live job's blocks.
    fn kv(&self, job: JobId) -> Option<&JobKv>;

    /// The device block that a fetched block is for, if anybody wants it. Its bytes must be there when [`fetched`](Self::fetched) is told.
    fn destination(&self, fetch: FetchId, index: usize) -> Option<u32> {
        self.kv(self.residency().fetching_job(fetch)?)?.destination(index)
    }

    /// One answer of a fetch; no arrival is a miss. Returns the device block that the bytes belong into, if anybody wants them.
    fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<u32>;

    /// A put of `blocks` blocks of a job ended.
    fn put_done(&mut self, job: JobId, blocks: usize, outcome: Result<(), String>, now: Duration);

    /// A job's grammar is compiled and stands after `generated` tokens, or the reason why it cannot be followed. Returns whether the job
    /// waits for just that: the answer may be that of an earlier job of the same sequence.
    fn constrained(&mut self, _job: JobId, _generated: usize, _outcome: Result<(), String>) -> bool {
        false
    }

    /// The next step of the draft model, before a step is planned. Empty: nothing more is to be guessed now.
    fn guess(&mut self, _now: Duration) -> Vec<ScheduledChunk> {
        Vec::new()
    }

    /// A chunk of the draft model's step, as an executor takes it.
    fn guess_segment(&self, chunk: &ScheduledChunk) -> Segment<'_> {
        unreachable!("a role that guesses nothing has no chunk {chunk:?}")
    }

    /// The draft model's step is done, with one result for each chunk.
    fn guessed(&mut self, _results: Vec<SegmentResult>, _now: Duration) {}

    /// Admits what fits and schedules the next step; empty if there is nothing to compute.
    fn plan(&mut self, now: Duration) -> Vec<ScheduledChunk>;

    /// A scheduled chunk, as an executor takes it.
    fn segment(&self, chunk: &ScheduledChunk) -> Segment<'_>;

    /// Rows of a planned chunk that decode, to the cost model: the rest of its tokens are a prompt's.
    fn decode_rows(&self, chunk: &ScheduledChunk) -> usize {
        usize::from(Self::DECODES && chunk.len == 1)
    }

    /// The planned step is done, with one result for each chunk.
    fn stepped(&mut self, chunks: &[ScheduledChunk], results: Vec<SegmentResult>, now: Duration);

    /// This worker ends, for `reason`: hand all jobs back, so that they go on elsewhere.
    fn hand_back(&mut self, reason: &str);

    fn residency(&self) -> &Residency;

    fn residency_mut(&mut self) -> &mut Residency;

    fn load(&self) -> Load;

    fn counters(&self) -> &Counters;
}

/// Gauges of a worker's report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Jobs that wait for room.
    pub waiting: usize,
    /// Jobs that hold device blocks.
    pub running: usize,
    /// Prompt tokens that are not computed yet.
    pub tokens_queued: u64,
}
