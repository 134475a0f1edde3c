//! Small clusters: the same seed gives the same events, every request ends once, nothing leaks, and waits agree with queueing theory.

use super::{blueprint::device, *};
use crate::{
    hardware::{Gpu, Work},
    settings::{Arrivals, Autoscale, Class, ClusterShape, NetworkSettings, OnMiss, PolicySettings, Speculation, Stream, WorkloadSettings},
    shape::Shape,
    workload,
};

fn settings(prefill: u32, decode: u32, rate: f64, requests: usize) -> Settings {
    let stream = |rate, input, output| Stream { rate, input, output, prefix_tokens: 512, class: None };
    Settings {
        model: "llama-3.1-8b".into(),
        cluster: ClusterShape {
            instances: prefill + decode,
            prefill: Some(prefill),
            instances_per_host: 2,
            noise: 0.05,
            ..ClusterShape::default()
        },
        network: NetworkSettings::default(),
        policy: PolicySettings::default(),
        workload: WorkloadSettings {
            arrivals: Arrivals::Poisson,
            rate,
            requests,
            streams: vec![stream(1.0, [20, 3000], [1, 60]), stream(0.5, [600, 20_000], [1, 10])],
            classes: vec![Class {
                name: "all".into(),
                share: 1.0,
                ttft_ms: Some(1000.0),
                tpot_ms: Some(50.0),
                priority: 1,
                weight: 1.0,
                on_miss: OnMiss::Late,
            }],
            ..WorkloadSettings::default()
        },
    }
}

fn world(settings: &Settings, seed: u64) -> World {
    let asks = workload::draw(&settings.workload, None, seed).unwrap();
    World::new(settings, asks, seed).unwrap()
}

/// Runs to the end and until every process is idle, with occasional checks of the books.
fn checked(settings: &Settings, seed: u64) -> Run {
    checked_every(4999, settings, seed)
}

/// Like `checked`, with `events` events between two checks of the books, each of which visits every block of every process.
fn checked_every(events: u64, settings: &Settings, seed: u64) -> Run {
    let mut world = world(settings, seed);
    while world.open() > 0 {
        assert!(world.step(&mut Unwatched));
        if world.events.is_multiple_of(events) {
            world.check_integrity();
        }
    }
    let end = world.now() + Duration::from_secs(30);
    while world.now() < end && !world.is_idle() {
        world.step(&mut Unwatched);
    }
    world.check_integrity();
    assert!(world.is_idle(), "nobody computes, moves or holds anything for requests that have ended: {:?}", world.busy());
    world.finish()
}

#[test]
fn the_same_seed_gives_the_same_events() {
    let settings = settings(1, 2, 4.0, 120);
    let [a, b, c] = [1, 1, 2].map(|seed| world(&settings, seed).run(&mut Unwatched));
    assert_eq!((a.digest, a.events, &a.answers), (b.digest, b.events, &b.answers));
    assert_ne!(a.digest, c.digest);
}

mod every_request_ends_once_with_all_its_tokens_and_nothing_is_left {
    #[test]
    fn where_each_worker_does_both() {
        super::every_request_ends_once(0, 2);
    }

    #[test]
    fn where_one_prefills_and_one_decodes() {
        super::every_request_ends_once(1, 1);
    }

    #[test]
    fn where_two_prefill_and_two_decode() {
        super::every_request_ends_once(2, 2);
    }
}

fn every_request_ends_once(prefill: u32, decode: u32) {
    let settings = settings(prefill, decode, 4.0, 90);
    let run = checked(&settings, 3);
    let asks = workload::draw(&settings.workload, None, 3).unwrap();
    for (ask, answer) in asks.iter().zip(&run.answers) {
        assert_eq!((&answer.end, answer.tokens), (&End::Complete, ask.output_tokens));
        assert_eq!(answer.sources.total(), u64::from(ask.input_tokens), "each prompt token has a source");
    }
    assert_eq!((run.closed, run.warnings), (0, 0));
    assert!(run.answers.iter().any(|answer| answer.sources.cached() > 0), "prefixes are found again");
}

#[test]
fn a_cluster_that_is_too_small_loses_and_leaks_nothing() {
    let mut settings = settings(1, 1, 60.0, 300);
    settings.cluster.device_blocks = Some(2000);
    settings.cluster.pool_gib_per_host = 5.0;
    settings.policy = PolicySettings { queue_max: 50, queue_wait_s: 10.0, request_timeout_s: 20.0, ..PolicySettings::default() };
    let run = checked(&settings, 5);
    let ended = |wanted: fn(&End) -> bool| run.answers.iter().filter(|answer| wanted(&answer.end)).count();
    assert_eq!(ended(|end| *end == End::Open), 0);
    assert!(ended(|end| *end == End::Complete) > 20 && ended(|end| matches!(end, End::Rejected(_))) > 20);
}

