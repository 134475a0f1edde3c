//! The difference between the roles that compute: a scheduler.

use crate::{
    job::{JobId, ScheduledChunk},
    residency::{JobKv, Residency},
};
use std::time::Duration;
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::{
    ids::LinkId,
    message::{Counters, ToWorker},
    step::{Mask, Segment, SegmentResult},
};

/// A scheduler, which chooses the jobs to take, those that hold device blocks, and the work of the next step. `now` is the time since the
/// worker started. After each call, the engine takes and performs the actions that [`Residency`] queued.
pub trait Role {
    /// Whether a chunk of one token is a decode row to the cost model, instead of a short prefill.
    const DECODES: bool;

    /// Accepts a coordinator's message. Returns it if the role has no use for it.
    fn accept(&mut self, link: LinkId, message: ToWorker, now: Duration) -> Option<ToWorker>;

    /// Notes that a coordinator is gone, and forgets everything it requested.
    fn link_down(&mut self, link: LinkId);

    /// Notes that a pool node holds this many of the first blocks that it was asked about.
    fn matched(&mut self, job: JobId, held: Result<usize, String>);

    /// The blocks of a live job.
    fn kv(&self, job: JobId) -> Option<&JobKv>;

    /// The device block that a fetched block is for, if it is still wanted. The bytes must be there when [`fetched`](Self::fetched) is
    /// called.
    fn destination(&self, fetch: FetchId, index: usize) -> Option<u32> {
        self.kv(self.residency().fetching_job(fetch)?)?.destination(index)
    }

    /// Applies one answer of a fetch; no arrival is a miss. Returns the device block that the bytes belong into, if they are still wanted.
    fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<u32>;

    /// Notes that a put of `blocks` blocks of a job has ended.
    fn put_done(&mut self, job: JobId, blocks: usize, outcome: Result<(), String>, now: Duration);

    /// Notes that a job's grammar is compiled and stands after `generated` tokens, or the reason why it cannot be used. Returns whether the
    /// job waits for this answer, which may be that of an earlier job of the same sequence.
    fn constrained(&mut self, _job: JobId, _generated: usize, _outcome: Result<(), String>) -> bool {
        false
    }

    /// Notes the state of the mask of a job's next token, before a step is planned.
    fn masked(&mut self, _job: JobId, _mask: MaskState) {}

    /// The tokens of which one must be drawn next for a job, as far as its grammar allows any of them; `None` if any token may follow.
    fn required(&self, _job: JobId) -> Option<&Mask> {
        None
    }

    /// The next step of the draft model, before a step is planned; empty if nothing more is to be guessed now.
    fn guess(&mut self, _now: Duration) -> Vec<ScheduledChunk> {
        Vec::new()
    }

    /// A chunk of the draft model's step, in the executor's form.
    fn guess_segment(&self, chunk: &ScheduledChunk) -> Segment<'_> {
        unreachable!("a role that guesses nothing has no chunk {chunk:?}")
    }

    /// Applies the draft model's step, with one result for each chunk.
    fn guessed(&mut self, _results: Vec<SegmentResult>, _now: Duration) {}

    /// Admits the jobs that fit and schedules the next step; empty if there is nothing to compute.
    fn plan(&mut self, now: Duration) -> Vec<ScheduledChunk>;

    /// A scheduled chunk, in the executor's form.
    fn segment(&self, chunk: &ScheduledChunk) -> Segment<'_>;

    /// The rows of a planned chunk that decode, to the cost model; the rest of its tokens belong to a prompt.
    fn decode_rows(&self, chunk: &ScheduledChunk) -> usize {
        usize::from(Self::DECODES && chunk.len == 1)
    }

    /// Applies the planned step, with one result for each chunk.
    fn stepped(&mut self, chunks: &[ScheduledChunk], results: Vec<SegmentResult>, now: Duration);

    /// Hands all jobs back when this worker ends, for `reason`, so that they continue elsewhere.
    fn hand_back(&mut self, reason: &str);

    fn residency(&self) -> &Residency;

    fn residency_mut(&mut self) -> &mut Residency;

    fn load(&self) -> Load;

    fn counters(&self) -> &Counters;
}

/// The mask of a constrained job's next token, as far as it matters to a plan. All choices lead to the same tokens, in other steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MaskState {
    /// It will be known by the time at which the token is drawn, as far as can be told.
    InTime,
    /// It is known, but those after it may take long, so that a step draws one token.
    Known,
    /// It is late: the job sits out the steps until it is known.
    Awaited,
}

/// Gauges of a worker's report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// The number of jobs that wait for room.
    pub waiting: usize,
    /// The number of jobs that hold device blocks.
    pub running: usize,
    /// The number of prompt tokens that are not computed yet.
    pub tokens_queued: u64,
}
