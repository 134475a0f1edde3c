//! Tensor parallelism (`--tensor-parallel`), end to end: answers are the same on any number of ranks, with prefill on one number and decode on
//! another, cold and cached, and when a worker crashes with all of its ranks.

use crate::support::{Answer, Case, Cluster, DISAGGREGATED, MODEL_NAME, assert_same, complete, complete_all, crash, mixed_cases, reusable};
use serde_json::Value;
use std::time::Duration;

/// Tiny checkpoints that can be split over four ranks: one with four KV heads, one with latents and experts.
const DENSE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/llama");
const EXPERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/deepseek-v3");

fn start(model: &str, flags: &[&str]) -> Cluster {
    Cluster::start_with(&[(MODEL_NAME, model)], flags)
}

async fn reference(model: &str, cases: &[Case]) -> Vec<Answer> {
    let alone = start(model, &["--prefill", "0", "--kvpool", "0"]);
    let answers = complete_all(&alone, cases, 1).await;
    alone.stop();
    answers
}

async fn assert_same_on_ranks(model: &str, kv_memory: &str, all_degrees: &[&str]) {
    let cases = mixed_cases(44);
    let reference = reference(model, &cases).await;
    for &degrees in all_degrees {
        let flags = ["--threads", "4", "--tensor-parallel", degrees, "--kv-memory", kv_memory];
        let cluster = start(model, &[DISAGGREGATED, &flags].concat());
        let cold = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &cold, &cases, &format!("{degrees}, cold"));
        for (answer, case) in cold.iter().zip(&cases) {
            assert_eq!(answer.source("prefill"), reusable(case), "a prefill worker computed all full blocks: {}", answer.usage);
        }
        let warm = complete_all(&cluster, &cases, 4).await;
        assert_same(&reference, &warm, &cases, &format!("{degrees}, cached, 4 at a time"));
        assert!(warm.iter().zip(&cases).all(|(answer, case)| answer.cached() == reusable(case)), "nothing is computed twice");
        cluster.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_the_same_on_any_number_of_ranks() {
    assert_same_on_ranks(DENSE, "1MiB", &["2", "4", "prefill=4,decode=2", "prefill=1,decode=4"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_experts_are_the_same_on_any_number_of_ranks() {
    assert_same_on_ranks(EXPERTS, "2MiB", &["prefill=4,decode=2"]).await;
}

/// The process id of the decode worker that serves a request.
async fn busy_decode(cluster: &Cluster) -> u32 {
    loop {
        let now = cluster.cluster().await;
        let members = now["members"].as_array().expect("members");
        let is_busy = |m: &&Value| m["role"] == "decode" && m["assigned"].as_u64() > Some(0);
        if let Some(pid) = members.iter().find(is_busy).and_then(|m| m["pid"].as_u64()) {
            return pid as u32;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_a_group_of_ranks_does_not_show_in_the_answer() {
    let case = Case { prompt: (0..400).map(|i| 3 + (i * 7 + i / 5) % 500).collect(), seed: Some(11), max_tokens: 1200 };
    let reference = reference(DENSE, std::slice::from_ref(&case)).await;
    let flags = ["--decode", "2", "--threads", "4", "--tensor-parallel", "prefill=4,decode=2"];
    let cluster = start(DENSE, &[DISAGGREGATED, &flags].concat());
    let crashing = async {
        let pid = tokio::time::timeout(Duration::from_secs(60), busy_decode(&cluster)).await.expect("a decode worker at work");
        crash(pid);
        pid
    };
    let (answer, pid) = tokio::join!(complete(&cluster, &case), crashing);
    assert_eq!(answer.tokens, reference[0].tokens);
    assert!(answer.usage["tidemill"]["rescues"].as_u64() > Some(0), "the worker that served it crashed: {}", answer.usage);
    cluster.gone(pid).await;
    let again = complete(&cluster, &case).await;
    assert_eq!(again.tokens, reference[0].tokens, "the other worker serves");
    // A process crashed, so `stop` does not apply.
    drop(cluster);
}
