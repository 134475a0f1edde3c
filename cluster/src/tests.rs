//! The core under events in any order: every request ends exactly once, nothing leaks, and the state is consistent after each step.

use crate::{
    Action, Cluster, ClusterSettings, Failure, NewRequest, Outcome, Rejection, RequestEvent,
    admission::AdmissionPolicy,
    autoscale::{AutoscaleSettings, steps::Range},
    class::{Class, ClassId, Classes, OnMiss},
    lifecycle::{HANDOVER_MAX, LOSSES_MAX},
    membership::tests::{engine, model, register, register_at},
    schedule::Policy,
};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, Era, Token},
    frame::Version,
    ids::{Epoch, RequestId, SequenceId},
    message::{
        CacheEvent, DecodeJob, EngineInfo, Finish, PoolEvent, PrefillOutcome, Provenance, Report, RoleInfo, SequenceToken, ToWorker,
        TokensBySource, WorkerEvent,
    },
    pool::Tier,
    sampling::{Sampling, StopRule},
    thought::{ReaderState, ThoughtLimit, ThoughtReader},
};

const TIMEOUT: Duration = Duration::from_secs(60);
const STOP: Token = 7;
const START: Duration = Duration::from_secs(1000);

pub(crate) fn settings() -> ClusterSettings {
    ClusterSettings {
        id_base: 1 << 40,
        admission: AdmissionPolicy { queue_max: 6 },
        policy: Policy { local_tail_tokens: Some(0), decode_sequences_max: Some(3), replicate_after: Some(2), ..Policy::default() },
        classes: classes(),
        queue_wait_max: Duration::from_secs(20),
        heartbeat_dead: Duration::from_secs(5),
        probes: None,
        autoscale: Some(AutoscaleSettings {
            prefill: Range { floor: 0, ceiling: 8 },
            decode: Range { floor: 1, ceiling: 8 },
            warm: 0,
            window: Duration::from_secs(6),
            start: Duration::from_secs(5),
            cooldown: Duration::from_secs(10),
            schedules: Vec::new(),
            clock_zero: Duration::ZERO,
        }),
    }
}

/// The three default classes, and one with limits that are soon out of reach and that rejects late requests.
fn classes() -> Classes {
    let three = Classes::default();
    let all = three.iter().map(|(_, class)| class.clone());
    let strict = Class {
        name: "strict".into(),
        service_tier: "strict".into(),
        ttft_ms: Some(60.0),
        tpot_ms: Some(9.0),
        priority: 1,
        weight: 1.0,
        on_miss: OnMiss::Reject,
    };
    Classes::new(all.chain([strict]).collect()).unwrap()
}

pub(crate) fn request(tokens: usize, choices: u32) -> NewRequest {
    NewRequest {
        prompt: (0..tokens as u32).collect(),
        salt: Vec::new(),
        class: ClassId::default(),
        sampling: Sampling::default(),
        stop: StopRule { max_tokens: 4, min_tokens: 0, stop_tokens: vec![STOP] },
        constraint: None,
        thought: None,
        choices,
        prompt_logprobs: None,
        embeds: None,
        timeout: TIMEOUT,
    }
}

fn drain(cluster: &mut Cluster) -> Vec<Action> {
    cluster.check_integrity();
    std::iter::from_fn(|| cluster.poll_action()).collect()
}

fn decode_jobs(actions: &[Action]) -> Vec<(Epoch, DecodeJob)> {
    let job = |action: &Action| match action {
        Action::Send { worker, message: ToWorker::Decode(job) } => Some((*worker, job.clone())),
        _ => None,
    };
    actions.iter().filter_map(job).collect()
}

fn token(sequence: SequenceId, index: u32, token: Token) -> WorkerEvent {
    WorkerEvent::Tokens(vec![SequenceToken { sequence, index, token, logprob: None }])
}

fn prefill_jobs(actions: &[Action]) -> Vec<(Epoch, RequestId)> {
    let job = |action: &Action| match action {
        Action::Send { worker, message: ToWorker::Prefill(job) } => Some((*worker, job.request)),
        _ => None,
    };
    actions.iter().filter_map(job).collect()
}

/// A cluster with a pool node, and with a prefill and a decode worker.
fn one_of_each() -> (Cluster, [Epoch; 2], Duration) {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("k", RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() })).unwrap();
    let prefill = cluster.register(now, register("p", RoleInfo::Prefill(engine(1)))).unwrap();
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    (cluster, [prefill, decode], now)
}

fn finished(sequence: SequenceId, reason: Finish) -> WorkerEvent {
    WorkerEvent::Finished { sequence, reason, provenance: Provenance::default() }
}

/// An engine with memory for 128 tokens, an eighth of [`engine`]'s.
fn small_engine() -> EngineInfo {
    EngineInfo { device_blocks: 8, ..engine(1) }
}

#[test]
fn a_lost_pool_node_ends_the_waiting_and_the_prefill() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let pool = cluster.register(now, register("k", RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() })).unwrap();
    let prefill = cluster.register(now, register("p", RoleInfo::Prefill(engine(1)))).unwrap();
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let id = cluster.submit(now, request(40, 2)).unwrap();
    let jobs = decode_jobs(&drain(&mut cluster));
    assert_eq!(jobs.iter().map(|(worker, job)| (*worker, job.expected_blocks)).collect::<Vec<_>>(), [(decode, 2), (decode, 2)]);
    cluster.worker_event(now, decode, token(jobs[0].1.sequence, 0, 1));
    drain(&mut cluster);
    cluster.worker_down(now, pool);
    let stop = ToWorker::StopWaiting { sequence: jobs[1].1.sequence };
    let expected = [
        Action::Send { worker: prefill, message: ToWorker::CancelPrefill { request: id } },
        Action::Send { worker: decode, message: stop },
    ];
    assert_eq!(drain(&mut cluster), expected, "the sequence that has a token waits for nothing");
}

