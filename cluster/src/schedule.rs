//! Where a sequence goes: one pure decision over a snapshot. No clock, no state, so a simulator runs this very code.
//!
//! Least predicted TTFT, after Mooncake's Conductor: `queue + fetch + prefill + first step`, prefix-aware. Two decisions are
//! independent of each other:
//!
//! - *Who decodes*: the worker with the least work before the new sequence's first token, among those with room.
//! - *Who computes the prompt's missing blocks*: blocks in a pool are read from there (`sources`). A prefill worker computes
//!   the rest, unless the decode worker would finish that suffix before a prefill worker could begin (conditional
//!   disaggregation). So short suffixes, and clusters without prefill workers, become "tail".

mod sources;

pub use sources::SourceRun;

use crate::{cost::CostModel, index::Holder};
use tidemill_proto::{block::BLOCK_TOKENS, ids::Epoch, message::Host};

/// How many times its device blocks a decode worker is given. The surplus waits there, ready to start within a step; more of
/// it would only wait in the wrong place.
const OVERCOMMIT: u64 = 2;

/// The operator's choices.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The decode worker computes a missing suffix of at most this many tokens itself. `None`: by predicted time.
    pub local_tail_tokens: Option<u32>,
    /// Sequences given to one decode worker at a time, at most; `None`: as many as it asks for.
    pub decode_sequences_max: Option<u32>,
    /// A block that is read over the network gets a copy at the reader's near node from this many reads on; `None`: never.
    pub replicate_after: Option<u8>,
}

/// The cluster as it is now.
#[derive(Clone, Debug)]
pub struct Snapshot<'a> {
    pub prefill: Vec<PrefillCandidate>,
    pub decode: Vec<DecodeCandidate<'a>>,
    pub pools: Vec<PoolCandidate<'a>>,
    /// Holders of the sequence's leading blocks, up to the first block that nobody holds.
    pub blocks: Vec<&'a [Holder]>,
    pub block_bytes: u64,
    pub cost: &'a CostModel,
}

#[derive(Clone, Copy, Debug)]
pub struct PrefillCandidate {
    pub worker: Epoch,
    /// Until it could begin another job.
    pub queue_ms: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct DecodeCandidate<'a> {
    pub worker: Epoch,
    pub host: &'a Host,
    pub sequences: u32,
    /// Lengths of those sequences, added up.
    pub tokens: u64,
    /// Prompt tokens it computes itself before those sequences' first tokens.
    pub tail_tokens: u64,
    pub device_blocks: u32,
    /// Longest sequence that the model and those blocks allow.
    pub context_tokens: u32,
    /// Sequences that it asks for at a time.
    pub work_max: u32,
}

#[derive(Clone, Copy, Debug)]
pub struct PoolCandidate<'a> {
    pub node: Epoch,
    pub host: &'a Host,
    /// It is about to end: its blocks can be read, but it takes no new ones.
    pub draining: bool,
    /// Blocks it could store without evicting any,
    pub free_blocks: u64,
    /// and without evicting any that is in use.
    pub room_blocks: u64,
}

/// The needs of the sequence to place.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Prompt and tokens generated before.
    pub tokens: u32,
    /// The longest it can become. A worker that cannot hold that would end it early, where another would not.
    pub tokens_max: u64,
    /// The decode worker must compute all of it, since it needs every position's logits.
    pub local_only: bool,
    /// Another sequence of the same request already has a prefill job: (pool node, leading blocks in common).
    pub joins: Option<(Epoch, u32)>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Place(Placement),
    /// No room now: wait for some.
    Queue,
    /// No decode worker could hold it even alone. The largest holds `context` tokens.
    TooLong {
        context: u32,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub decode: Epoch,
    /// Leading blocks that pool nodes hold.
    pub read: Vec<SourceRun>,
    /// Takes the sequence's new blocks.
    pub home: Option<Epoch>,
    /// Computes the blocks between those read and `expected_blocks`. `None`: there are none, or a job for them runs already.
    pub prefill: Option<Epoch>,
    /// Leading blocks to read, or to await at `home`. The rest is the tail.
    pub expected_blocks: u32,
    /// Prefill worker's own time for this job.
    pub prefill_ms: f64,
    pub ttft_ms: f64,
}

/// Blocks of a sequence that can come from a pool: full ones, without the last token, whose logits must be computed.
pub fn blocks_fetchable(tokens: u32) -> u32 {
    tokens.saturating_sub(1) / BLOCK_TOKENS as u32
}

