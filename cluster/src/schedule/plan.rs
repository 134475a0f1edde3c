//! One way to serve a sequence, worked out and timed: from a given decode worker and prefill worker follow the blocks that are read,
//! awaited and computed.

use super::{DecodeCandidate, Demand, Placement, Policy, PrefillCandidate, Snapshot, SourceRun, sources};
use crate::{class::ClassId, load::ClassLoad};
use tidemill_proto::{block::BLOCK_TOKENS, ids::Epoch, message::Host, pool::Tier};

/// The multiple of its device blocks that a decode worker is given. The surplus waits there, ready to start within a step; a larger one
/// would only wait in the wrong place.
const OVERCOMMIT: u64 = 2;

/// The number of a sequence's blocks that can come from a pool: full ones, without the last token, whose logits must be computed.
pub fn blocks_fetchable(tokens: u32) -> u32 {
    tokens.saturating_sub(1) / BLOCK_TOKENS as u32
}

/// The pool nodes that a plan uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pooling {
    /// Blocks are read from any node; new ones go near the decode worker.
    Shared,
    /// Each prefill worker's host keeps the blocks computed there, as Mooncake's instances do. With `transfer`, workers also read blocks
    /// from other hosts.
    AtPrefill { transfer: bool },
}

/// The decision's inputs, and the data that all its plans have in common.
#[derive(Debug)]
pub(super) struct Planner<'a> {
    pub(super) policy: &'a Policy,
    pub(super) snapshot: &'a Snapshot<'a>,
    pub(super) demand: &'a Demand,
    /// The number of leading blocks that can come from a pool.
    pub(super) fetchable: u32,
    held: Vec<sources::Held<'a>>,
    /// Blocks among these that come from object storage.
    objects: Option<FromObjects>,
}

/// The part of the held blocks that must come from object storage.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FromObjects {
    /// The number of blocks before the first such block.
    before: u32,
    /// The time to read these blocks.
    ms: f64,
}

impl<'a> Planner<'a> {
    pub(super) fn new(policy: &'a Policy, snapshot: &'a Snapshot<'a>, demand: &'a Demand) -> Self {
        let fetchable = if demand.local_only { 0 } else { blocks_fetchable(demand.tokens) };
        let held = sources::held(snapshot.blocks, fetchable);
        let mut planner = Self { policy, snapshot, demand, fetchable, held, objects: None };
        planner.weigh_objects();
        planner
    }

    /// Drops the blocks in object storage, and those that are of no use without them, if computing them takes no longer than reading.
    fn weigh_objects(&mut self) {
        let is_far = |held: &sources::Held<'_>| held.holders.iter().all(|holder| holder.tier == Tier::Object);
        let Some(first) = self.held.iter().position(is_far) else { return };
        let blocks = |held: &[sources::Held<'_>]| held.iter().map(|held| held.blocks).sum::<u32>();
        let (before, after) = (blocks(&self.held[..first]), blocks(&self.held[first..]));
        let far: u32 = self.held[first..].iter().filter(|held| is_far(held)).map(|held| held.blocks).sum();
        let holders = self.held[first].holders.iter().filter_map(|holder| sources::find(&self.snapshot.pools, holder.node));
        let bytes = f64::from(far) * self.snapshot.block_bytes as f64;
        let read_ms = holders.map(|pool| pool.object.read_ms(bytes)).fold(f64::INFINITY, f64::min);
        let workers = self.snapshot.prefill.iter().map(|worker| worker.cost).chain(self.snapshot.decode.iter().map(|worker| worker.cost));
        let computed_ms = workers.map(|cost| cost.prefill_ms(tokens_of(after), tokens_of(before))).fold(f64::INFINITY, f64::min);
        if read_ms < computed_ms {
            self.objects = Some(FromObjects { before, ms: read_ms });
        } else {
            self.held.truncate(first);
        }
    }

    /// Decode workers that could take the sequence now.
    pub(super) fn roomy(&self) -> impl Iterator<Item = &'a DecodeCandidate<'a>> + '_ {
        self.snapshot.decode.iter().filter(|worker| self.has_room(worker))
    }

