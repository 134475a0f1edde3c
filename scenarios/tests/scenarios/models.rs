//! Several models behind one front door, with a scripted decode worker each.

use crate::support::{Cluster, Script, decode, engine_of, fixture, pool};
use serde_json::{Value, json};
use std::time::Duration;
use tidemill_proto::{
    block::LayoutFingerprint,
    message::{EngineInfo, RoleInfo},
};

fn qwen() -> RoleInfo {
    RoleInfo::Decode(EngineInfo { layout: LayoutFingerprint([8; 16]), context_tokens: 1024, ..engine_of(&fixture("qwen2")) })
}

async fn start() -> Cluster {
    Cluster::start(|flags| {
        flags.model = vec![fixture("llama3").into(), fixture("qwen2").into()];
        flags.served_model_name = vec!["tiny".into(), "org/qwen".into()];
        flags.queue_wait_s = Some(1);
    })
    .await
}

fn complete(model: &str) -> Value {
    json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 2, "return_token_ids": true})
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_goes_to_its_models_workers() {
    let cluster = start().await;
    let mut llama = cluster.join("decode-0", decode(), Script::reply(&[8, 9])).await;
    let mut qwen = cluster.join("decode-1", qwen(), Script::reply(&[10, 11])).await;
    for _ in 0..3 {
        let (tiny, other) = (complete("tiny"), complete("org/qwen"));
        let ((_, tiny), (_, other)) = tokio::join!(cluster.ask("/v1/completions", tiny), cluster.ask("/v1/completions", other));
        assert_eq!((&tiny["choices"][0]["token_ids"], &tiny["model"]), (&json!([8, 9]), &json!("tiny")), "{tiny}");
        assert_eq!((&other["choices"][0]["token_ids"], &other["model"]), (&json!([10, 11]), &json!("org/qwen")), "{other}");
        assert_eq!(tiny["usage"]["tidemill"]["decode_worker"], "decode-0");
        assert_eq!(other["usage"]["tidemill"]["decode_worker"], "decode-1");
        assert_eq!(llama.decode_job().await.prompt_tokens, 3);
        assert_eq!(qwen.decode_job().await.prompt_tokens, 3);
    }
    // Each model has its own tokenizer and its own context.
    let models: Value = cluster.get("/v1/models").await.json().await.unwrap();
    let listed: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| (&model["id"], &model["max_model_len"])).collect();
    assert_eq!(listed, [(&json!("tiny"), &json!(2048)), (&json!("org/qwen"), &json!(1024))]);
    let one: Value = cluster.get("/v1/models/org/qwen").await.json().await.unwrap();
    assert_eq!(one["id"], "org/qwen");
    for (body, status, words) in [
        (json!({"prompt": "x"}), 400, "serves `tiny`, `org/qwen`"),
        (json!({"model": "gpt", "prompt": "x"}), 404, "serves `tiny`, `org/qwen`"),
        (json!({"model": "org/qwen", "prompt": vec![5; 1030], "max_tokens": 1}), 400, "1024"),
    ] {
        let (got, error) = cluster.ask("/v1/completions", body).await;
        assert!(got == status && error["error"]["message"].as_str().unwrap().contains(words), "{got} {error}");
    }
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    let members: Vec<_> = view["members"].as_array().unwrap().iter().map(|member| (&member["name"], &member["model"])).collect();
    assert_eq!(members, [(&json!("decode-0"), &json!("tiny")), (&json!("decode-1"), &json!("org/qwen"))]);
    assert_ne!(view["models"][0]["layout"], view["models"][1]["layout"]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_workers_fails_alone() {
    let cluster = start().await;
    let _llama = cluster.join("decode-0", decode(), Script::reply(&[8, 9])).await;
    let qwen = cluster.join("decode-1", qwen(), Script { stall_after: 1, ..Script::reply(&[10, 11]) }).await;
    let dying = async {
        loop {
            let view: Value = cluster.get("/cluster").await.json().await.unwrap();
            if view["models"][1]["sequences_running"] == 1 {
                return qwen.kill().await;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let others = async {
        for _ in 0..20 {
            let (status, answer) = cluster.ask("/v1/completions", complete("tiny")).await;
            assert_eq!(status, 200, "{answer}");
        }
    };
    let ((status, error), (), ()) = tokio::join!(cluster.ask("/v1/completions", complete("org/qwen")), dying, others);
    assert_eq!(status, 503, "its sequence waits for another worker of its model, and none comes: {error}");
    // A worker that has just gone may return; after a while requests no longer wait for it.
    loop {
        let (status, error) = cluster.ask("/v1/completions", complete("org/qwen")).await;
        assert_eq!(status, 503, "{error}");
        if error["error"]["message"].as_str().unwrap().contains("no decode worker") {
            break;
        }
    }
    assert_eq!(cluster.ask("/v1/completions", complete("tiny")).await.0, 200);
    assert_eq!(cluster.get("/ready").await.status(), 200, "requests of one model succeed");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[should_panic(expected = "the coordinator takes kvpool-0 in")]
async fn a_pool_node_has_to_say_whose_blocks_it_keeps() {
    start().await.join("kvpool-0", pool(), Script::reply(&[])).await;
}