pub fn schedule(policy: &Policy, snapshot: &Snapshot, demand: &Demand) -> Decision {
    if let Some(context) = snapshot.decode.iter().map(|worker| worker.context_tokens).max().filter(|&c| u64::from(c) < demand.tokens_max) {
        return Decision::TooLong { context };
    }
    let Some((decode, first_step_ms)) = choose_decode(policy, snapshot, demand) else { return Decision::Queue };
    let prompt = choose_prompt(policy, snapshot, demand, &decode);
    Decision::Place(Placement {
        decode: decode.worker,
        read: prompt.read,
        home: prompt.home,
        prefill: prompt.prefill,
        expected_blocks: prompt.expected_blocks,
        prefill_ms: prompt.prefill_ms,
        ttft_ms: prompt.ms + first_step_ms,
    })
}

/// The prefill worker that could begin first.
pub fn choose_prefill(candidates: &[PrefillCandidate]) -> Option<PrefillCandidate> {
    candidates.iter().copied().min_by(|a, b| a.queue_ms.total_cmp(&b.queue_ms).then(a.worker.cmp(&b.worker)))
}

/// Where the prompt's KV comes from, and how long that takes before the decode worker's first step.
struct Prompt {
    read: Vec<SourceRun>,
    home: Option<Epoch>,
    prefill: Option<Epoch>,
    expected_blocks: u32,
    prefill_ms: f64,
    ms: f64,
}

fn choose_prompt(policy: &Policy, snapshot: &Snapshot, demand: &Demand, decode: &DecodeCandidate<'_>) -> Prompt {
    let (cost, reader) = (snapshot.cost, decode.host);
    let fetchable = if demand.local_only { 0 } else { blocks_fetchable(demand.tokens) };
    let held = &snapshot.blocks[..snapshot.blocks.len().min(fetchable as usize)];
    let read = sources::choose_runs(held, &snapshot.pools, reader);
    let blocks = |near| read.iter().filter(|run| run.near == near).map(|run| u64::from(run.blocks)).sum::<u64>();
    let fetch_ms = cost.transfer_ms(blocks(true), blocks(false), snapshot.block_bytes);
    let found = (blocks(true) + blocks(false)) as u32;
    let local = |expected: u32| {
        let cached = u64::from(expected) * BLOCK_TOKENS as u64;
        fetch_ms + cost.decode.prefill_ms(u64::from(demand.tokens) - cached, cached)
    };
    // A sibling's job puts its blocks at that job's home.
    let joined = demand.joins.filter(|(home, _)| snapshot.pools.iter().any(|pool| pool.node == *home));
    let new_blocks = u64::from(demand.tokens / BLOCK_TOKENS as u32 + 1 - found);
    let home = joined.map(|(home, _)| home).or_else(|| sources::choose_home(&snapshot.pools, reader, &read, new_blocks));
    let stay_local =
        |expected| Prompt { read: read.clone(), home, prefill: None, expected_blocks: expected, prefill_ms: 0.0, ms: local(expected) };
    if demand.joins.is_some() {
        return stay_local(joined.map_or(0, |(_, blocks)| blocks.min(fetchable)).max(found));
    }
    let missing_tokens = (fetchable - found) * BLOCK_TOKENS as u32;
    let (Some(_), Some(prefill), true) = (home, choose_prefill(&snapshot.prefill), missing_tokens > 0) else {
        return stay_local(found);
    };
    let short = match policy.local_tail_tokens {
        Some(tokens) => missing_tokens <= tokens,
        None => tails_ms(cost, decode) + local(found) <= fetch_ms + prefill.queue_ms + cost.handover_ms,
    };
    if short {
        return stay_local(found);
    }
    let prefill_ms = fetch_ms + cost.prefill.prefill_ms(missing_tokens.into(), u64::from(found) * BLOCK_TOKENS as u64);
    Prompt {
        prefill: Some(prefill.worker),
        prefill_ms,
        ms: prefill.queue_ms + prefill_ms + cost.handover_ms + local(fetchable) - fetch_ms,
        ..stay_local(fetchable)
    }
}

/// The decode worker with room at which a new sequence waits least, and that wait.
fn choose_decode<'a>(policy: &Policy, snapshot: &Snapshot<'a>, demand: &Demand) -> Option<(DecodeCandidate<'a>, f64)> {
    let first_step_ms = |worker: &DecodeCandidate| {
        let step_ms = snapshot.cost.decode.step_ms(u64::from(worker.sequences) + 1, worker.tokens + u64::from(demand.tokens));
        tails_ms(snapshot.cost, worker) + step_ms
    };
    let roomy = snapshot.decode.iter().filter(|worker| has_room(policy, worker, demand));
    let timed = roomy.map(|worker| (worker, first_step_ms(worker)));
    let least = timed.min_by(|(a, a_ms), (b, b_ms)| a_ms.total_cmp(b_ms).then((a.sequences, a.worker).cmp(&(b.sequences, b.worker))));
    least.map(|(worker, ms)| (*worker, ms))
}