    /// A tie-breaker between equal workers that differs between coordinators, which would otherwise all take the same one. Request ids
    /// start with a number that their coordinator drew.
    pub(super) fn tie(&self, worker: Epoch) -> u64 {
        worker.0 ^ (self.demand.seed >> 32)
    }

    /// The decode worker with room at which a new sequence waits the least for its first step.
    pub(super) fn least_busy(&self) -> Option<&'a DecodeCandidate<'a>> {
        let wait_ms = |worker: &DecodeCandidate| self.tails_ms(worker) + self.step_ms(worker);
        let timed = self.roomy().map(|worker| (worker, wait_ms(worker)));
        let least = timed.min_by(|(a, a_ms), (b, b_ms)| {
            a_ms.total_cmp(b_ms).then((a.sequences, self.tie(a.worker)).cmp(&(b.sequences, self.tie(b.worker))))
        });
        least.map(|(worker, _)| worker)
    }

    /// The number of leading blocks that pool nodes of this host hold.
    pub(super) fn held_at(&self, host: &Host) -> u32 {
        sources::choose_runs(&self.held, &self.snapshot.pools, host, Some(host)).iter().map(|run| run.blocks).sum()
    }

    /// The number of leading blocks that any pool node holds.
    pub(super) fn held_anywhere(&self) -> u32 {
        self.held.iter().map(|held| held.blocks).sum()
    }

    /// The time to compute the missing full blocks at a prefill worker that has `cached` leading ones.
    pub(super) fn prefill_ms(&self, worker: &PrefillCandidate<'_>, cached: u32) -> f64 {
        let cached = cached.max(worker.cached_blocks).min(self.fetchable);
        worker.cost.prefill_ms(tokens_of(self.fetchable - cached), tokens_of(cached))
    }

    /// The time of a decode step with this sequence in the batch.
    pub(super) fn step_ms(&self, worker: &DecodeCandidate<'_>) -> f64 {
        worker.cost.step_ms(u64::from(worker.sequences) + 1, worker.tokens + u64::from(self.demand.tokens))
    }

    /// The time per token of this sequence in the batch.
    fn token_ms(&self, worker: &DecodeCandidate<'_>) -> f64 {
        worker.cost.token_ms(u64::from(worker.sequences) + 1, worker.tokens + u64::from(self.demand.tokens))
    }

    /// The time that a worker needs for prompts that it was given before and computes first.
    pub(super) fn tails_ms(&self, worker: &DecodeCandidate<'_>) -> f64 {
        match self.ahead(worker).map(|class| class.tail_tokens).sum() {
            0 => 0.0,
            tokens => worker.cost.prefill_ms(tokens, 0),
        }
    }

    /// The time until enough sequences have ended for this one to have room on the device. Each token is assumed to be its answer's last
    /// with the same probability.
    fn room_ms(&self, worker: &DecodeCandidate<'_>) -> f64 {
        let (own, capacity) = (u64::from(self.demand.tokens), u64::from(worker.device_blocks) * BLOCK_TOKENS as u64);
        let missing = (worker.tokens + own).saturating_sub(capacity);
        let waited_for = missing.min(self.ahead(worker).map(|class| class.tokens).sum::<u64>() + own);
        if waited_for == 0 || worker.tokens == 0 {
            return 0.0;
        }
        let ended = waited_for as f64 / worker.tokens.min(capacity) as f64;
        ended * self.snapshot.cost.output_tokens() * worker.cost.token_ms(worker.decoding.into(), worker.tokens.min(capacity))
    }