#[test]
fn a_sequence_goes_where_its_beginning_is_until_that_worker_is_busy() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let idle = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let cached = cluster.register(now, register("e", RoleInfo::Decode(engine(1)))).unwrap();
    let tokens: Vec<Token> = (0..400).collect();
    let stored: Vec<CacheEvent> = Chain::new(&engine(1).layout, b"", &tokens).keys().iter().map(|key| CacheEvent::Stored(*key)).collect();
    cluster.worker_event(now, cached, WorkerEvent::CacheEvents { from: 0, events: stored });
    // An engine may not send events of a pool node: its blocks can be read by no other worker.
    let event = PoolEvent::Stored { key: BlockKey([3; 16]), tier: Tier::Dram };
    cluster.worker_event(now, idle, WorkerEvent::PoolEvents { from: 0, events: vec![event] });
    let known: Vec<usize> = cluster.view(now).members.iter().map(|member| member.indexed_blocks).collect();
    assert_eq!(known, [0, 25]);

    let mut place = |tokens| {
        cluster.submit(now, request(tokens, 1)).unwrap();
        let jobs = decode_jobs(&drain(&mut cluster));
        (jobs[0].0, jobs[0].1.expected_blocks)
    };
    assert_eq!(place(400), (cached, 0), "it has the blocks itself: there is nothing to fetch");
    assert_eq!(place(400), (idle, 0), "one popular prompt does not make one worker the bottleneck");

    let events = vec![CacheEvent::Evicted(BlockKey([9; 16]))];
    cluster.worker_event(now, cached, WorkerEvent::CacheEvents { from: 99, events });
    let actions = drain(&mut cluster);
    assert!(actions.iter().any(|action| matches!(action, Action::Close { worker, .. } if *worker == cached)), "a gap: {actions:?}");
}

#[test]
fn a_worker_that_dies_after_the_last_token_costs_nothing() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let other = cluster.register(now, register("e", RoleInfo::Decode(engine(1)))).unwrap();
    for (tokens, outcome) in [(vec![1, 2, 3, 4], Outcome::Length), (vec![1, STOP], Outcome::Stop(STOP))] {
        let id = cluster.submit(now, request(5, 1)).unwrap();
        let (worker, job) = decode_jobs(&drain(&mut cluster)).remove(0);
        for (index, &drawn) in tokens.iter().enumerate() {
            cluster.worker_event(now, worker, token(job.sequence, index as u32, drawn));
        }
        drain(&mut cluster);
        cluster.worker_down(now, worker);
        let actions = drain(&mut cluster);
        let [Action::Client { request, event: RequestEvent::Finished { outcome: got, .. } }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((*request, got), (id, &outcome));
    }
    assert!([decode, other].iter().all(|epoch| cluster.membership.get(*epoch).is_none()));
}

#[test]
fn new_sequences_wait_behind_those_that_wait_already() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    for _ in 0..5 {
        cluster.submit(now, request(5, 1)).unwrap();
    }
    let running: Vec<_> = decode_jobs(&drain(&mut cluster)).into_iter().map(|(_, job)| job.sequence).collect();
    assert_eq!((running.len(), cluster.view(now).sequences_waiting), (3, 2));
    cluster.worker_event(now, decode, finished(running[0], Finish::Length));
    let next = decode_jobs(&drain(&mut cluster)).remove(0).1.sequence;
    cluster.submit(now, request(5, 1)).unwrap();
    cluster.worker_event(now, decode, finished(running[1], Finish::Length));
    let after = decode_jobs(&drain(&mut cluster)).remove(0).1.sequence;
    assert!(running[2] < next && next < after, "first come, first served");
    cluster.worker_event(now, decode, finished(running[2], Finish::Length));
    assert!(after < decode_jobs(&drain(&mut cluster)).remove(0).1.sequence);
}

/// Submits a request of a class and a tenant; returns its only sequence's id and the positions that its client was told.
fn submit_as(cluster: &mut Cluster, now: Duration, tier: &str, salt: &[u8], tokens: usize) -> (RequestId, Vec<u32>) {
    let class = classes().by_tier(Some(tier)).unwrap();
    let id = cluster.submit(now, NewRequest { class, salt: salt.to_vec(), ..request(tokens, 1) }).unwrap();
    let position = |action: &Action| match action {
        Action::Client { request, event: RequestEvent::Waiting { position, .. } } if *request == id => Some(*position),
        _ => None,
    };
    let positions = drain(cluster).iter().filter_map(position).collect();
    (id, positions)
}

/// Ends the running sequences one by one, and returns the requests in the order in which they got their places.
fn order_of_places(cluster: &mut Cluster, now: Duration, decode: Epoch, mut running: Vec<SequenceId>) -> Vec<RequestId> {
    let mut placed = Vec::new();
    while let Some(sequence) = running.pop() {
        cluster.worker_event(now, decode, finished(sequence, Finish::Length));
        for (_, job) in decode_jobs(&drain(cluster)) {
            placed.push(job.request);
            running.push(job.sequence);
        }
    }
    placed
}

