//! `tidemill up --autoscale`: under load one decode worker becomes several, and one again after it. No client notices.

mod support;

use serde_json::Value;
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};
use support::{Case, Cluster, Numbers, assert_same, complete, reference};

/// Answers so long, and so many at a time, that their KV fills several workers' memory, whatever the machine's speed.
fn cases() -> Vec<Case> {
    let mut numbers = Numbers(47);
    let case = |number: usize| Case {
        prompt: (0..40 + 10 * number).map(|_| 3 + (numbers.next() % 500) as u32).collect(),
        seed: (number % 2 == 1).then(|| numbers.next() >> 12),
        max_tokens: 700,
    };
    (0..16).map(case).collect()
}

fn decode_workers(cluster: &Value) -> usize {
    let members = cluster["members"].as_array().expect("members");
    members.iter().filter(|member| member["role"] == "decode" && member["draining"] == false).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_come_with_the_load_and_go_with_it_and_no_answer_changes() {
    let cases = cases();
    let expected = reference(&cases).await;
    let cluster = Cluster::start(&[
        "--autoscale",
        "prefill=1..1,decode=1..4,start_s=5,cooldown_s=10",
        // Memory for about five of the answers.
        "--kv-memory",
        "1536KiB",
        "--threads",
        "1",
    ]);
    assert_eq!(decode_workers(&cluster.cluster().await), 1);

    let (most, done) = (AtomicUsize::new(1), AtomicBool::new(false));
    let began = Instant::now();
    let asked = async {
        let mut rounds = 0;
        // As long as it takes: the answers that are under way when a worker comes or goes are the test.
        while rounds < 2 || (most.load(Ordering::Relaxed) < 4 && began.elapsed() < LOAD_MAX) {
            let answers = support::complete_all(&cluster, &cases, cases.len()).await;
            assert_same(&expected, &answers, &cases, "while workers come");
            rounds += 1;
        }
        // A light load goes on while workers leave.
        while most.load(Ordering::Relaxed) > 1 && decode_workers(&cluster.cluster().await) > 1 && began.elapsed() < 2 * LOAD_MAX {
            for (case, expected) in cases.iter().zip(&expected).take(2) {
                let answer = complete(&cluster, case).await;
                assert_same(std::slice::from_ref(expected), &[answer], std::slice::from_ref(case), "while workers leave");
            }
        }
        done.store(true, Ordering::Relaxed);
    };
    let watched = async {
        while !done.load(Ordering::Relaxed) {
            most.fetch_max(decode_workers(&cluster.cluster().await), Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::join!(asked, watched);
    assert_eq!(most.into_inner(), 4, "all that it may have");
    assert_eq!(decode_workers(&cluster.cluster().await), 1, "and one again");
    assert!(cluster.get("/metrics").await.contains("\ntidemill_wanted_workers{role=\"decode\",model=\"tiny\"} 1\n"));
    assert_eq!(cluster.metric("tidemill_rescues_total", &[]).await, 0.0, "who drains hands its sequences over");
    cluster.stop();
}

/// On a machine that has other things to do as well.
const LOAD_MAX: Duration = Duration::from_secs(240);