    /// A worker's sequences of the classes that do not yield to this sequence's.
    fn ahead(&self, worker: &DecodeCandidate<'a>) -> impl Iterator<Item = &'a ClassLoad> {
        self.held_by(worker, |held, own| held >= own)
    }

    /// A worker's sequences of the classes that yield to this sequence's.
    fn yielding(&self, worker: &DecodeCandidate<'a>) -> impl Iterator<Item = &'a ClassLoad> {
        self.held_by(worker, |held, own| held < own)
    }

    /// A worker's sequences of the classes for which `is_so(their priority, this sequence's)` holds.
    fn held_by(&self, worker: &DecodeCandidate<'a>, is_so: impl Fn(u8, u8) -> bool) -> impl Iterator<Item = &'a ClassLoad> {
        let classes = self.snapshot.classes;
        let own = classes.get(self.demand.class).priority;
        let held = worker.classes.iter().zip(0..);
        held.filter_map(move |(held, id)| is_so(classes.get(ClassId(id)).priority, own).then_some(held))
    }

    /// The decode worker's part of a plan.
    pub(super) fn at(&self, decode: &'a DecodeCandidate<'a>, pooling: Pooling, prefill: Option<&PrefillCandidate<'a>>) -> At<'_, 'a> {
        let pools = &self.snapshot.pools[..];
        let (keeper, only) = match (pooling, prefill) {
            (Pooling::AtPrefill { transfer }, Some(worker)) => (worker.host, (!transfer).then_some(worker.host)),
            (Pooling::Shared, _) | (_, None) => (decode.host, None),
        };
        let read = sources::choose_runs(&self.held, pools, decode.host, only);
        let found: u32 = read.iter().map(|run| run.blocks).sum();
        // A sibling's job puts its blocks at that job's home.
        let joined = self.demand.joins.filter(|(home, _)| sources::find(pools, *home).is_some());
        let new_blocks = u64::from(self.demand.tokens / BLOCK_TOKENS as u32 + 1 - found);
        let home = joined.map(|(home, _)| home).or_else(|| sources::choose_home(pools, keeper, &read, new_blocks));
        let joined_blocks = joined.map_or(0, |(_, blocks)| blocks.min(self.fetchable));
        let fetch_ms = self.fetch_ms(&read, decode.host, decode.cached_blocks);
        let room_ms = self.room_ms(decode);
        let after_ms = self.tails_ms(decode) + self.step_ms(decode);
        let last_ms = self.tail_ms(decode, self.fetchable);
        At { planner: self, decode, read, found, joined_blocks, home, room_ms, fetch_ms, last_ms, after_ms }
    }

    /// Works out a plan. The decode worker computes the missing blocks itself if `prefill` is `None`, if no block is missing, if no pool
    /// node could hand blocks over, or if the sequence joins a running job.
    pub(super) fn plan(&self, decode: &'a DecodeCandidate<'a>, prefill: Option<&PrefillCandidate<'a>>, pooling: Pooling) -> Placement {
        let at = self.at(decode, pooling, prefill);
        match prefill.filter(|_| at.can_hand_over()) {
            Some(worker) => at.plan(at.remote(worker, worker.queue_ms, self.prefill_ms(worker, at.found)), Some(worker)),
            None => at.plan(at.local(), None),
        }
    }

    /// Whether the decode worker should compute the missing blocks itself: by the operator's limit, or if it would be done before the
    /// prefill worker could even start (conditional disaggregation).
    ///
    /// `found`: leading blocks that exist; `done_ms`: time until the decode worker would have computed the others; `begin_ms`: time until
    /// the prefill worker would start.
    pub(super) fn stays_local(&self, found: u32, done_ms: f64, begin_ms: f64) -> bool {
        match self.policy.local_tail_tokens {
            Some(tokens) => tokens_of(self.fetchable - found) <= tokens.into(),
            None => done_ms <= begin_ms + self.snapshot.cost.handover_ms,
        }
    }

    /// The time to compute a prompt at a decode worker, after `cached` leading blocks.
    fn tail_ms(&self, decode: &DecodeCandidate<'_>, cached: u32) -> f64 {
        let cached = tokens_of(cached);
        decode.cost.prefill_ms(u64::from(self.demand.tokens) - cached, cached)
    }

    /// The time to fetch the blocks of the runs that the reader does not hold itself.
    fn fetch_ms(&self, runs: &[SourceRun], reader: &Host, own_blocks: u32) -> f64 {
        let (mut near, mut far, mut at) = (0, 0, 0);
        for run in runs {
            let end = at + run.blocks;
            let blocks = u64::from(end.saturating_sub(own_blocks.max(at)));
            let is_near = sources::find(&self.snapshot.pools, run.node).is_some_and(|pool| pool.host == reader);
            *(if is_near { &mut near } else { &mut far }) += blocks;
            at = end;
        }
        let from_objects = self.objects.filter(|objects| at > objects.before && at > own_blocks);
        self.snapshot.cost.transfer_ms(near, far, self.snapshot.block_bytes) + from_objects.map_or(0.0, |objects| objects.ms)
    }

    fn has_room(&self, worker: &DecodeCandidate<'_>) -> bool {
        // Lower classes give up their places there, with the blocks that they hold.
        let (mut sequences, mut tokens) = (worker.sequences, worker.tokens);
        for class in self.yielding(worker) {
            sequences -= class.sequences;
            tokens -= class.tokens;
        }
        let together = (tokens + u64::from(self.demand.tokens)) / BLOCK_TOKENS as u64 + u64::from(sequences) + 1;
        self.demand.tokens_max <= worker.context_tokens.into()
            && sequences < self.policy.decode_sequences_max.map_or(worker.work_max, |most| most.min(worker.work_max))
            && (sequences == 0 || together <= OVERCOMMIT * u64::from(worker.device_blocks))
    }
}

/// A decode worker's part of a plan: independent of the prefill worker, unless prefill workers' hosts keep the blocks.
#[derive(Debug)]
pub(super) struct At<'p, 'a> {
    planner: &'p Planner<'a>,
    pub(super) decode: &'a DecodeCandidate<'a>,
    read: Vec<SourceRun>,
    pub(super) found: u32,
    joined_blocks: u32,
    home: Option<Epoch>,
    /// The time until the decode worker's device has room.
    room_ms: f64,
    fetch_ms: f64,
    /// The time to compute the tokens after the last full block.
    last_ms: f64,
    /// The time from the last block to the first token, without the tail.
    after_ms: f64,
}

/// The times of a plan's stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// The time until the computation of the missing blocks starts.
    pub(super) begin_ms: f64,
    /// The prefill worker's computation time.
    pub(super) prefill_ms: f64,
    /// The time in which the decode worker computes parts of the prompt.
    pub(super) tail_ms: f64,
    pub(super) ttft_ms: f64,
}

impl At<'_, '_> {
    /// Whether a prefill worker could be of use.
    pub(super) fn can_hand_over(&self) -> bool {
        self.planner.demand.joins.is_none() && self.home.is_some() && self.found < self.planner.fetchable
    }

    /// The times if the decode worker computes the missing blocks.
    pub(super) fn local(&self) -> Times {
        let cached = self.found.max(self.joined_blocks).max(self.decode.cached_blocks.min(self.planner.fetchable));
        let tail_ms = self.planner.tail_ms(self.decode, cached);
        let begin_ms = self.room_ms + self.fetch_ms;
        Times { begin_ms, prefill_ms: 0.0, tail_ms, ttft_ms: begin_ms + tail_ms + self.after_ms }
    }

    /// The times if a prefill worker computes the missing blocks in `prefill_ms`, after `queue_ms`. It fetches blocks for one job while it
    /// computes others.
    pub(super) fn remote(&self, worker: &PrefillCandidate<'_>, queue_ms: f64, prefill_ms: f64) -> Times {
        let planner = self.planner;
        let begin_ms = planner.fetch_ms(&self.read, worker.host, worker.cached_blocks).max(queue_ms);
        let tail_ms = self.last_ms;
        let handed_over_ms = (begin_ms + prefill_ms + planner.snapshot.cost.handover_ms).max(self.room_ms + self.fetch_ms);
        Times { begin_ms, prefill_ms, tail_ms, ttft_ms: handed_over_ms + tail_ms + self.after_ms }
    }

    pub(super) fn plan(&self, times: Times, prefill: Option<&PrefillCandidate<'_>>) -> Placement {
        let expected_blocks = if prefill.is_some() { self.planner.fetchable } else { self.found.max(self.joined_blocks) };
        Placement {
            decode: self.decode.worker,
            read: self.read.clone(),
            home: self.home,
            prefill: prefill.map(|worker| worker.worker),
            expected_blocks,
            prefill_ms: times.prefill_ms,
            ttft_ms: times.ttft_ms,
            tpot_ms: self.planner.token_ms(self.decode),
            chance: 1.0,
            considered: Vec::new(),
        }
    }
}

fn tokens_of(blocks: u32) -> u64 {
    u64::from(blocks) * BLOCK_TOKENS as u64
}