/// How long the worker computes prompts that it was given before.
fn tails_ms(cost: &CostModel, worker: &DecodeCandidate<'_>) -> f64 {
    if worker.tail_tokens == 0 { 0.0 } else { cost.decode.prefill_ms(worker.tail_tokens, 0) }
}

fn has_room(policy: &Policy, worker: &DecodeCandidate<'_>, demand: &Demand) -> bool {
    let blocks = |sequences: u64, tokens: u64| tokens / BLOCK_TOKENS as u64 + sequences;
    let together = blocks(u64::from(worker.sequences) + 1, worker.tokens + u64::from(demand.tokens));
    demand.tokens_max <= worker.context_tokens.into()
        && worker.sequences < policy.decode_sequences_max.map_or(worker.work_max, |most| most.min(worker.work_max))
        && (worker.sequences == 0 || together <= OVERCOMMIT * u64::from(worker.device_blocks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;
    use tidemill_proto::pool::Tier;

    /// Rows of `prompt tokens‥most tokens | prefill queues, ms | decode sequences×tokens+tail | pool leading blocks | decision`.
    /// Workers are named by kind and column: p0, d1, k0.
    fn check(policy: &Policy, table: &str) {
        let mut wrong = String::new();
        for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [tokens, prefill, decode, pools, expected] = cells[..] else { panic!("row `{row}`") };
            let cost = CostModel::default();
            let here = Host("here".into());
            let items = |cell: &str| cell.split_whitespace().filter(|item| *item != "-").map(str::to_owned).enumerate().collect::<Vec<_>>();
            let leading: Vec<usize> = items(pools).iter().map(|(_, blocks)| blocks.parse().unwrap()).collect();
            let holders = |block| leading.iter().enumerate().filter(move |(_, blocks)| block < **blocks);
            let holder = |(i, _): (usize, _)| Holder { node: Epoch(300 + i as u64), tier: Tier::Dram };
            let held: Vec<Vec<Holder>> =
                (0..leading.iter().copied().max().unwrap_or(0)).map(|block| holders(block).map(holder).collect()).collect();
            let snapshot = Snapshot {
                prefill: items(prefill)
                    .iter()
                    .map(|(i, ms)| PrefillCandidate { worker: Epoch(100 + *i as u64), queue_ms: ms.parse().unwrap() })
                    .collect(),
                decode: items(decode)
                    .iter()
                    .map(|(i, item)| {
                        let (sequences, rest) = item.split_once('×').unwrap();
                        let (tokens, tail) = rest.split_once('+').unwrap();
                        DecodeCandidate {
                            worker: Epoch(200 + *i as u64),
                            host: &here,
                            sequences: sequences.parse().unwrap(),
                            tokens: tokens.parse().unwrap(),
                            tail_tokens: tail.parse().unwrap(),
                            device_blocks: 256,
                            context_tokens: 4096,
                            work_max: 8,
                        }
                    })
                    .collect(),
                pools: items(pools)
                    .iter()
                    .map(|(i, _)| PoolCandidate {
                        node: Epoch(300 + *i as u64),
                        host: &here,
                        draining: false,
                        free_blocks: 100 - *i as u64,
                        room_blocks: 100,
                    })
                    .collect(),
                blocks: held.iter().map(Vec::as_slice).collect(),
                block_bytes: 1 << 16,
                cost: &cost,
            };
            let (tokens, tokens_max) = tokens.split_once('‥').unwrap_or((tokens, tokens));
            let (tokens, tokens_max) = (tokens.parse().unwrap(), tokens_max.parse().unwrap());
            let got = describe(schedule(policy, &snapshot, &Demand { tokens, tokens_max, local_only: false, joins: None }));
            if got != expected {
                writeln!(wrong, "{row}\n    got {got}").unwrap();
            }
        }
        assert!(wrong.is_empty(), "\n{wrong}");
    }

    fn describe(decision: Decision) -> String {
        match decision {
            Decision::Queue => "queue".into(),
            Decision::TooLong { context } => format!("too long for {context}"),
            Decision::Place(p) => {
                let name = |kind, epoch: Option<Epoch>| epoch.map_or("-".into(), |e| format!("{kind}{}", e.0 % 100));
                format!(
                    "{} {} {} {}/{}",
                    name("p", p.prefill),
                    name("d", Some(p.decode)),
                    name("k", p.home),
                    p.read.iter().map(|run| run.blocks).sum::<u32>(),
                    p.expected_blocks
                )
            }
        }
    }

    fn policy(local_tail_tokens: Option<u32>) -> Policy {
        Policy { local_tail_tokens, decode_sequences_max: None, replicate_after: None }
    }

    #[test]
    fn always_disaggregated() {
        check(
            &policy(Some(0)),
            "
            100    | 0       | 0×0+0             | 0     | p0 d0 k0 0/6
            96     | 0       | 0×0+0             | 0     | p0 d0 k0 0/5
            97     | 0       | 0×0+0             | 0     | p0 d0 k0 0/6
            16     | 0       | 0×0+0             | 0     | - d0 k0 0/0
            17     | 0       | 0×0+0             | 0     | p0 d0 k0 0/1
            100    | 0       | 0×0+0             | 2     | p0 d0 k0 2/6
            100    | 0       | 0×0+0             | 6     | - d0 k0 6/6
            96     | 0       | 0×0+0             | 6     | - d0 k0 5/5
            100    | -       | 0×0+0             | 2     | - d0 k0 2/2
            100    | 0       | 0×0+0             | -     | - d0 - 0/0
            100    | 50 20   | 0×0+0             | 0     | p1 d0 k0 0/6
            100    | 0       | 0×0+0             | 1 3   | p0 d0 k1 3/6
            100    | 0       | 3×900+0 1×100+0   | 0     | p0 d1 k0 0/6
            100    | 0       | 1×100+900 1×100+0 | 0     | p0 d1 k0 0/6
            ",
        );
    }

    #[test]
    fn room_decides_between_placing_and_queueing() {
        check(
            &policy(Some(0)),
            "
            100    | 0       | -                 | 0     | queue
            100    | 0       | 8×100+0           | 0     | queue
            100    | 0       | 8×100+0 7×4000+0  | 0     | p0 d1 k0 0/6
            5000   | 0       | 0×0+0             | 0     | too long for 4096
            5000   | 0       | -                 | 0     | queue
            9‥4096 | 0       | 0×0+0             | 0     | - d0 k0 0/0
            9‥4097 | 0       | 0×0+0             | 0     | too long for 4096
            4000   | 0       | 2×6000+0          | 0     | queue
            ",
        );
    }

    #[test]
    fn a_suffix_stays_local_when_a_prefill_worker_could_not_even_begin_in_that_time() {
        // The start values make a prompt token cost 1 ms, a step 5 ms and a hand-over 4 ms.
        check(
            &policy(None),
            "
            100    | 0       | 0×0+0             | 0     | p0 d0 k0 0/6
            100    | 200     | 0×0+0             | 0     | - d0 k0 0/0
            100    | 200     | 1×100+50          | 0     | - d0 k0 0/0
            100    | 200     | 1×100+200         | 0     | p0 d0 k0 0/6
            1000   | 200     | 0×0+0             | 0     | p0 d0 k0 0/62
            1000   | 200     | 0×0+0             | 60    | - d0 k0 60/60
            ",
        );
        check(
            &policy(Some(64)),
            "
            65     | 0       | 0×0+0             | 0     | - d0 k0 0/0
            81     | 0       | 0×0+0             | 0     | p0 d0 k0 0/5
            ",
        );
    }

    #[test]
    fn a_sibling_joins_the_prefill_job_of_its_request() {
        let cost = CostModel::default();
        let here = Host("here".into());
        let snapshot = Snapshot {
            prefill: vec![PrefillCandidate { worker: Epoch(1), queue_ms: 0.0 }],
            decode: vec![DecodeCandidate {
                worker: Epoch(2),
                host: &here,
                sequences: 1,
                tokens: 100,
                tail_tokens: 0,
                device_blocks: 256,
                context_tokens: 4096,
                work_max: 8,
            }],
            pools: [3, 4].map(|n| PoolCandidate { node: Epoch(n), host: &here, draining: false, free_blocks: n, room_blocks: n }).to_vec(),
            blocks: Vec::new(),
            block_bytes: 1,
            cost: &cost,
        };
        let demand = Demand { tokens: 100, tokens_max: 200, local_only: false, joins: Some((Epoch(3), 6)) };
        let Decision::Place(placed) = schedule(&policy(Some(0)), &snapshot, &demand) else { panic!() };
        assert_eq!((placed.prefill, placed.home, placed.expected_blocks), (None, Some(Epoch(3)), 6));
        let demand = Demand { local_only: true, joins: None, ..demand };
        let Decision::Place(placed) = schedule(&policy(Some(0)), &snapshot, &demand) else { panic!() };
        assert_eq!((placed.prefill, placed.expected_blocks), (None, 0), "scoring needs every position's logits");
    }
}
