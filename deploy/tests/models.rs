//! Several models in one cluster of real processes.

mod support;

use serde_json::{Value, json};
use std::process::Command;
use support::{Answer, Case, Cluster, MODEL, crash, member, mixed_cases};

/// The directories of the models, by name.
const MODELS: [(&str, &str); 2] = [("tiny", MODEL), ("qwen", concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/qwen2"))];

async fn ask(cluster: &Cluster, model: &str, case: &Case) -> (u16, Value) {
    let mut body = case.body();
    body["model"] = json!(model);
    cluster.post("/completions", &body).await
}

async fn answer(cluster: &Cluster, model: &str, case: &Case) -> Answer {
    let (status, answer) = ask(cluster, model, case).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["model"], model);
    let tokens = answer["choices"][0]["token_ids"].as_array().expect("ids").iter();
    Answer { tokens: tokens.map(|id| id.as_u64().expect("an id") as u32).collect(), usage: answer["usage"].clone() }
}

/// Short cases whose token ids are in both vocabularies.
fn cases() -> Vec<Case> {
    let cases = mixed_cases(3).into_iter().take(5);
    cases.map(|case| Case { prompt: case.prompt.iter().map(|token| token % 250).collect(), ..case }).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_model_answers_as_it_does_alone_and_fails_alone() {
    let cases = cases();
    let mut references: Vec<Vec<Vec<u32>>> = Vec::new();
    for model in MODELS {
        let alone = Cluster::start_with(&[model], &["--prefill", "0", "--kvpool", "0"]);
        let mut answers = Vec::new();
        for case in &cases {
            answers.push(answer(&alone, model.0, case).await.tokens);
        }
        alone.stop();
        references.push(answers);
    }
    assert_ne!(references[0], references[1], "two models");

    let cluster = Cluster::start_with(&MODELS, &["--local-tail-tokens", "0", "--threads", "1"]);
    for (case, number) in cases.iter().zip(0..) {
        let (tiny, qwen) = tokio::join!(answer(&cluster, "tiny", case), answer(&cluster, "qwen", case));
        assert_eq!(tiny.tokens, references[0][number], "tiny, prompt of {}", case.prompt.len());
        assert_eq!(qwen.tokens, references[1][number], "qwen, prompt of {}", case.prompt.len());
        assert_eq!(
            (&tiny.usage["tidemill"]["decode_worker"], &qwen.usage["tidemill"]["decode_worker"]),
            (&json!("decode-0"), &json!("decode-1"))
        );
    }
    // Engines report their own caches; each model's blocks are in its own pool node.
    let told = |c: &Value| {
        ["kvpool-0", "kvpool-1", "decode-0", "decode-1"].iter().all(|name| member(c, name)["indexed_blocks"].as_u64() > Some(9))
    };
    cluster.until("blocks being known", told).await;
    let again = answer(&cluster, "qwen", &cases[4]).await;
    assert!(again.cached() > 100, "{}", again.usage);

    let pid = cluster.pid("decode-1").await;
    crash(pid);
    cluster.gone(pid).await;
    let (status, error) = ask(&cluster, "qwen", &cases[0]).await;
    assert_eq!(status, 503, "its only decode worker is gone: {error}");
    for (case, number) in cases.iter().zip(0..) {
        assert_eq!(answer(&cluster, "tiny", case).await.tokens, references[0][number], "the other model goes on");
    }
    let screen = screen(&cluster);
    assert!(screen.contains("no decode worker") && screen.contains("kvpool-1"), "{screen}");
    drop(cluster);
}

/// The output of `tidemill cluster --once`.
fn screen(cluster: &Cluster) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_tidemill")).args(["cluster", "--once", "--url", &cluster.url]).output().expect("tidemill starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_view_of_no_cluster_says_so() {
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill"))
        .args(["cluster", "--once", "--url", "http://127.0.0.1:9"])
        .output()
        .expect("tidemill starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("is a cluster running there"), "{error}");
}