#[test]
fn the_queue_goes_by_priority_and_by_tenant_and_clients_hear_their_places() {
    let (mut cluster, now) = (Cluster::new(ClusterSettings { admission: AdmissionPolicy { queue_max: 20 }, ..settings() }, model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let mut running = Vec::new();
    let first = classes().by_tier(Some("priority")).unwrap();
    for _ in 0..3 {
        cluster.submit(now, NewRequest { class: first, salt: b"flood".to_vec(), ..request(300, 1) }).unwrap();
        running.extend(decode_jobs(&drain(&mut cluster)).into_iter().map(|(_, job)| job.sequence));
    }
    let mut submit = |tier, salt: &[u8]| submit_as(&mut cluster, now, tier, salt, 100);
    let (batch, place) = submit("flex", b"quiet");
    assert_eq!(place, [1]);
    let flood: Vec<_> = (0..3).map(|_| submit("default", b"flood")).collect();
    assert_eq!(flood.iter().map(|(_, place)| place[0]).collect::<Vec<_>>(), [1, 2, 3], "batch comes after all of them");
    let (quiet, place) = submit("default", b"quiet");
    assert_eq!(place, [1], "its tenant was served less");
    let (urgent, place) = submit("priority", b"flood");
    assert_eq!(place, [1]);
    running.truncate(1);
    let order = order_of_places(&mut cluster, now, decode, running);
    assert_eq!(order, [urgent, quiet, flood[0].0, flood[1].0, flood[2].0, batch]);
}

#[test]
fn a_class_waits_for_no_place_of_a_lower_one() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let flood: Vec<_> = (0..6).map(|_| submit_as(&mut cluster, now, "default", b"flood", 40).1).collect();
    assert_eq!(flood.concat(), [1, 2, 3], "three have a place, and three wait");
    let submit = |cluster: &mut Cluster, tier| {
        let class = classes().by_tier(Some(tier)).unwrap();
        cluster.submit(now, NewRequest { class, salt: b"quiet".to_vec(), ..request(40, 1) }).unwrap();
        decode_jobs(&drain(cluster)).len()
    };
    let placed: Vec<_> =
        ["flex", "default", "priority", "priority", "priority", "priority"].map(|tier| submit(&mut cluster, tier)).to_vec();
    assert_eq!(placed, [0, 0, 1, 1, 1, 0], "the worker makes room until the first class fills it by itself");
}

#[test]
fn requests_that_come_together_are_placed_told_and_given_up_together() {
    let (mut cluster, now) = (Cluster::new(ClusterSettings { admission: AdmissionPolicy { queue_max: 20 }, ..settings() }, model()), START);
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let flood = |tokens| NewRequest { salt: b"flood".to_vec(), ..request(tokens, 1) };
    let too_long = vec![flood(300), flood(1_000_000)];
    assert!(cluster.submit_all(now, too_long).is_err());
    assert!(drain(&mut cluster).is_empty() && cluster.view(now).requests == 0, "all or none");
    let all = cluster.submit_all(now, vec![flood(300); 6]).unwrap();
    let actions = drain(&mut cluster);
    let placed: Vec<_> = decode_jobs(&actions).into_iter().map(|(_, job)| job.request).collect();
    assert!(!placed.is_empty() && placed.len() < all.len() && placed[..] == all[..placed.len()], "in the order of their arrival");
    let told = actions.iter().filter_map(|action| match action {
        Action::Client { request, event: RequestEvent::Waiting { position, .. } } => Some((*request, *position)),
        _ => None,
    });
    let waiting = all[placed.len()..].iter().copied();
    assert_eq!(told.collect::<Vec<_>>(), waiting.zip(1..).collect::<Vec<_>>());
    let (quiet, _) = submit_as(&mut cluster, now, "default", b"quiet", 300);
    cluster.cancel_all(now, &all);
    let next: Vec<_> = decode_jobs(&drain(&mut cluster)).into_iter().map(|(_, job)| job.request).collect();
    assert_eq!(next, [quiet], "nothing of what is given up gets a place on the way");
}

#[test]
fn a_full_queue_displaces_the_newest_of_the_flood_and_tells_it() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let placed = (0..3).map(|_| "priority").chain((0..6).map(|_| "default"));
    let flood: Vec<_> = placed.map(|tier| submit_as(&mut cluster, now, tier, b"flood", 40).0).collect();
    let more = NewRequest { salt: b"flood".to_vec(), ..request(40, 1) };
    assert!(matches!(cluster.submit(now, more).unwrap_err(), Rejection::Full { .. }), "it displaces nobody, not even itself");
    let quiet = cluster.submit(now, NewRequest { salt: b"quiet".to_vec(), ..request(40, 2) }).unwrap();
    let actions = drain(&mut cluster);
    let displaced = actions.iter().filter_map(|action| match action {
        Action::Client { request, event: RequestEvent::Finished { outcome: Outcome::Failed(Failure::Displaced { .. }), .. } } => {
            Some(*request)
        }
        _ => None,
    });
    assert_eq!(displaced.collect::<Vec<_>>(), [flood[8], flood[7]]);
    assert!(!cluster.is_active(flood[8]) && cluster.is_active(flood[6]) && cluster.is_active(quiet));
    let (urgent, place) = submit_as(&mut cluster, now, "priority", b"flood", 40);
    assert_eq!(place, [1]);
    assert!(!cluster.is_active(flood[6]) && cluster.is_active(urgent), "a higher priority displaces its own tenant's lower one, too");
    assert_eq!(cluster.view(now).sequences_waiting, 6);
}

#[test]
fn one_that_does_not_fit_lets_others_pass_and_not_for_ever() {
    let admission = AdmissionPolicy { queue_max: 500 };
    let (mut cluster, now) = (Cluster::new(ClusterSettings { admission, ..settings() }, model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(small_engine()))).unwrap();
    let first = cluster.submit(now, request(120, 1)).unwrap();
    let running = decode_jobs(&drain(&mut cluster)).remove(0).1;
    assert_eq!(running.request, first);
    let (large, _) = submit_as(&mut cluster, now, "default", b"", 124);
    // Short ones fit beside the running one; the large one does not, and waits for its turn.
    let mut passed = 0;
    for _ in 0..200 {
        cluster.submit(now, request(5, 1)).unwrap();
        for (_, job) in decode_jobs(&drain(&mut cluster)) {
            assert_ne!(job.request, large, "there is no room for it");
            passed += 1;
            cluster.worker_event(now, decode, finished(job.sequence, Finish::Length));
        }
    }
    let most = crate::requests::order::OVERTAKEN_MAX as usize;
    let share = crate::requests::order::OVERDUE_EVERY as usize;
    assert!((most..most + share).contains(&passed), "{passed} went first");
    cluster.worker_event(now, decode, finished(running.sequence, Finish::Length));
    assert_eq!(decode_jobs(&drain(&mut cluster))[0].1.request, large);
}

#[test]
fn a_class_that_is_not_served_late_is_refused_in_time() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let strict = |tokens| NewRequest { class: classes().by_tier(Some("strict")).unwrap(), ..request(tokens, 1) };
    cluster.submit(now, strict(20)).expect("20 ms of prompt and a step are within 60 ms");
    drain(&mut cluster);
    let rejection = cluster.submit(now, strict(500)).unwrap_err();
    assert!(matches!(rejection, Rejection::Late { retry_after_ms: 250..2000 }), "{rejection:?}");
    assert_eq!(drain(&mut cluster), [], "nobody has heard of it");
    cluster.submit(now, request(500, 1)).expect("others are served late");
    drain(&mut cluster);
    let refused = (0..100).take_while(|_| cluster.submit(now, strict(500)).is_err()).count();
    assert_eq!(refused, 31, "now and then one is served all the same: predictions may be wrong");
}

#[test]
fn a_forecast_says_how_long_a_prompt_would_take_and_changes_nothing() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let strict = classes().by_tier(Some("strict")).unwrap();
    assert_eq!(cluster.forecast(now, 20, strict).ttft_ms, None, "there is no worker");
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let [short, long] = [20, 500].map(|tokens| cluster.forecast(now, tokens, strict).ttft_ms.unwrap());
    assert!(short < 60.0 && (250.0..2000.0).contains(&long), "{short} and {long}, though the class rejects what is late");
    assert_eq!(cluster.forecast(now, 5000, strict).ttft_ms, None, "longer than any worker's context");
    assert_eq!(drain(&mut cluster), []);
    for _ in 0..3 {
        cluster.submit(now, request(40, 1)).unwrap();
    }
    let full = cluster.forecast(now, 20, ClassId::default());
    assert_eq!((full.waiting, full.ttft_ms), (0, Some(f64::INFINITY)), "no place, and none has become free yet");
    cluster.submit(now, request(40, 1)).unwrap();
    assert_eq!(cluster.forecast(now, 20, ClassId::default()).waiting, 1);
    drain(&mut cluster);
}

