//! Decisions as tables.

use super::*;
use crate::index::Holder;
use crate::{
    class::{Class, OnMiss},
    load::QueuedJob,
};
use std::{collections::BTreeMap, fmt::Write};
use tidemill_proto::{ids::RequestId, message::Role, pool::Tier};

/// Rows of `prompt tokens‥most tokens | prefill queues, ms | decode sequences×tokens+tail | pool leading blocks | decision`. Workers are
/// named by kind and column: p0, d1, k0. They are on host `a`, or on the one after an `@`. A decision is `prefill decode home blocks
/// read/blocks expected`.
fn check(policy: &Policy, table: &str) {
    check_as(policy, &Classes::default(), None, table);
}

/// Checks a sequence of the default class that is due in `due_ms`. A prefill queue `50!90` is one job of 50 ms, due in 90 ms.
fn check_as(policy: &Policy, classes: &Classes, due_ms: Option<f64>, table: &str) {
    let mut wrong = String::new();
    for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [tokens, prefill, decode, pools, expected] = cells[..] else { panic!("row `{row}`") };
        let cost = CostModel::default();
        let hosts: BTreeMap<String, Host> = ["a", "b", "c"].map(|name| (name.to_owned(), Host(name.into()))).into();
        let items = |cell: &str| -> Vec<(usize, (String, &Host))> {
            let item = |item: &str| {
                let (item, host) = item.split_once('@').unwrap_or((item, "a"));
                (item.to_owned(), &hosts[host])
            };
            cell.split_whitespace().filter(|item| *item != "-").map(item).enumerate().collect()
        };
        let leading: Vec<usize> = items(pools).iter().map(|(_, (blocks, _))| blocks.parse().unwrap()).collect();
        let holders = |block| leading.iter().enumerate().filter(move |(_, blocks)| block < **blocks);
        let holder = |(i, _): (usize, _)| Holder { node: Epoch(300 + i as u64), tier: Tier::Dram };
        let held: Leading = (0..leading.iter().copied().max().unwrap_or(0)).map(|block| holders(block).map(holder)).collect();
        let queues: Vec<PrefillQueue> = items(prefill).iter().map(|(i, (ms, _))| queue(*i as u64, ms)).collect();
        let with_held = |(_, (item, _)): &(usize, (String, &Host))| {
            let mut classes = NOBODY;
            classes[0] = held_there(item);
            classes
        };
        let loads: Vec<[ClassLoad; CLASSES_MAX]> = items(decode).iter().map(with_held).collect();
        let snapshot = Snapshot {
            prefill: items(prefill)
                .iter()
                .map(|(i, (_, host))| PrefillCandidate {
                    worker: Epoch(100 + *i as u64),
                    host,
                    queue_ms: queues[*i].wait_ms(Duration::ZERO),
                    queue: &queues[*i],
                    cached_blocks: 0,
                    cost: cost.of_role(Role::Prefill),
                })
                .collect(),
            decode: items(decode)
                .iter()
                .zip(&loads)
                .map(|((i, (_, host)), classes)| DecodeCandidate {
                    worker: Epoch(200 + *i as u64),
                    host,
                    sequences: classes[0].sequences,
                    tokens: classes[0].tokens,
                    decoding: classes[0].sequences,
                    classes,
                    device_blocks: 256,
                    context_tokens: 4096,
                    work_max: policy.decode_sequences_max.unwrap_or(8),
                    cached_blocks: 0,
                    cost: cost.of_role(Role::Decode),
                })
                .collect(),
            pools: items(pools)
                .iter()
                .map(|(i, (_, host))| PoolCandidate {
                    node: Epoch(300 + *i as u64),
                    host,
                    draining: false,
                    free_blocks: 100 - *i as u64,
                    room_blocks: 100,
                    object: ObjectSpeed::default(),
                })
                .collect(),
            blocks: &held,
            block_bytes: 1 << 16,
            cost: &cost,
            classes,
            now: Duration::ZERO,
            context_tokens: (!items(decode).is_empty()).then_some(4096),
        };
        let (tokens, tokens_max) = tokens.split_once('‥').unwrap_or((tokens, tokens));
        let (tokens, tokens_max) = (tokens.parse().unwrap(), tokens_max.parse().unwrap());
        let got = describe(schedule(
            policy,
            &snapshot,
            &Demand { tokens, tokens_max, local_only: false, joins: None, class: ClassId::default(), probe: false, due_ms, seed: 1 },
        ));
        if got != expected {
            writeln!(wrong, "{row}\n    got {got}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// A queue with one job of the given ms, with its due time if there is one.
fn queue(request: u64, item: &str) -> PrefillQueue {
    let (ms, due_ms) = item.split_once('!').map_or((item, None), |(ms, due_ms)| (ms, Some(due_ms.parse().unwrap())));
    let (ms, due) = (ms.parse().unwrap(), due_ms.map(Duration::from_millis));
    let mut queue = PrefillQueue::default();
    if ms > 0.0 {
        queue.push(Duration::ZERO, QueuedJob { request: RequestId(request), class: ClassId::default(), priority: 1, due, ms });
    }
    queue
}

const NOBODY: [ClassLoad; CLASSES_MAX] = [ClassLoad { sequences: 0, tokens: 0, tail_tokens: 0 }; CLASSES_MAX];

/// The load of the default class, from `sequences×tokens+tail`.
fn held_there(item: &str) -> ClassLoad {
    let (sequences, rest) = item.split_once('×').unwrap();
    let (tokens, tail) = rest.split_once('+').unwrap();
    ClassLoad { sequences: sequences.parse().unwrap(), tokens: tokens.parse().unwrap(), tail_tokens: tail.parse().unwrap() }
}

fn describe(decision: Decision) -> String {
    match decision {
        Decision::Queue => "queue".into(),
        Decision::Hold => "hold".into(),
        Decision::Reject { .. } => "reject".into(),
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
    Policy { name: PolicyName::LeastTtft, local_tail_tokens, ..Policy::default() }
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
    let (cost, here, idle, classes) = (CostModel::default(), Host("here".into()), PrefillQueue::default(), Classes::default());
    let snapshot = Snapshot {
        prefill: vec![PrefillCandidate {
            worker: Epoch(1),
            host: &here,
            queue_ms: 0.0,
            queue: &idle,
            cached_blocks: 0,
            cost: cost.of_role(Role::Prefill),
        }],
        decode: vec![DecodeCandidate {
            worker: Epoch(2),
            host: &here,
            sequences: 1,
            tokens: 100,
            decoding: 0,
            classes: &NOBODY,
            device_blocks: 256,
            context_tokens: 4096,
            work_max: 8,
            cached_blocks: 0,
            cost: cost.of_role(Role::Decode),
        }],
        pools: [3, 4]
            .map(|n| PoolCandidate {
                node: Epoch(n),
                host: &here,
                draining: false,
                free_blocks: n,
                room_blocks: n,
                object: ObjectSpeed::default(),
            })
            .to_vec(),
        blocks: &Leading::default(),
        block_bytes: 1,
        cost: &cost,
        classes: &classes,
        now: Duration::ZERO,
        context_tokens: Some(4096),
    };
    let demand = Demand {
        tokens: 100,
        tokens_max: 200,
        local_only: false,
        joins: Some((Epoch(3), 6)),
        class: ClassId::default(),
        probe: false,
        due_ms: None,
        seed: 1,
    };
    let Decision::Place(placed) = schedule(&policy(Some(0)), &snapshot, &demand) else { panic!() };
    assert_eq!((placed.prefill, placed.home, placed.expected_blocks), (None, Some(Epoch(3)), 6));
    let demand = Demand { local_only: true, joins: None, ..demand };
    let Decision::Place(placed) = schedule(&policy(Some(0)), &snapshot, &demand) else { panic!() };
    assert_eq!((placed.prefill, placed.expected_blocks), (None, 0), "scoring needs every position's logits");
}

#[test]
fn mooncakes_policies_use_prefixes_and_queues_as_the_paper_says() {
    let of = |name| Policy { name, ..Policy::default() };
    let decode = "0×0+0@c";
    let table = |rows: &str| rows.replace("D", decode);
    // A prompt token costs 1 ms, so 60 blocks cost a second.
    check(
        &of(PolicyName::LoadBalancing),
        &table(
            "
            1000 | 50@a 20@b   | D | 0@a 0@b 0@c   | p1 d0 k1 0/62
            1000 | 50@a 60@b   | D | 60@a 0@b 0@c  | p0 d0 k0 60/62
            1000 | 90@a 60@b   | D | 60@a 0@b 0@c  | p1 d0 k1 0/62
            1000 | -           | D | 60@a 0@b 0@c  | - d0 k2 60/60
            ",
        ),
    );
    check(
        &of(PolicyName::LocalCache),
        &table(
            "
            1000 | 90@a 60@b   | D | 60@a 0@b 0@c  | p0 d0 k0 60/62
            1000 | 9000@a 60@b | D | 60@a 0@b 0@c  | p1 d0 k1 0/62
            1000 | 9000@a 60@b | D | 60@a 9@b 0@c  | p1 d0 k1 9/62
            ",
        ),
    );
    check(
        &of(PolicyName::GlobalCache),
        &table(
            "
            1000 | 90@a 60@b   | D | 60@a 0@b 0@c  | p1 d0 k1 60/62
            1000 | 60@a 60@b   | D | 60@a 0@b 0@c  | p0 d0 k0 60/62
            1000 | 900@a 60@b  | D | 60@a 45@b 0@c | p1 d0 k1 45/62
            1000 | 900@a 60@b  | D | 60@a 30@b 0@c | p1 d0 k1 60/62
            ",
        ),
    );
    check(
        &of(PolicyName::Colocated),
        "
        1000 | 0 | 0×0+0 1×100+0        | 0  | - d0 k0 0/0
        1000 | 0 | 1×100+500 1×100+0    | 60 | - d1 k0 60/60
        ",
    );
    check(
        &of(PolicyName::Disaggregated),
        "
        100  | 9000 8000 | 0×0+0         | 0  | p1 d0 k0 0/6
        100  | 9000      | 0×0+0         | 6  | - d0 k0 6/6
        ",
    );
}

#[test]
fn the_random_policy_draws_from_all_prefill_workers_and_the_same_for_the_same_request() {
    let (cost, here, idle, classes) = (CostModel::default(), Host("a".into()), PrefillQueue::default(), Classes::default());
    let prefill = (0..4).map(|n| PrefillCandidate {
        worker: Epoch(n),
        host: &here,
        queue_ms: 0.0,
        queue: &idle,
        cached_blocks: 0,
        cost: cost.of_role(Role::Prefill),
    });
    let decode = DecodeCandidate {
        worker: Epoch(9),
        host: &here,
        sequences: 0,
        tokens: 0,
        decoding: 0,
        classes: &NOBODY,
        device_blocks: 256,
        context_tokens: 4096,
        work_max: 8,
        cached_blocks: 0,
        cost: cost.of_role(Role::Decode),
    };
    let pool =
        PoolCandidate { node: Epoch(10), host: &here, draining: false, free_blocks: 9, room_blocks: 9, object: ObjectSpeed::default() };
    let snapshot = Snapshot {
        prefill: prefill.collect(),
        decode: vec![decode],
        pools: vec![pool],
        blocks: &Leading::default(),
        block_bytes: 1,
        cost: &cost,
        classes: &classes,
        now: Duration::ZERO,
        context_tokens: Some(4096),
    };
    let policy = Policy { name: PolicyName::Random, ..Policy::default() };
    let drawn = |seed| {
        let demand = Demand {
            tokens: 100,
            tokens_max: 200,
            local_only: false,
            joins: None,
            class: ClassId::default(),
            probe: false,
            due_ms: None,
            seed,
        };
        let Decision::Place(placement) = schedule(&policy, &snapshot, &demand) else { panic!() };
        placement.prefill.unwrap().0
    };
    let mut counts = [0; 4];
    (0..400).for_each(|seed| counts[drawn(seed) as usize] += 1);
    assert!(counts.iter().all(|count| (60..140).contains(count)), "{counts:?}");
    assert_eq!(drawn(7), drawn(7));
}

/// The default class alone, with these limits.
fn classes(tpot_ms: f64, on_miss: OnMiss) -> Classes {
    let standard = Classes::default().get(ClassId::default()).clone();
    Classes::new(vec![Class { ttft_ms: Some(1000.0), tpot_ms: Some(tpot_ms), on_miss, ..standard }]).unwrap()
}

#[test]
fn goodput_weighs_the_sequences_own_limits_against_what_others_lose() {
    // A prompt token costs 1 ms, a step 5 ms and half a millisecond per sequence.
    let policy = Policy { local_tail_tokens: Some(0), decode_sequences_max: Some(40), ..Policy::default() };
    check_as(
        &policy,
        &classes(20.0, OnMiss::Late),
        Some(1000.0),
        "
        300  | 500 500          | 0×0+0               | 0  | p0 d0 k0 0/18
        300  | 500!600 500      | 0×0+0               | 0  | p1 d0 k0 0/18
        300  | 500!600 600!2000 | 0×0+0               | 0  | p1 d0 k0 0/18
        300  | 500!600 600!1020 | 0×0+0               | 0  | p0 d0 k0 0/18
        300  | 0                | 25×2500+0 5×500+200 | 0  | p0 d1 k0 0/18
        300  | 0                | 2×200+0 5×500+0     | 0  | p0 d0 k0 0/18
        3000 | 500!600 400!3000 | 0×0+0               | 0  | p1 d0 k0 0/187
        ",
    );
}

#[test]
fn a_prompt_beside_a_batch_takes_the_time_that_the_batchs_limit_leaves() {
    let policy = Policy { decode_sequences_max: Some(40), ..Policy::default() };
    // A step of the four sequences takes 7 ms.
    for (tpot_ms, expected) in [(100.0, "- d0 k0 0/0"), (10.0, "p0 d0 k0 0/18")] {
        let table = format!("300 | 500!600 | 4×400+0 | 0 | {expected}");
        check_as(&policy, &classes(tpot_ms, OnMiss::Late), Some(1000.0), &table);
    }
}

#[test]
fn what_cannot_be_met_is_refused_held_back_or_late_as_its_class_says() {
    let policy = Policy { local_tail_tokens: Some(0), decode_sequences_max: Some(40), ..Policy::default() };
    let (at_once, long, alone) = ("p0 d0 k0 0/18", "p0 d0 k0 0/187", "- d0 - 0/0");
    for (on_miss, [late, early, crowded, idle]) in [
        (OnMiss::Late, [long, at_once, at_once, alone]),
        (OnMiss::Queue, [long, at_once, "hold", alone]),
        (OnMiss::Reject, ["reject", at_once, "reject", alone]),
    ] {
        let table = format!(
            "
            3000 | 0 | 0×0+0     | 0 | {late}
            300  | 0 | 0×0+0     | 0 | {early}
            300  | 0 | 30×3000+0 | 0 | {crowded}
            300  | - | 0×0+0     | - | {idle}
            "
        );
        check_as(&policy, &classes(18.0, on_miss), Some(1000.0), &table);
    }
}

/// Four leading blocks are in memory and eight more in object storage. They are read if that takes less time than to compute them.
#[test]
fn blocks_are_read_from_object_storage_where_that_beats_computing() {
    let (cost, classes, here) = (CostModel::default(), Classes::default(), Host("a".into()));
    let computed_ms = cost.of_role(Role::Decode).prefill_ms(8 * 16, 4 * 16);
    let holder = |tier| [Holder { node: Epoch(3), tier }];
    let mut blocks = Leading::default();
    blocks.push(4, holder(Tier::Dram));
    blocks.push(8, holder(Tier::Object));
    let decide = |object: ObjectSpeed| {
        let snapshot = Snapshot {
            prefill: vec![],
            decode: vec![DecodeCandidate {
                worker: Epoch(2),
                host: &here,
                sequences: 0,
                tokens: 0,
                decoding: 0,
                classes: &NOBODY,
                device_blocks: 256,
                context_tokens: 4096,
                work_max: 8,
                cached_blocks: 0,
                cost: cost.of_role(Role::Decode),
            }],
            pools: vec![PoolCandidate { node: Epoch(3), host: &here, draining: false, free_blocks: 9, room_blocks: 9, object }],
            blocks: &blocks,
            block_bytes: 1000,
            cost: &cost,
            classes: &classes,
            now: Duration::ZERO,
            context_tokens: Some(4096),
        };
        let demand = Demand {
            tokens: 300,
            tokens_max: 400,
            local_only: false,
            joins: None,
            class: ClassId::default(),
            probe: false,
            due_ms: None,
            seed: 1,
        };
        let Decision::Place(placed) = schedule(&policy(None), &snapshot, &demand) else { panic!() };
        (placed.read.iter().map(|run| run.blocks).sum::<u32>(), placed.ttft_ms)
    };
    let speed = |latency_ms| ObjectSpeed { latency_ms, bytes_per_ms: 1e6 };
    let (read, fast_ms) = decide(speed(computed_ms / 2.0));
    assert_eq!(read, 12);
    let (read, ms) = decide(speed(computed_ms / 4.0));
    assert!(read == 12 && ms < fast_ms, "reading takes its time: {ms} and {fast_ms} ms");
    assert_eq!(decide(speed(computed_ms)).0, 4, "as slow as computing");
    assert_eq!(decide(ObjectSpeed { latency_ms: 0.0, bytes_per_ms: 8000.0 / computed_ms / 2.0 }).0, 4, "a thin line");
    assert_eq!(decide(ObjectSpeed::default()).0, 4, "nothing is read at the moment");
}