#[test]
fn workers_come_and_go_with_the_load_and_nothing_is_lost() {
    let mut settings = settings(6, 4, 4.0, 400);
    settings.cluster.pool_gib_per_host = 8.0;
    settings.cluster.autoscale = Some(Autoscale { window_s: 3.0, start_s: 2.0, cooldown_s: 4.0, ..Autoscale::default() });
    settings.workload =
        WorkloadSettings { arrivals: Arrivals::Diurnal, period_s: 100.0, swing: 0.818, sharpness: 3.0, ..settings.workload };
    let run = checked_every(99_991, &settings, 7);
    let asks = workload::draw(&settings.workload, None, 7).unwrap();
    for (ask, answer) in asks.iter().zip(&run.answers) {
        assert_eq!((&answer.end, answer.tokens), (&End::Complete, ask.output_tokens));
    }
    assert_eq!((run.closed, run.warnings), (0, 0), "who drains is no fault");
    let prefill: Vec<u32> = run.load.iter().map(|point| point.workers.prefill).collect();
    let most = *prefill.iter().max().unwrap();
    let at_last = *prefill.last().unwrap();
    assert!(prefill[0] == 1 && most >= 3 && at_last < most, "from {} to {most} to {at_last}", prefill[0]);
    let good = run.answers.iter().filter(|answer| answer.is_good(&settings.workload.classes[0])).count();
    assert!(good * 10 >= asks.len() * 9, "{good} of {}", asks.len());
}

/// A draft model shortens the time per token where sequences are few, and costs next to nothing where they are many or where it is never
/// right. The coordinator predicts the times per token that come about.
#[test]
fn a_draft_model_pays_where_there_is_room_for_it() {
    let tpot_ms = |rate: f64, speculation: Option<Speculation>| {
        let mut settings = settings(1, 1, rate, 150);
        settings.cluster.speculation = speculation;
        settings.workload.streams = vec![Stream { rate: 1.0, input: [200, 400], output: [100, 300], prefix_tokens: 0, class: None }];
        let run = checked_every(99_991, &settings, 13);
        let asks = workload::draw(&settings.workload, None, 13).unwrap();
        assert!(asks.iter().zip(&run.answers).all(|(ask, answer)| answer.tokens == ask.output_tokens && answer.end == End::Complete));
        let times: Vec<f64> = run.answers.iter().filter_map(Answer::tpot_ms).collect();
        times.iter().sum::<f64>() / times.len() as f64
    };
    let with = |right: f64| Some(Speculation { right, ..Speculation::default() });
    let gain = |rate: f64, right: f64| tpot_ms(rate, None) / tpot_ms(rate, with(right));
    let alone = [0.0, 0.63, 0.95].map(|right| gain(0.2, right));
    assert!(alone[0] > 0.97 && alone[1] > 1.3 && alone[2] > 2.0, "one at a time: {alone:?}");
    let many = [0.0, 0.63].map(|right| gain(40.0, right));
    assert!(many.iter().all(|gain| *gain > 0.97), "many at a time: {many:?}");
}

/// One prefill worker with prompts of equal length is a queue with Poisson arrivals and constant service (M/D/1): the mean wait is
/// ρ / 2(1 − ρ) services (Pollaczek and Khinchine).
#[test]
fn prompts_wait_as_long_as_queueing_theory_says() {
    let mut settings = settings(1, 6, 1.0, 4000);
    settings.cluster = ClusterShape { noise: 0.0, prefill_step_tokens: TOKENS, ..settings.cluster };
    // With an instant hand-over, there is only one server.
    settings.network = NetworkSettings { nic_gb_per_s: 1e6, bus_gb_per_s: 1e6, latency_us: 1.0, local_latency_us: 1.0 };
    settings.policy.local_tail_tokens = Some(0);
    // Without classes, since workers would cut steps to meet limits.
    settings.workload.classes.clear();
    const TOKENS: usize = 512;
    let length = TOKENS as u32 + 1;
    settings.workload.streams = vec![Stream { rate: 1.0, input: [length; 2], output: [1, 1], prefix_tokens: 0, class: None }];
    let shape = Shape::find("llama-3.1-8b").unwrap();
    let tokens = TOKENS as u64;
    let step = Work { prefill_tokens: tokens, prefill_context: tokens * tokens / 2, kv_tokens: tokens, ..Work::default() };
    let service_ms = device(&settings, shape, Gpu::find("h100").unwrap(), 1, false, 0).speed.step(&step).as_secs_f64() * 1e3;
    let mean_ttft_ms = |rate: f64, requests: usize| {
        let workload = WorkloadSettings { rate, requests, ..settings.workload.clone() };
        let run = world(&Settings { workload, ..settings.clone() }, 11).run(&mut Unwatched);
        run.answers.iter().map(|answer| answer.ttft_ms().unwrap()).sum::<f64>() / run.answers.len() as f64
    };
    let alone_ms = mean_ttft_ms(0.1, 100);
    let load = 0.6;
    let wait_ms = mean_ttft_ms(load / service_ms * 1e3, 4000) - alone_ms;
    let expected = service_ms * load / (2.0 * (1.0 - load));
    assert!((wait_ms / expected - 1.0).abs() < 0.08, "{wait_ms} ms for {expected}");
}
