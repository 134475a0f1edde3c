//! Any input from clients and members: an answer with a status, no panic, no hang, and the next good request is served.

use crate::support::{Cluster, Script, decode};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::{Map, Value, json};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const PATHS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Fields with a meaning, so that random bodies get past the first check.
const FIELDS: [&str; 37] = [
    "messages",
    "prompt",
    "model",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "return_token_ids",
    "skip_special_tokens",
    "cache_salt",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
    "chat_template_kwargs",
];

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..40).prop_map(Value::from),
        any::<f64>().prop_map(|x| json!(x)),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("user")),
        Just(json!([{"role": "user", "content": "x"}])),
    ];
    leaf.prop_recursive(4, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,8}|role|content|type|text", inner, 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// A body that is valid except for a few fields.
fn any_body() -> impl Strategy<Value = Value> {
    let fields = prop::collection::vec((prop::sample::select(&FIELDS[..]), any_json()), 0..5);
    (fields, any::<bool>()).prop_map(|(fields, valid)| {
        let mut body = Map::new();
        if valid {
            body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
            body.insert("prompt".into(), json!([1, 2, 3]));
        }
        body.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        Value::Object(body)
    })
}

/// A body with one byte changed.
fn damaged_body() -> impl Strategy<Value = Vec<u8>> {
    (any_body(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(body, at, byte)| {
        let mut bytes = body.to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes
    })
}

#[test]
fn any_body_gets_an_answer() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (cluster, _worker) = runtime.block_on(async {
        let cluster = Cluster::start(|_| ()).await;
        let worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41, 42])).await;
        (cluster, worker)
    });
    let client = reqwest::Client::new();
    let bodies = prop_oneof![4 => any_body().prop_map(|body| body.to_string().into_bytes()), 1 => damaged_body(), 1 => any::<Vec<u8>>()];
    let mut runner = TestRunner::new(Config { cases: 600, failure_persistence: None, ..Config::default() });
    let result = runner.run(&(prop::sample::select(&PATHS[..]), bodies), |(path, body)| {
        runtime.block_on(async {
            let request = client.post(format!("{}{path}", cluster.url)).header("content-type", "application/json").body(body);
            let send = request.timeout(Duration::from_secs(10)).send();
            let response = send.await.map_err(|e| TestCaseError::fail(e.to_string()))?;
            let status = response.status().as_u16();
            let text = response.text().await.map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert!([200, 400, 404].contains(&status), "{status}: {text}");
            if status != 200 {
                let error: Value = serde_json::from_str(&text).map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert!(error["error"]["message"].is_string(), "{text}");
            }
            Ok(())
        })
    });
    result.unwrap();
    runtime.block_on(async {
        let (status, answer) = cluster.ask("/v1/completions", json!({"prompt": [1, 2, 3], "max_tokens": 3})).await;
        assert_eq!(status, 200, "{answer}");
        let view: Value = cluster.get("/cluster").await.json().await.unwrap();
        assert_eq!(view["requests"], 0, "nothing is left of all that");
        cluster.stop().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_http_end_their_connection_only() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let addr = cluster.url.strip_prefix("http://").unwrap();
    let long_header = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    for bytes in
        [&b"\x00\xff\x16\x03\x01"[..], b"GET", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99\r\n\r\n{", long_header.as_bytes()]
    {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut answer));
        assert!(read.await.is_ok(), "the server ends a connection that ended");
    }
    assert_eq!(cluster.ask("/v1/completions", json!({"prompt": "x"})).await.0, 200);
    cluster.stop().await;
}

/// Addresses that cannot be parsed, for every route that parses a part of its path or its query.
const UNREADABLE: &[(&str, &str)] = &[
    ("POST", "/v1/responses/%FF/cancel"),
    ("GET", "/v1/responses/%FF"),
    ("DELETE", "/v1/responses/%FF"),
    ("GET", "/v1/responses/%FF/input_items"),
    ("GET", "/v1/responses/x/input_items?limit=x"),
    ("GET", "/v1/batches/%FF"),
    ("POST", "/v1/batches/%FF/cancel"),
    ("GET", "/v1/batches?limit=x"),
    ("GET", "/v1/models/%FF"),
    ("GET", "/v1/chat/completions/%FF"),
    ("GET", "/v1/completions/%FF"),
    ("GET", "/v1/messages/%FF"),
    ("GET", "/v1/messages/x?stream=x"),
    ("GET", "/v1/conversations?limit=x"),
    ("GET", "/v1/conversations/%FF"),
    ("POST", "/v1/conversations/%FF"),
    ("DELETE", "/v1/conversations/%FF"),
    ("POST", "/v1/conversations/%FF/branch"),
    ("GET", "/v1/conversations/%FF/export"),
    ("GET", "/v1/conversations/%FF/items"),
    ("POST", "/v1/conversations/%FF/items"),
    ("GET", "/v1/conversations/x/items/%FF"),
    ("DELETE", "/v1/conversations/x/items/%FF"),
    ("GET", "/v1/memories?limit=x"),
    ("GET", "/v1/memories/%FF"),
    ("DELETE", "/v1/memories/%FF"),
    ("GET", "/v1/files?limit=x"),
    ("GET", "/v1/files/%FF"),
    ("DELETE", "/v1/files/%FF"),
    ("GET", "/v1/files/%FF/content"),
    ("GET", "/console/%FF"),
];

const UNREADABLE_BY_OPERATORS: &[(&str, &str)] = &[
    ("DELETE", "/admin/keys/%FF"),
    ("GET", "/admin/feedback?limit=x"),
    ("GET", "/admin/appeals?state=x"),
    ("POST", "/admin/appeals/%FF"),
    ("PUT", "/admin/tenants/%FF"),
    ("GET", "/registry?x=1"),
    ("GET", "/registry/alias/%FF"),
    ("PUT", "/registry/alias/%FF"),
    ("DELETE", "/registry/alias/%FF"),
    ("DELETE", "/registry/alias/x?x=1"),
    ("POST", "/rollouts/%FF"),
    ("DELETE", "/coordinators/%FF"),
    ("GET", "/console/%FF"),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_cannot_be_read_is_an_error_of_the_api() {
    let data = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.path().to_owned());
    })
    .await;
    let client = reqwest::Client::new();
    let doors = [(cluster.url.clone(), UNREADABLE), (cluster.admin.clone().unwrap(), UNREADABLE_BY_OPERATORS)];
    for (door, requests) in doors {
        for (method, address) in requests {
            let request = client.request(method.parse().unwrap(), format!("{door}{address}")).json(&json!({}));
            let answer = request.send().await.unwrap();
            let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
            assert!((400..500).contains(&status), "{method} {address}: {status} {text}");
            let answer: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{method} {address}: {status} {text}"));
            assert!(answer["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{method} {address}: {answer}");
        }
    }
    cluster.stop().await;
}