#[test]
fn a_decision_is_remembered_with_what_came_of_it() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    for _ in 0..70 {
        let id = cluster.submit(now, request(5, 1)).unwrap();
        assert_eq!(cluster.view(now).decisions[0].outcome, None);
        cluster.cancel(now, id, None);
        assert_eq!(cluster.view(now).decisions[0].outcome, Some("left"));
    }
    assert_eq!(cluster.view(now).decisions.len(), 64);
    drain(&mut cluster);

    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    cluster.submit(now, request(40, 1)).unwrap();
    let sequence = decode_jobs(&drain(&mut cluster)).remove(0).1.sequence;
    for index in 0..3 {
        cluster.worker_event(now + Duration::from_millis(30 + 10 * u64::from(index)), decode, token(sequence, index, 1));
    }
    cluster.worker_event(now, decode, finished(sequence, Finish::Length));
    let decision = cluster.view(now).decisions.remove(0);
    assert_eq!((decision.ttft_ms, decision.tpot_ms, decision.tokens, decision.outcome), (Some(30.0), Some(10.0), 3, Some("length")));
    assert_eq!((decision.chosen.decode.as_str(), decision.class.as_str(), decision.prompt_tokens), ("d", "standard", 40));
    assert!(decision.chosen.predicted_ttft_ms > 40.0 && decision.chosen.chance > 0.9, "{decision:?}");
}

#[test]
fn a_prompt_is_shared_and_not_copied() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("k", RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() })).unwrap();
    cluster.register(now, register("p", RoleInfo::Prefill(engine(1)))).unwrap();
    cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let new = request(40, 2);
    cluster.submit(now, new.clone()).unwrap();
    let messages = drain(&mut cluster).into_iter().map(|action| match action {
        Action::Send { message: ToWorker::Decode(job), .. } => (job.tokens.as_ptr(), job.tokens.len()),
        Action::Send { message: ToWorker::Prefill(job), .. } => (job.tokens.as_ptr(), job.tokens.len()),
        other => panic!("{other:?}"),
    });
    let prompt = new.prompt.as_ptr();
    assert_eq!(messages.collect::<Vec<_>>(), [(prompt, 40), (prompt, 32), (prompt, 40)], "the client's own tokens, in every message");
}

#[test]
fn a_returned_sequence_rests_and_lets_others_pass() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    cluster.submit(now, request(5, 1)).unwrap();
    let first = decode_jobs(&drain(&mut cluster)).remove(0).1.sequence;
    cluster.worker_event(now, decode, finished(first, Finish::Returned));
    assert_eq!(decode_jobs(&drain(&mut cluster)), []);
    cluster.submit(now, request(5, 1)).unwrap();
    assert_eq!(decode_jobs(&drain(&mut cluster)).len(), 1, "it is not in the way");
    cluster.tick(now + Duration::from_millis(200));
    assert_eq!(decode_jobs(&drain(&mut cluster))[0].1.sequence, first);
}

#[test]
fn a_sequence_that_no_worker_keeps_waits_as_long_as_any_other() {
    let (mut cluster, start) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(start, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    cluster.submit(start, request(5, 1)).unwrap();
    let (mut returns, mut now) = (0, start);
    let outcome = loop {
        let actions = drain(&mut cluster);
        if let Some(outcome) = actions.iter().find_map(|action| match action {
            Action::Client { event: RequestEvent::Finished { outcome, .. }, .. } => Some(outcome.clone()),
            _ => None,
        }) {
            break outcome;
        }
        for (_, job) in decode_jobs(&actions) {
            returns += 1;
            cluster.worker_event(now, decode, finished(job.sequence, Finish::Returned));
        }
        now += Duration::from_millis(50);
        cluster.tick(now);
    };
    assert_eq!(outcome, Outcome::Failed(Failure::QueueTimeout(20)));
    assert!(now - start >= Duration::from_secs(20) && returns > LOSSES_MAX, "{returns} returns");
}

#[test]
fn time_at_a_worker_is_no_time_in_the_queue() {
    let (mut cluster, start) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(start, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    cluster.submit(start, request(5, 1)).unwrap();
    let mut now = start;
    for _ in 0..2 {
        let sequence = decode_jobs(&drain(&mut cluster)).remove(0).1.sequence;
        for _ in 0..25 {
            now += Duration::from_secs(1);
            cluster.worker_event(now, decode, WorkerEvent::Heartbeat(Box::default()));
            cluster.tick(now);
        }
        cluster.worker_event(now, decode, finished(sequence, Finish::Returned));
        now += Duration::from_millis(200);
        cluster.tick(now);
    }
    assert_eq!(decode_jobs(&drain(&mut cluster)).len(), 1, "it is given out again");
}

#[test]
fn a_gap_in_a_pool_nodes_events_closes_its_link() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let pool = cluster.register(now, register("k", RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() })).unwrap();
    cluster.worker_event(now, pool, WorkerEvent::PoolEvents { from: 3, events: vec![PoolEvent::Cleared] });
    assert_eq!(drain(&mut cluster), []);
    cluster.worker_event(now, pool, WorkerEvent::PoolEvents { from: 5, events: vec![] });
    assert!(matches!(&drain(&mut cluster)[..], [Action::Close { worker, .. }] if *worker == pool));
}

#[test]
fn a_timeout_ends_the_choices_that_still_run() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let id = cluster.submit(now, request(5, 2)).unwrap();
    let jobs = decode_jobs(&drain(&mut cluster));
    cluster.worker_event(now, decode, finished(jobs[1].1.sequence, Finish::Length));
    drain(&mut cluster);
    cluster.worker_event(now + TIMEOUT, decode, WorkerEvent::Heartbeat(Box::default()));
    cluster.tick(now + TIMEOUT);
    let actions = drain(&mut cluster);
    let [Action::Send { message: ToWorker::CancelSequence { sequence }, .. }, Action::Client { request, event }] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((*sequence, *request), (jobs[0].1.sequence, id));
    assert!(matches!(event, RequestEvent::Finished { choice: 0, outcome: Outcome::Failed(Failure::Timeout(60)), .. }), "{event:?}");
}

