//! One way to serve a sequence, spelt out and timed: who decodes and who prefills are given; what is read, awaited and computed
//! follows.

use super::{DecodeCandidate, Demand, Placement, Policy, PrefillCandidate, Snapshot, SourceRun, sources};
use tidemill_proto::{block::BLOCK_TOKENS, message::Host};

/// How many times its device blocks a decode worker is given. The surplus waits there, ready to start within a step; more of
/// it would only wait in the wrong place.
const OVERCOMMIT: u64 = 2;

/// Blocks of a sequence that can come from a pool: full ones, without the last token, whose logits must be computed.
pub fn blocks_fetchable(tokens: u32) -> u32 {
    tokens.saturating_sub(1) / BLOCK_TOKENS as u32
}

/// Which pool nodes a plan uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pooling {
    /// Blocks are read wherever they are; new ones go near the decode worker.
    Shared,
    /// Each prefill worker's host keeps what is computed there, as Mooncake's instances do. `transfer`: and reads the others'.
    AtPrefill { transfer: bool },
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) placement: Placement,
    /// Until somebody begins to compute the missing blocks.
    pub(super) begin_ms: f64,
}

/// The decision's inputs, and what all its plans have in common.
#[derive(Debug)]
pub(super) struct Planner<'a> {
    pub(super) policy: &'a Policy,
    pub(super) snapshot: &'a Snapshot<'a>,
    pub(super) demand: &'a Demand,
    fetchable: u32,
    held: Vec<sources::Held<'a>>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(policy: &'a Policy, snapshot: &'a Snapshot<'a>, demand: &'a Demand) -> Self {
        let fetchable = if demand.local_only { 0 } else { blocks_fetchable(demand.tokens) };
        let blocks = &snapshot.blocks[..snapshot.blocks.len().min(fetchable as usize)];
        Self { policy, snapshot, demand, fetchable, held: sources::held(blocks) }
    }

    /// Decode workers that could take the sequence now.
    pub(super) fn roomy(&self) -> impl Iterator<Item = &'a DecodeCandidate<'a>> {
        self.snapshot.decode.iter().filter(|worker| self.has_room(worker))
    }

    /// The decode worker with room at which a new sequence waits least for its first step.
    pub(super) fn least_busy(&self) -> Option<&'a DecodeCandidate<'a>> {
        let wait_ms = |worker: &DecodeCandidate| tails_ms(worker) + self.step_ms(worker);
        let timed = self.roomy().map(|worker| (worker, wait_ms(worker)));
        let least = timed.min_by(|(a, a_ms), (b, b_ms)| a_ms.total_cmp(b_ms).then((a.sequences, a.worker).cmp(&(b.sequences, b.worker))));
        least.map(|(worker, _)| worker)
    }

    /// Leading blocks that pool nodes of this host hold.
    pub(super) fn held_at(&self, host: &Host) -> u32 {
        sources::choose_runs(&self.held, &self.snapshot.pools, host, Some(host)).iter().map(|run| run.blocks).sum()
    }

    /// Leading blocks that any pool node holds.
    pub(super) fn held_anywhere(&self) -> u32 {
        self.held.iter().map(|held| held.blocks).sum()
    }

    /// Time to compute the missing full blocks at a prefill worker that finds `cached` leading ones.
    pub(super) fn prefill_ms(&self, worker: &PrefillCandidate<'_>, cached: u32) -> f64 {
        let cached = cached.max(worker.cached_blocks).min(self.fetchable);
        worker.cost.prefill_ms(tokens_of(self.fetchable - cached), tokens_of(cached))
    }

    /// A decode step with this sequence in the batch.
    fn step_ms(&self, worker: &DecodeCandidate<'_>) -> f64 {
        worker.cost.step_ms(u64::from(worker.sequences) + 1, worker.tokens + u64::from(self.demand.tokens))
    }

    /// The decode worker computes the missing blocks itself if `prefill` is `None`, and also if nothing is missing, if no pool node
    /// could hand blocks over, and if the sequence joins a job that runs already.
    pub(super) fn plan(&self, decode: &DecodeCandidate<'a>, prefill: Option<&PrefillCandidate<'a>>, pooling: Pooling) -> Plan {
        let (demand, pools) = (self.demand, &self.snapshot.pools[..]);
        let (keeper, only) = match (pooling, prefill) {
            (Pooling::AtPrefill { transfer }, Some(worker)) => (worker.host, (!transfer).then_some(worker.host)),
            (Pooling::Shared, _) | (_, None) => (decode.host, None),
        };
        let read = sources::choose_runs(&self.held, pools, decode.host, only);
        let found: u32 = read.iter().map(|run| run.blocks).sum();
        // A sibling's job puts its blocks at that job's home.
        let joined = demand.joins.filter(|(home, _)| sources::find(pools, *home).is_some());
        let new_blocks = u64::from(demand.tokens / BLOCK_TOKENS as u32 + 1 - found);
        let home = joined.map(|(home, _)| home).or_else(|| sources::choose_home(pools, keeper, &read, new_blocks));

        let fetch_ms = self.fetch_ms(&read, decode.host, decode.cached_blocks);
        let (before_ms, step_ms) = (tails_ms(decode), self.step_ms(decode));
        let tail_ms = |cached: u32| {
            let cached = tokens_of(cached);
            decode.cost.prefill_ms(u64::from(demand.tokens) - cached, cached)
        };
        let placement = Placement {
            decode: decode.worker,
            read,
            home,
            prefill: None,
            expected_blocks: found,
            prefill_ms: 0.0,
            ttft_ms: 0.0,
            tpot_ms: step_ms,
        };
        if demand.joins.is_some() {
            let expected_blocks = joined.map_or(0, |(_, blocks)| blocks.min(self.fetchable)).max(found);
            let ttft_ms = fetch_ms + before_ms + tail_ms(expected_blocks) + step_ms;
            return Plan { placement: Placement { expected_blocks, ttft_ms, ..placement }, begin_ms: fetch_ms };
        }
        match prefill {
            Some(worker) if home.is_some() && found < self.fetchable => {
                let prefill_ms = self.prefill_ms(worker, found);
                // The worker fetches for one job while it computes others.
                let begin_ms = self.fetch_ms(&placement.read, worker.host, worker.cached_blocks).max(worker.queue_ms);
                let handed_over_ms = begin_ms + prefill_ms + self.snapshot.cost.handover_ms;
                let ttft_ms = handed_over_ms.max(fetch_ms) + before_ms + tail_ms(self.fetchable) + step_ms;
                let prefill = Some(worker.worker);
                Plan { placement: Placement { prefill, expected_blocks: self.fetchable, prefill_ms, ttft_ms, ..placement }, begin_ms }
            }
            _ => {
                let ttft_ms = fetch_ms + before_ms + tail_ms(found.max(decode.cached_blocks.min(self.fetchable))) + step_ms;
                Plan { placement: Placement { ttft_ms, ..placement }, begin_ms: fetch_ms }
            }
        }
    }

    /// Whether the decode worker should compute the missing blocks itself: by the operator's limit, or if it would be done before
    /// the prefill worker could even begin (conditional disaggregation).
    pub(super) fn stays_local(&self, local: &Plan, remote: &Plan) -> bool {
        let Placement { expected_blocks, ttft_ms, tpot_ms, .. } = local.placement;
        match self.policy.local_tail_tokens {
            Some(tokens) => tokens_of(self.fetchable - expected_blocks) <= tokens.into(),
            None => ttft_ms - tpot_ms <= remote.begin_ms + self.snapshot.cost.handover_ms,
        }
    }

    /// Time to fetch those of the runs' blocks that the reader does not hold itself.
    fn fetch_ms(&self, runs: &[SourceRun], reader: &Host, own_blocks: u32) -> f64 {
        let (mut near, mut far, mut at) = (0, 0, 0);
        for run in runs {
            let end = at + run.blocks;
            let blocks = u64::from(end.saturating_sub(own_blocks.max(at)));
            let is_near = sources::find(&self.snapshot.pools, run.node).is_some_and(|pool| pool.host == reader);
            *(if is_near { &mut near } else { &mut far }) += blocks;
            at = end;
        }
        self.snapshot.cost.transfer_ms(near, far, self.snapshot.block_bytes)
    }

    fn has_room(&self, worker: &DecodeCandidate<'_>) -> bool {
        let blocks = |sequences: u64, tokens: u64| tokens / BLOCK_TOKENS as u64 + sequences;
        let together = blocks(u64::from(worker.sequences) + 1, worker.tokens + u64::from(self.demand.tokens));
        self.demand.tokens_max <= worker.context_tokens.into()
            && worker.sequences < self.policy.decode_sequences_max.map_or(worker.work_max, |most| most.min(worker.work_max))
            && (worker.sequences == 0 || together <= OVERCOMMIT * u64::from(worker.device_blocks))
    }
}

/// How long a worker computes prompts that it was given before.
fn tails_ms(worker: &DecodeCandidate<'_>) -> f64 {
    if worker.tail_tokens == 0 { 0.0 } else { worker.cost.prefill_ms(worker.tail_tokens, 0) }
}

fn tokens_of(blocks: u32) -> u64 {
    u64::from(blocks) * BLOCK_TOKENS as u64
}
