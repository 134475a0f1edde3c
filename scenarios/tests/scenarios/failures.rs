//! Workers that die in the middle of an answer: the client must not notice, and nothing may leak.

use crate::support::{Cluster, Script, decode, pool, prefill};
use serde_json::{Value, json};
use tidemill_proto::{
    block::{BlockKey, Chain, LayoutFingerprint},
    message::{PoolEvent, PrefillOutcome, ToWorker, WorkerEvent},
    pool::Tier,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_survives_its_decode_worker() {
    let cluster = Cluster::start(|_| ()).await;
    let reply: Vec<u32> = (40..60).collect();
    let first = cluster.join("decode-0", decode(), Script { stall_after: 7, ..Script::reply(&reply) }).await;
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 20, "seed": 3, "stream": true, "return_token_ids": true});
    let mut response = cluster.post("/v1/completions", body).await;
    let mut text = String::new();
    while !text.contains("\"token_ids\":[46]") {
        text += std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap();
    }
    first.kill().await;
    let mut second = cluster.join("decode-1", decode(), Script::reply(&reply)).await;
    text += &response.text().await.unwrap();
    let tokens: Vec<u64> = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .map(|token| token.as_u64().unwrap())
        .collect();
    assert_eq!(tokens, (40..60).collect::<Vec<u64>>(), "no token twice, none missing");
    let job = second.decode_job().await;
    assert_eq!((job.prompt_tokens, job.tokens.len(), job.sampling.seed), (3, 10, 3), "it goes on where the first one died");
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    assert_eq!((&view["rescues"], &view["requests"]), (&json!(1), &json!(0)));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_job_survives_its_worker_or_is_given_up() {
    let cluster = Cluster::start(|_| ()).await;
    let _pool = cluster.join("kvpool-0", pool(), Script::reply(&[])).await;
    let failing = Script { prefill: PrefillOutcome::Failed { reason: "test".into() }, ..Script::reply(&[]) };
    let mut first = cluster.join("prefill-0", prefill(), failing.clone()).await;
    let mut second = cluster.join("prefill-1", prefill(), failing).await;
    let mut decode = cluster.join("decode-0", decode(), Script { stall_after: 0, ..Script::reply(&[40]) }).await;
    let prompt: Vec<u32> = (0..33).collect();
    let ask = cluster.post("/v1/completions", json!({"prompt": prompt, "max_tokens": 1}));
    let ask = tokio::time::timeout(std::time::Duration::from_secs(1), ask);
    let job = |message| if let ToWorker::Prefill(job) = message { Some(job) } else { None };
    let (_, waited, one, two) = tokio::join!(ask, decode.decode_job(), first.expect(job), second.expect(job));
    assert_eq!(one.blocks, 2);
    assert_eq!((&one.tokens, one.blocks), (&two.tokens, two.blocks), "the same job");
    let freed = decode.expect(|message| if let ToWorker::StopWaiting { sequence } = message { Some(sequence) } else { None }).await;
    assert_eq!(freed, waited.sequence, "when nobody is left, the decode worker computes");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pool_node_holds_is_not_computed_again() {
    let cluster = Cluster::start(|_| ()).await;
    let pool = cluster.join("kvpool-0", pool(), Script::reply(&[])).await;
    let mut prefill = cluster.join("prefill-0", prefill(), Script::reply(&[])).await;
    let mut decode = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let prompt: Vec<u32> = (0..40).collect();
    let keys: Vec<BlockKey> = Chain::new(&LayoutFingerprint([7; 16]), b"", &prompt).keys().to_vec();
    let body = json!({"prompt": prompt, "max_tokens": 1});
    let stored = keys.into_iter().map(|key| PoolEvent::Stored { key, tier: Tier::Dram }).collect();
    pool.say.send(WorkerEvent::PoolEvents { from: 5, events: stored }).unwrap();
    while cluster.get("/cluster").await.json::<Value>().await.unwrap()["members"][0]["indexed_blocks"] != 2 {}
    assert_eq!(cluster.ask("/v1/completions", body.clone()).await.0, 200);
    assert_eq!(decode.decode_job().await.expected_blocks, 2);
    assert!(prefill.messages.try_recv().is_err(), "nothing to prefill");

    let mut salted = body.clone();
    salted["cache_salt"] = json!("tenant-a");
    assert_eq!(cluster.ask("/v1/completions", salted).await.0, 200);
    assert!(prefill.messages.recv().await.is_some(), "another tenant finds nothing");

    // There is a gap in the events, so the node is asked to start again, with an empty index.
    pool.say.send(WorkerEvent::PoolEvents { from: 99, events: Vec::new() }).unwrap();
    while cluster.get("/cluster").await.json::<Value>().await.unwrap()["members"]
        .as_array()
        .unwrap()
        .iter()
        .any(|m| m["indexed_blocks"] == 2)
    {}
    cluster.stop().await;
}