#[test]
fn an_answer_to_a_cancelled_prefill_job_is_never_taken_for_a_newer_ones() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    let kvpool = |name| register(name, RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() });
    let pool = cluster.register(now, kvpool("k")).unwrap();
    let prefill = cluster.register(now, register("p", RoleInfo::Prefill(engine(1)))).unwrap();
    let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    let id = cluster.submit(now, request(40, 1)).unwrap();
    assert_eq!(prefill_jobs(&drain(&mut cluster)), [(prefill, id)]);

    // The job is cancelled, but its answer may be on the wire: the worker gets no other job of this request.
    cluster.worker_down(now, pool);
    cluster.register(now, kvpool("l")).unwrap();
    cluster.register(now, register("e", RoleInfo::Decode(engine(1)))).unwrap();
    cluster.worker_down(now, decode);
    assert_eq!(prefill_jobs(&drain(&mut cluster)), []);
    let other = cluster.submit(now, request(40, 1)).unwrap();
    assert_eq!(prefill_jobs(&drain(&mut cluster)), [(prefill, other)], "other requests' jobs it still gets");
}

#[test]
fn nobody_waits_for_blocks_after_the_prefill_job() {
    let (mut cluster, [prefill, decode], now) = one_of_each();
    let request = cluster.submit(now, request(40, 2)).unwrap();
    let jobs = decode_jobs(&drain(&mut cluster));
    cluster.worker_event(now, decode, token(jobs[0].1.sequence, 0, 1));
    drain(&mut cluster);
    let outcome = PrefillOutcome::Done { cached_tokens: 0, computed_tokens: 32, queue_ms: 1.0, compute_ms: 1.0 };
    cluster.worker_event(now, prefill, WorkerEvent::Prefilled { request, outcome });
    cluster.tick(now);
    assert_eq!(drain(&mut cluster), [], "it may be fetching them");
    cluster.tick(now + HANDOVER_MAX);
    let message = ToWorker::StopWaiting { sequence: jobs[1].1.sequence };
    assert_eq!(drain(&mut cluster), [Action::Send { worker: decode, message }], "the other one has a token already");
    cluster.tick(now + HANDOVER_MAX);
    assert_eq!(drain(&mut cluster), [], "once is enough");
}

/// A limit on a thought that is never begun.
fn thought(tokens_max: u32) -> ThoughtLimit {
    ThoughtLimit { tokens_max, start: 0, reader: ThoughtReader { states: vec![ReaderState::default()] }.into() }
}

#[test]
fn a_limited_thought_goes_to_a_worker_that_keeps_limits() {
    let mut cluster = Cluster::new(settings(), model());
    let now = START;
    let asked = |tokens_max| NewRequest { thought: Some(thought(tokens_max)), ..request(40, 1) };
    let (old, new) = (Epoch(1), Epoch(2));
    cluster.admit(now, old, register("old", RoleInfo::Decode(engine(1))), Version::OLDEST).unwrap();
    assert_eq!(cluster.submit(now, asked(5)), Err(Rejection::NoThoughtLimits));
    cluster.submit(now, asked(0)).unwrap();
    assert_eq!(decode_jobs(&drain(&mut cluster)).len(), 1, "an earlier release is told by the prompt alone");
    cluster.admit(now, new, register("new", RoleInfo::Decode(engine(1))), Version::NEWEST).unwrap();
    drain(&mut cluster);
    for _ in 0..3 {
        cluster.submit(now, asked(5)).unwrap();
        let actions = drain(&mut cluster);
        let limited = |action: &Action| match action {
            Action::Send { worker, message: ToWorker::DecodeLimited { limit, .. } } => Some((*worker, limit.tokens_max)),
            _ => None,
        };
        assert_eq!(actions.iter().filter_map(limited).collect::<Vec<_>>(), [(new, 5)]);
    }
    cluster.worker_down(now, new);
    assert!(decode_jobs(&drain(&mut cluster)).is_empty(), "what that worker had waits for another of its kind");
    cluster.submit(now, request(40, 1)).unwrap();
    assert_eq!(decode_jobs(&drain(&mut cluster)).len(), 1, "and nobody waits behind it");
}

#[test]
fn the_last_decode_worker_goes_and_the_next_request_brings_one() {
    let decode = Range { floor: 0, ceiling: 8 };
    let autoscale = settings().autoscale.map(|autoscale| AutoscaleSettings { decode, ..autoscale });
    let mut cluster = Cluster::new(ClusterSettings { autoscale, ..settings() }, model());
    let wanted = |cluster: &Cluster| cluster.wanted().map(|wanted| wanted.decode);
    let mut now = START;
    let mut pass = |cluster: &mut Cluster, seconds: u64| {
        for _ in 0..seconds {
            now += Duration::from_secs(1);
            cluster.tick(now);
        }
        now
    };
    let now = pass(&mut cluster, 20);
    assert_eq!(wanted(&cluster), Some(1), "one has to tell what it can hold");
    assert_eq!(cluster.context_tokens(now), None);
    let first = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
    for _ in 0..40 {
        let now = pass(&mut cluster, 1);
        cluster.worker_event(now, first, WorkerEvent::Heartbeat(Box::default()));
    }
    assert_eq!(wanted(&cluster), Some(0));
    let now = pass(&mut cluster, 1);
    cluster.worker_event(now, first, WorkerEvent::Leaving);
    cluster.worker_down(now, first);
    let now = pass(&mut cluster, 3600);
    drain(&mut cluster);
    assert_eq!((wanted(&cluster), cluster.context_tokens(now).is_some()), (Some(0), true), "an hour later it still takes requests");

    let waiting = cluster.submit(now, request(40, 1)).unwrap();
    let now = pass(&mut cluster, 1);
    assert_eq!(wanted(&cluster), Some(1));
    let second = cluster.register(now, register("e", RoleInfo::Decode(engine(1)))).unwrap();
    let jobs = decode_jobs(&drain(&mut cluster));
    assert_eq!((jobs[0].0, jobs[0].1.request), (second, waiting));
    let now = pass(&mut cluster, 4);
    cluster.worker_event(now, second, token(jobs[0].1.sequence, 0, 1));
    assert_eq!(wanted(&cluster), Some(1), "as long as it runs");
}

