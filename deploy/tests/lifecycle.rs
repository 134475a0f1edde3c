//! What an operator and a client live through: processes that crash, clients that leave, a clean end.

mod support;

use serde_json::{Value, json};
use std::time::Duration;
use support::{Answer, Case, Cluster, complete, crash};

/// Long enough to be running when something happens to it.
fn long_case() -> Case {
    Case { prompt: (0..400).map(|i| 3 + (i * 7) % 500).collect(), seed: Some(11), max_tokens: 1200 }
}

async fn reference() -> Answer {
    let cluster = Cluster::start(&["--prefill", "0", "--kvpool", "0"]);
    let answer = complete(&cluster, &long_case()).await;
    cluster.stop();
    answer
}

fn running(cluster: &Value) -> u64 {
    cluster["sequences_running"].as_u64().expect("a number")
}

/// Ends every process of `role` that the cluster lists once the long case is running; the answer must not show it.
async fn survives(cluster: &Cluster, role: &str, reference: &Answer) {
    let case = long_case();
    let victims = cluster.pids(role).await;
    let before = victims.len();
    let answer = async { complete(cluster, &case).await };
    let crashing = async {
        cluster.until("a running sequence", |c| running(c) == 1).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
        crash(victims[0]);
    };
    let (answer, ()) = tokio::join!(answer, crashing);
    assert_eq!(answer.tokens, reference.tokens, "{role} crashed");
    let gone = |c: &Value| c["members"].as_array().is_some_and(|m| m.iter().filter(|m| m["role"] == role).count() == before - 1);
    cluster.until("the crash being noticed", gone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_any_worker_does_not_show_in_the_answer() {
    let reference = reference().await;
    let cluster = Cluster::start(&["--prefill", "2", "--decode", "3", "--kvpool", "2", "--local-tail-tokens", "0"]);
    for role in ["prefill", "kvpool", "decode", "decode", "prefill", "kvpool"] {
        survives(&cluster, role, &reference).await;
    }
    let last = complete(&cluster, &long_case()).await;
    assert_eq!(last.tokens, reference.tokens, "one decode worker is left, and serves");
    // Not every process ended well, so `stop` is not for this cluster.
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_everything() {
    let cluster = Cluster::start(&[]);
    let mut body = long_case().body();
    body.as_object_mut().expect("an object").extend([("stream".to_owned(), json!(true)), ("max_tokens".to_owned(), json!(3000))]);
    let client = reqwest::Client::new();
    let mut response = client.post(format!("{}/completions", cluster.url)).json(&body).send().await.expect("answers");
    assert!(response.chunk().await.expect("a chunk").is_some());
    cluster.until("a running sequence", |c| running(c) == 1).await;
    drop(response);
    cluster.until("nothing running", |c| running(c) == 0 && c["requests"] == 0).await;
    let device_free = |c: &Value| {
        let members = c["members"].as_array().expect("members");
        members.iter().all(|m| m["report"]["blocks"]["used"] == 0 && m["report"]["running"] == 0)
    };
    cluster.until("all blocks given back", device_free).await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_behind() {
    let shm = || std::fs::read_dir("/dev/shm").map(|d| d.count()).unwrap_or(0);
    let before = shm();
    let cluster = Cluster::start(&[]);
    let mut pids = Vec::new();
    for role in ["prefill", "decode", "kvpool"] {
        pids.extend(cluster.pids(role).await);
    }
    complete(&cluster, &Case { prompt: vec![5; 100], seed: None, max_tokens: 4 }).await;
    assert_eq!(pids.len(), 3);
    cluster.stop();
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is still there");
    }
    assert_eq!(shm(), before, "shared memory is left");
}

#[test]
fn a_model_that_cannot_be_served_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("config.json"), r#"{"architectures": ["MambaForCausalLM"]}"#).expect("written");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidemill"))
        .args(["up", "--http", "127.0.0.1:0", "--model"])
        .arg(dir.path())
        .output()
        .expect("tidemill starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{stderr}");
    assert!(stderr.contains("tokenizer.json") || stderr.contains("MambaForCausalLM"), "{stderr}");
}
