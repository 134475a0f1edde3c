//! `tidemill up --autoscale`: under load one decode worker becomes four, and one again after it. No client notices. Where none need stay, the
//! last one goes, too, and a request waits until one is there again.

use crate::support::{Answer, Case, Cluster, assert_same, complete, reference};
use futures_util::{StreamExt, stream::iter};
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// Many more than a worker takes at a time, so that most wait and four workers are wanted, whatever the machine's speed.
const CASES: usize = 24;
const SEQUENCES_MAX: &str = "1";

/// Answers long enough to be under way when a worker comes or goes.
fn cases() -> Vec<Case> {
    let prompt = |number: u32| (0..40 + 5 * number).map(move |token| 3 + (number * 31 + token * 7 + token / 5) % 500);
    let case = |number: u32| Case { prompt: prompt(number).collect(), seed: (number % 2 == 1).then_some(number.into()), max_tokens: 500 };
    (0..CASES as u32).map(case).collect()
}

fn decode_workers(cluster: &Value) -> usize {
    let members = cluster["members"].as_array().expect("members");
    members.iter().filter(|member| member["role"] == "decode" && member["draining"] == false).count()
}

/// The answer to a case as a stream, which must not end before its end.
async fn stream(cluster: &Cluster, case: &Case) -> Answer {
    let mut body = case.body();
    body["stream"] = json!(true);
    let (status, text) = cluster.post_for_text("/completions", &body).await;
    assert_eq!(status, 200, "{text}");
    let mut events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "the stream was cut: {text}");
    let ids = |event: &&str| {
        let chunk: Value = serde_json::from_str(event).expect("JSON");
        let ids = chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
        ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect::<Vec<_>>()
    };
    Answer { tokens: events.iter().flat_map(ids).collect(), usage: Value::Null }
}

/// Keeps `at_once` requests under way as long as `goes_on`, half of them as streams, and compares each answer.
async fn ask(cluster: &Cluster, cases: &[Case], expected: &[Answer], at_once: usize, when: &str, goes_on: impl Fn() -> bool) {
    let numbers = (0..cases.len()).cycle().take_while(|_| goes_on());
    let asked = iter(numbers).map(|number| async move {
        let case = &cases[number];
        let answer = if number % 2 == 0 { stream(cluster, case).await } else { complete(cluster, case).await };
        assert_same(std::slice::from_ref(&expected[number]), &[answer], std::slice::from_ref(case), when);
    });
    asked.buffer_unordered(at_once).collect().await
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_come_with_the_load_and_go_with_it_and_no_answer_changes() {
    let cases = cases();
    let expected = reference(&cases).await;
    let autoscale = "prefill=1..1,decode=1..4,window_s=3,start_s=2,cooldown_s=3";
    let cluster = Cluster::start(&["--autoscale", autoscale, "--sequences-max", SEQUENCES_MAX, "--threads", "1"]);
    assert_eq!(decode_workers(&cluster.cluster().await), 1);

    let (now, most, done) = (AtomicUsize::new(1), AtomicUsize::new(1), AtomicBool::new(false));
    let began = Instant::now();
    let asked = async {
        let grows = || most.load(Ordering::Relaxed) < 4 && began.elapsed() < PHASE_MAX;
        ask(&cluster, &cases, &expected, CASES, "while workers come", grows).await;
        let came = began.elapsed();
        // A light load goes on while workers leave.
        let shrinks = || now.load(Ordering::Relaxed) > 1 && began.elapsed() < came + PHASE_MAX;
        ask(&cluster, &cases[..4], &expected, 1, "while workers leave", shrinks).await;
        eprintln!("four workers after {came:?}, one again {:?} later", began.elapsed() - came);
        done.store(true, Ordering::Relaxed);
    };
    let watched = async {
        while !done.load(Ordering::Relaxed) {
            let workers = decode_workers(&cluster.cluster().await);
            now.store(workers, Ordering::Relaxed);
            most.fetch_max(workers, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::join!(asked, watched);
    assert_eq!((most.into_inner(), now.into_inner()), (4, 1), "all that it may have, and one again");
    assert_eq!(cluster.metric("tidemill_wanted_workers", &["role=\"decode\"".into()]).await, 1.0);
    assert_eq!(cluster.metric("tidemill_rescues_total", &[]).await, 0.0, "who drains hands its sequences over");
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_requests_no_worker_stays_and_the_next_request_waits_for_one() {
    let cases = &cases()[..2];
    let expected = reference(cases).await;
    let autoscale = "prefill=0..1,decode=0..2,window_s=3,start_s=2,cooldown_s=3";
    let cluster = Cluster::start(&["--autoscale", autoscale, "--prefill", "0", "--kvpool", "0", "--threads", "1"]);
    for (case, expected) in cases.iter().zip(&expected).cycle().take(3) {
        let began = Instant::now();
        while decode_workers(&cluster.cluster().await) > 0 {
            assert!(began.elapsed() < PHASE_MAX, "a worker stays");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        eprintln!("none after {:?}", began.elapsed());
        let answer = complete(&cluster, case).await;
        assert_same(std::slice::from_ref(expected), &[answer], std::slice::from_ref(case), "by a worker that came for it");
        assert_eq!(decode_workers(&cluster.cluster().await), 1);
    }
    cluster.stop();
}

/// The time for either direction, on a machine that has other things to do as well.
const PHASE_MAX: Duration = Duration::from_secs(60);