#[test]
fn an_answer_that_ends_before_its_prefill_is_reported_has_the_time_of_it() {
    let (mut cluster, [prefill, decode], now) = one_of_each();
    let request = cluster.submit(now, request(40, 2)).unwrap();
    let jobs = decode_jobs(&drain(&mut cluster));
    let tokens = TokensBySource { prefill: 32, local: 8, ..TokensBySource::default() };
    let provenance = Provenance { tokens, transfer_ms: 7.0, ..Provenance::default() };
    let prefill_ms = |cluster: &mut Cluster, choice: usize| {
        let sequence = jobs[choice].1.sequence;
        cluster.worker_event(now, decode, WorkerEvent::Finished { sequence, reason: Finish::Length, provenance });
        drain(cluster).into_iter().find_map(|action| match action {
            Action::Client { event: RequestEvent::Finished { usage, .. }, .. } => Some(usage.prefill_ms),
            _ => None,
        })
    };
    assert_eq!(prefill_ms(&mut cluster, 0), Some(7.0), "as long as the decode worker waited");
    let outcome = PrefillOutcome::Done { cached_tokens: 0, computed_tokens: 32, queue_ms: 1.0, compute_ms: 2.0 };
    cluster.worker_event(now, prefill, WorkerEvent::Prefilled { request, outcome });
    assert_eq!(prefill_ms(&mut cluster, 1), Some(3.0), "as its worker reported");
}

#[test]
fn a_sequence_that_meets_a_good_bye_goes_elsewhere_and_is_not_lost() {
    for leaves in [true, false] {
        let (mut cluster, now) = (Cluster::new(settings(), model()), START);
        let first = cluster.register(now, register("first", RoleInfo::Decode(engine(1)))).unwrap();
        let waiting = cluster.submit(now, request(40, 1)).unwrap();
        assert_eq!(decode_jobs(&drain(&mut cluster))[0].0, first);
        let second = cluster.register(now, register("second", RoleInfo::Decode(engine(1)))).unwrap();
        if leaves {
            cluster.worker_event(now, first, WorkerEvent::Leaving);
        }
        cluster.worker_down(now, first);
        let now = now + Duration::from_secs(1);
        cluster.tick(now);
        let jobs = decode_jobs(&drain(&mut cluster));
        assert_eq!((jobs[0].0, jobs[0].1.request), (second, waiting));
        assert_eq!(cluster.view(now).rescues, u64::from(!leaves), "a worker that leaves hands back what it has begun");
    }
}

#[test]
fn a_sequence_runs_only_where_its_longest_answer_fits() {
    let (mut cluster, now) = (Cluster::new(settings(), model()), START);
    cluster.register(now, register("small", RoleInfo::Decode(small_engine()))).unwrap();
    let large = cluster.register(now, register("large", RoleInfo::Decode(engine(1)))).unwrap();
    let small_tokens = small_engine().device_blocks as usize * BLOCK_TOKENS;
    let long = cluster.submit(now, request(small_tokens - 3, 1)).unwrap();
    assert_eq!(decode_jobs(&drain(&mut cluster))[0].0, large, "the prompt alone would fit the other one");

    // Without the large worker it can end nowhere, and does not block others.
    cluster.submit(now, request(small_tokens - 4, 3)).unwrap();
    drain(&mut cluster);
    cluster.worker_down(now, large);
    let actions = drain(&mut cluster);
    let failure = Failure::TooLong { tokens: small_tokens as u64 + 1, context: small_tokens as u32 };
    let failed = |action: &Action| {
        matches!(action, Action::Client { request, event: RequestEvent::Finished { outcome: Outcome::Failed(why), .. } }
            if *request == long && *why == failure)
    };
    assert!(actions.iter().any(failed), "{actions:?}");
}

