//! Several models in one cluster of real processes.

use crate::support::{Answer, Case, Cluster, MODEL, crash, member, mixed_cases};
use serde_json::{Value, json};
use std::process::Command;

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
    // Engines report their own caches; the pool node is a member of each model, with the model's own blocks.
    let told = |c: &Value| {
        let of_node = ["tiny", "qwen"].map(|model| node_of(c, model));
        let engines = ["decode-0", "decode-1"].map(|name| member(c, name));
        of_node.iter().chain(&engines).all(|member| member["indexed_blocks"].as_u64() > Some(9))
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
    assert!(screen.contains("no decode worker") && screen.contains("kvpool-0"), "{screen}");
    drop(cluster);
}

/// The pool node as a member of this model.
fn node_of(cluster: &Value, model: &str) -> Value {
    let members = cluster["members"].as_array().expect("members");
    let node = members.iter().find(|member| member["role"] == "kvpool" && member["model"] == model);
    node.unwrap_or_else(|| panic!("no pool node of {model} in {cluster:#}")).clone()
}

/// The bytes of a pool node's memory that are a model's.
fn memory_of(cluster: &Value, model: &str) -> u64 {
    let dram = &node_of(cluster, model)["report"]["blocks"]["dram"];
    ["total", "bytes_per_block"].map(|name| dram[name].as_u64().unwrap_or(0)).iter().product()
}

/// A prompt of full blocks and one more token, which no other number's prompt resembles.
fn prompt(number: u64, blocks: u64) -> Case {
    let prompt = (0..16 * blocks + 1).map(|place| 3 + ((number * 7919 + place * 31 + place * place * number) % 240) as u32).collect();
    Case { prompt, seed: None, max_tokens: 8 }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_share_a_node_and_none_starves_the_other() {
    const MEMORY: u64 = 1 << 20;
    let kept = prompt(1, 10);
    let mut references = Vec::new();
    for model in MODELS {
        let alone = Cluster::start_with(&[model], &["--prefill", "0", "--kvpool", "0"]);
        references.push((answer(&alone, model.0, &kept).await.tokens, answer(&alone, model.0, &prompt(999, 10)).await.tokens));
        alone.stop();
    }
    let flags =
        ["--pool-memory", "1MiB", "--pool-floors", "tiny=25,qwen=25", "--kv-memory", "96KiB", "--local-tail-tokens", "0", "--threads", "1"];
    let cluster = Cluster::start_with(&MODELS, &flags);
    for (victim, flood) in [(0, 1), (1, 0)] {
        let (name, other) = (MODELS[victim].0, MODELS[flood].0);
        assert_eq!(answer(&cluster, name, &kept).await.tokens, references[victim].0, "{name}");
        // Further prompts, so that blocks of the kept one are in the pool only: device memory has 16 or 32 blocks.
        for number in 2..4 {
            answer(&cluster, name, &prompt(number, 12)).await;
        }
        for number in 100..150 {
            answer(&cluster, other, &prompt(number, 11)).await;
        }
        let again = answer(&cluster, name, &kept).await;
        assert_eq!(again.tokens, references[victim].0, "{name} after the other's flood");
        assert_eq!(again.cached(), 160, "{name} has its floor: {}", again.usage);
        assert!(again.source("dram") > 0, "{}", again.usage);
        assert_eq!(answer(&cluster, other, &prompt(999, 10)).await.tokens, references[flood].1, "{other}");
        let shared = |c: &Value| {
            memory_of(c, name) >= MEMORY / 5 && memory_of(c, other) >= MEMORY / 5 && memory_of(c, name) + memory_of(c, other) <= MEMORY
        };
        cluster.until("memory for both", shared).await;
    }

    // A model is taken away: the other gets all of the memory, from the same process.
    let node = cluster.pid("kvpool-0").await;
    for worker in ["prefill-0", "decode-0"] {
        let pid = cluster.pid(worker).await;
        crash(pid);
        cluster.gone(pid).await;
    }
    for number in 200..240 {
        answer(&cluster, "qwen", &prompt(number, 11)).await;
    }
    cluster.until("all memory for the other", |c| memory_of(c, "qwen") > MEMORY - 3072 * 2 && memory_of(c, "tiny") == 0).await;
    assert_eq!(answer(&cluster, "qwen", &prompt(999, 10)).await.tokens, references[1].1);
    assert_eq!(cluster.pid("kvpool-0").await, node);
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