#[test]
fn a_rescued_sequence_accounts_for_its_prompt_only() {
    let account = |hbm, dram, local| TokensBySource { hbm, dram, local, ..TokensBySource::default() };
    for (first, second, expected) in [
        (None, account(16, 32, 2), account(16, 16, 8)),
        (None, account(64, 0, 1), account(32, 0, 8)),
        (None, account(u64::MAX, u64::MAX, 1), account(32, 0, 8)),
        (Some(account(0, 16, 24)), account(48, 0, 1), account(0, 16, 24)),
        (Some(account(0, 0, 0)), account(16, 0, 24), account(16, 0, 24)),
    ] {
        let (mut cluster, now) = (Cluster::new(settings(), model()), START);
        let decode = cluster.register(now, register("d", RoleInfo::Decode(engine(1)))).unwrap();
        cluster.submit(now, request(40, 1)).unwrap();
        let sequence = decode_jobs(&drain(&mut cluster)).remove(0).1.sequence;
        let word = |reason, tokens| WorkerEvent::Finished { sequence, reason, provenance: Provenance { tokens, ..Provenance::default() } };
        if let Some(tokens) = first {
            cluster.worker_event(now, decode, word(Finish::Returned, tokens));
            cluster.tick(now + Duration::from_millis(200));
            drain(&mut cluster);
        }
        cluster.worker_event(now, decode, word(Finish::Length, second));
        let actions = drain(&mut cluster);
        let [Action::Client { event: RequestEvent::Finished { usage, .. }, .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(usage.provenance.tokens, expected);
        assert_eq!(usage.provenance.tokens.total(), 40);
    }
}

/// One event. Numbers pick one of the existing items, modulo their count.
#[derive(Clone, Debug)]
enum Step {
    Join(u8),
    Leave(u8),
    Drain(u8),
    Distrust(u8),
    Submit {
        class: u8,
        tokens: u16,
        choices: u8,
    },
    Cancel {
        request: u8,
        choice: Option<u8>,
    },
    Token {
        sequence: u8,
        stop: bool,
        skip: bool,
    },
    Finish {
        sequence: u8,
        how: u8,
    },
    Prefilled {
        job: u8,
        ok: bool,
    },
    Store {
        pool: u8,
        key: u8,
        gap: bool,
    },
    /// Every worker sends a heartbeat.
    Heartbeat,
    Pass(u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => any::<u8>().prop_map(Step::Join),
        1 => any::<u8>().prop_map(Step::Leave),
        1 => any::<u8>().prop_map(Step::Drain),
        1 => any::<u8>().prop_map(Step::Distrust),
        4 => (0u8..4, 1u16..200, 1u8..4).prop_map(|(class, tokens, choices)| Step::Submit { class, tokens, choices }),
        1 => (any::<u8>(), any::<Option<u8>>()).prop_map(|(request, choice)| Step::Cancel { request, choice }),
        8 => (any::<u8>(), prop::bool::weighted(0.1), prop::bool::weighted(0.05)).prop_map(|(sequence, stop, skip)| Step::Token { sequence, stop, skip }),
        3 => (any::<u8>(), any::<u8>()).prop_map(|(sequence, how)| Step::Finish { sequence, how }),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(job, ok)| Step::Prefilled { job, ok }),
        2 => (any::<u8>(), any::<u8>(), prop::bool::weighted(0.1)).prop_map(|(pool, key, gap)| Step::Store { pool, key, gap }),
        3 => Just(Step::Heartbeat),
        2 => (0u16..3000).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 0..120)
}

/// The events of a choice that its client has received.
#[derive(Clone, Default)]
struct Heard {
    tokens: Vec<Token>,
    ended: bool,
}

/// The world around the cluster: the state of workers and clients as its messages have left it.
struct World {
    cluster: Cluster,
    now: Duration,
    workers: Vec<(Epoch, u8)>,
    /// The device blocks of each decode worker that ever existed.
    device_blocks: HashMap<Epoch, u32>,
    /// The sequences that decode workers run, late cancellations included.
    running: Vec<(Epoch, DecodeJob)>,
    jobs: Vec<(Epoch, RequestId)>,
    events: HashMap<Epoch, u64>,
    /// The events of each choice, by request; a cancelled choice is `None`.
    clients: BTreeMap<RequestId, Vec<Option<Heard>>>,
}

impl World {
    fn new() -> Self {
        Self {
            cluster: Cluster::new(settings(), model()),
            now: START,
            workers: Vec::new(),
            device_blocks: HashMap::new(),
            running: Vec::new(),
            jobs: Vec::new(),
            events: HashMap::new(),
            clients: BTreeMap::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Join(kind) => {
                let role = match kind % 3 {
                    0 if kind % 2 == 0 => RoleInfo::Decode(engine(1)),
                    0 => RoleInfo::Decode(small_engine()),
                    1 => RoleInfo::Prefill(engine(1)),
                    _ => RoleInfo::Kvpool { addr: ([127, 0, 0, 1], kind.into()).into() },
                };
                let device_blocks = if let RoleInfo::Decode(info) = &role { Some(info.device_blocks) } else { None };
                let epoch = self.cluster.register(now, register_at(["a", "b"][usize::from(kind) / 128], "w", role)).unwrap();
                self.device_blocks.extend(device_blocks.map(|blocks| (epoch, blocks)));
                self.workers.push((epoch, kind % 3));
            }
            Step::Leave(n) => {
                if let Some((epoch, _)) = pick(&self.workers, n) {
                    self.cluster.worker_down(now, epoch);
                    self.forget(epoch);
                }
            }
            Step::Drain(n) => {
                if let Some((epoch, _)) = pick(&self.workers, n) {
                    self.cluster.worker_event(now, epoch, WorkerEvent::Leaving);
                }
            }
            Step::Distrust(n) => {
                if let Some((epoch, _)) = pick(&self.workers, n) {
                    self.cluster.distrust(now, epoch);
                }
            }
            Step::Submit { class, tokens, choices } => {
                let new = NewRequest { class: ClassId(class), ..request(tokens.into(), choices.into()) };
                if let Ok(id) = self.cluster.submit(now, new) {
                    self.clients.insert(id, vec![Some(Heard::default()); choices.into()]);
                }
            }
            Step::Cancel { request, choice } => {
                let ids: Vec<_> = self.clients.keys().copied().collect();
                if let Some(id) = pick(&ids, request) {
                    let choices = self.clients.get_mut(&id).unwrap();
                    let choice = choice.map(|choice| u32::from(choice) % choices.len() as u32);
                    for (index, state) in choices.iter_mut().enumerate() {
                        if choice.is_none_or(|choice| choice as usize == index) {
                            state.take_if(|heard| !heard.ended);
                        }
                    }
                    self.cluster.cancel(now, id, choice);
                }
            }
            Step::Token { sequence, stop, skip } => {
                if let Some(at) = pick(&(0..self.running.len()).collect::<Vec<_>>(), sequence) {
                    let (epoch, job) = &mut self.running[at];
                    let index = job.tokens.len() as u32 - job.prompt_tokens + u32::from(skip);
                    let drawn = if stop { STOP } else { 100 + index };
                    job.tokens.push(drawn);
                    let event = token(job.sequence, index, drawn);
                    self.cluster.worker_event(now, *epoch, event);
                }
            }
            Step::Finish { sequence, how } => {
                if let Some((epoch, job)) = pick(&self.running, sequence) {
                    self.running.retain(|(_, other)| other.sequence != job.sequence);
                    let reason = match how % 4 {
                        0 => Finish::Length,
                        1 => Finish::Stop { token: STOP },
                        2 => Finish::Failed { reason: "test".into() },
                        _ => Finish::Returned,
                    };
                    self.cluster.worker_event(now, epoch, finished(job.sequence, reason));
                }
            }
            Step::Prefilled { job, ok } => {
                if let Some((epoch, request)) = pick(&self.jobs, job) {
                    self.jobs.retain(|other| *other != (epoch, request));
                    let outcome = match ok {
                        true => PrefillOutcome::Done { cached_tokens: 0, computed_tokens: 16, queue_ms: 1.0, compute_ms: 1.0 },
                        false => PrefillOutcome::Failed { reason: "test".into() },
                    };
                    self.cluster.worker_event(now, epoch, WorkerEvent::Prefilled { request, outcome });
                }
            }
            Step::Store { pool, key, gap } => {
                let pools: Vec<_> = self.workers.iter().filter(|(_, kind)| *kind == 2).map(|(epoch, _)| *epoch).collect();
                if let Some(epoch) = pick(&pools, pool) {
                    let from = self.events.entry(epoch).or_default();
                    *from += u64::from(gap);
                    let (layout, all) = ([1; 16], (0..200).collect::<Vec<_>>());
                    let chain = Chain::new(&tidemill_proto::block::LayoutFingerprint(layout), b"", &all);
                    let stored = |&key: &BlockKey| PoolEvent::Stored { key, tier: Tier::Dram };
                    let events = chain.keys()[..usize::from(key) % 4].iter().map(stored).collect::<Vec<_>>();
                    let event = WorkerEvent::PoolEvents { from: *from, events: events.clone() };
                    *from += events.len() as u64;
                    self.cluster.worker_event(now, epoch, event);
                }
            }
            Step::Heartbeat => {
                for (epoch, _) in self.workers.clone() {
                    self.cluster.worker_event(now, epoch, WorkerEvent::Heartbeat(Box::default()));
                }
            }
            Step::Pass(ms) => {
                self.now += Duration::from_millis(ms.into());
                self.cluster.tick(self.now);
            }
        }
        self.perform();
    }

    fn perform(&mut self) {
        for action in drain(&mut self.cluster) {
            match action {
                Action::Send { worker, message } => {
                    assert!(self.workers.iter().any(|(epoch, _)| *epoch == worker), "{message:?} for a worker that is gone");
                    self.message(worker, message);
                }
                Action::Close { worker, .. } => self.forget(worker),
                Action::Client { request, event } => self.client(request, event),
                Action::Warn(_) => {}
            }
        }
    }

    fn message(&mut self, worker: Epoch, message: ToWorker) {
        match message {
            ToWorker::Decode(job) | ToWorker::DecodeLimited { job, .. } => {
                assert!(self.running.iter().all(|(_, other)| other.sequence != job.sequence), "a sequence runs at one worker");
                assert!(self.cluster.distrusted().all(|bad| bad != worker), "work for a worker that computes wrongly");
                assert_eq!(job.salt, Era::after(self.cluster.distrusted()).salt(b""), "no block of an earlier era is read");
                assert!(job.expected_blocks as usize * BLOCK_TOKENS < job.tokens.len(), "at least one token is left to compute");
                let tokens_max = job.prompt_tokens + job.stop.max_tokens;
                assert!(
                    tokens_max <= self.device_blocks[&worker] * BLOCK_TOKENS as u32,
                    "a sequence could not end at this worker as at any other"
                );
                let read: u32 = job.read.iter().map(|run| run.blocks).sum();
                assert!(read <= job.expected_blocks, "what is read is expected");
                assert!(job.expected_blocks == read || job.home.is_some(), "expected blocks come from somewhere");
                assert!(
                    job.hot_blocks <= read && (job.hot_blocks == 0 || job.home.is_some_and(|home| home.near)),
                    "copies are for near nodes"
                );
                self.running.push((worker, job));
            }
            ToWorker::CancelSequence { sequence } => self.running.retain(|(_, job)| job.sequence != sequence),
            ToWorker::Prefill(job) => {
                assert_eq!(job.tokens.len(), job.blocks as usize * BLOCK_TOKENS);
                self.jobs.push((worker, job.request));
            }
            ToWorker::CancelPrefill { request } => self.jobs.retain(|job| *job != (worker, request)),
            ToWorker::StopWaiting { .. }
            | ToWorker::Peers(_)
            | ToWorker::Registered { .. }
            | ToWorker::Refused { .. }
            | ToWorker::NotYet { .. }
            | ToWorker::Denied { .. } => {}
        }
    }

    fn client(&mut self, request: RequestId, event: RequestEvent) {
        let choices = self.clients.get_mut(&request).expect("a submitted request");
        match event {
            RequestEvent::Token { choice, token, .. } => {
                let Heard { tokens, ended } = choices[choice as usize].as_mut().expect("no word after a cancellation");
                assert!(!*ended, "no token after the end");
                assert!(token == STOP || token as usize == 100 + tokens.len(), "tokens come in order, none twice: {tokens:?} {token}");
                tokens.push(token);
            }
            RequestEvent::Finished { choice, .. } => {
                let Heard { ended, .. } = choices[choice as usize].as_mut().expect("no word after a cancellation");
                assert!(!std::mem::replace(ended, true), "ends once");
            }
            RequestEvent::Waiting { choice, position, .. } => {
                let Heard { ended, .. } = choices[choice as usize].as_mut().expect("no word after a cancellation");
                assert!(!*ended && position > 0, "who has ended waits no more");
            }
            RequestEvent::PromptLogprobs(_) | RequestEvent::Embedding(_) | RequestEvent::Sources(_) => panic!("nobody asked"),
        }
    }

    fn forget(&mut self, epoch: Epoch) {
        self.workers.retain(|(worker, _)| *worker != epoch);
        self.running.retain(|(worker, _)| *worker != epoch);
        self.jobs.retain(|(worker, _)| *worker != epoch);
        self.events.remove(&epoch);
    }
}

fn pick<T: Clone>(items: &[T], n: u8) -> Option<T> {
    items.get(usize::from(n) % items.len().max(1)).cloned()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_exactly_once(steps in steps()) {
        let mut world = World::new();
        world.step(&Step::Join(0));
        for step in &steps {
            world.step(step);
        }
        // Workers that live but make no progress: every request is ended by its timeout.
        for _ in 0..100 {
            world.step(&Step::Heartbeat);
            world.step(&Step::Pass(1000));
        }
        for (request, choices) in &world.clients {
            for choice in choices.iter().flatten() {
                prop_assert!(choice.ended, "a choice of {} never ended", request);
            }
        }
        prop_assert!(world.cluster.requests.len() == 0 && world.cluster.requests.waiting() == 0 && world.cluster.requests.running_count() == 0);
    }
}

/// Coordinators that place sequences at the same four workers: the largest difference in sequences between the busiest and the idlest one,
/// for eight sequences that arrive one after the other, at the coordinators in turn, and stay. Workers report after every `report_every` of
/// them.
fn unevenness(coordinators: u64, tells_others: bool, report_every: usize) -> u32 {
    let settings = |n: u64| {
        let policy = Policy { decode_sequences_max: None, ..settings().policy };
        ClusterSettings { id_base: (0x9e37_79b9 * (n + 1)) << 32, policy, ..settings() }
    };
    let workers: Vec<Epoch> = (1..=4).map(Epoch).collect();
    let mut all: Vec<Cluster> = (0..coordinators).map(|n| Cluster::new(settings(n), model())).collect();
    for cluster in &mut all {
        for worker in &workers {
            cluster.admit(START, *worker, register("d", RoleInfo::Decode(engine(1))), Version::NEWEST).unwrap();
        }
        if tells_others {
            cluster.share_workers();
        }
    }
    let mut running: HashMap<Epoch, u32> = workers.iter().map(|worker| (*worker, 0)).collect();
    for n in 0..8 {
        let cluster = &mut all[n % coordinators as usize];
        cluster.submit(START, request(40, 1)).unwrap();
        for (worker, _) in decode_jobs(&drain(cluster)) {
            *running.get_mut(&worker).unwrap() += 1;
        }
        if n % report_every == report_every - 1 {
            for cluster in &mut all {
                for worker in &workers {
                    let report = Report { running: running[worker], ..Report::default() };
                    cluster.worker_event(START, *worker, WorkerEvent::Heartbeat(Box::new(report)));
                }
                drain(cluster);
            }
        }
    }
    let counts = || running.values().copied();
    counts().max().unwrap() - counts().min().unwrap()
}

#[test]
fn coordinators_over_the_same_workers_place_evenly_by_the_workers_reports() {
    assert_eq!(unevenness(1, false, 8), 0, "one coordinator knows all that it placed");
    assert!(unevenness(3, false, 1) > 1, "three that do not look at reports take one another's workers");
    assert!(unevenness(3, true, 1) <= 1, "with reports after each, it is as if they were one");
    assert!(unevenness(3, true, 4) <= unevenness(3, false, 4), "late reports are better than none");
}
