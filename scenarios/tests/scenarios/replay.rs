//! Requests repeated with their `Idempotency-Key`, and resumed streams.

use crate::support::{Cluster, Script, Worker, decode, fixture};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tidemill_gateway::text::TextModel;
use tidemill_proto::message::ToWorker;

const EOT: u32 = 1;
const WORDS: &str = "The tide turns the wheel, and the wheel turns the mill. ";

/// A script that generates the words `times` times, one token per millisecond.
fn saying(times: usize) -> Script {
    let model = TextModel::load(&fixture("llama3")).unwrap();
    Script::reply(&[model.tokenizer.encode(&WORDS.repeat(times), false).unwrap(), vec![EOT]].concat())
}

fn chat() -> Value {
    json!({"model": "tiny", "temperature": 0, "stream": true, "messages": [{"role": "user", "content": "Hello"}]})
}

fn asked(cluster: &Cluster, path: &str, body: &Value, key: &str) -> RequestBuilder {
    reqwest::Client::new().post(format!("{}{path}", cluster.url)).json(body).header("Idempotency-Key", key)
}

async fn ask(cluster: &Cluster, path: &str, body: &Value, key: &str) -> Response {
    asked(cluster, path, body, key).send().await.unwrap()
}

fn status(response: &Response) -> String {
    response.headers()["x-idempotency"].to_str().unwrap().to_owned()
}

/// Reads until `events` events have arrived, and disconnects. Returns the complete events.
async fn some(response: &mut Response, events: usize) -> String {
    let mut text = String::new();
    while text.matches("\n\n").count() < events {
        text += std::str::from_utf8(&response.chunk().await.unwrap().expect("it goes on")).unwrap();
    }
    let end = text.rfind("\n\n").unwrap() + 2;
    text.truncate(end);
    text
}

/// The events without comments, which come at arbitrary times.
fn events(text: &str) -> Vec<&str> {
    text.split_inclusive("\n\n").filter(|event| !event.starts_with(':')).collect()
}

fn id(event: &str) -> &str {
    event.lines().find_map(|line| line.strip_prefix("id: ")).expect("events have ids")
}

fn data(event: &str) -> Option<Value> {
    serde_json::from_str(event.lines().find_map(|line| line.strip_prefix("data: "))?).ok()
}

/// The content of a chat.
fn said(events: &[&str]) -> String {
    events.iter().filter_map(|event| Some(data(event)?["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect()
}

fn jobs(worker: &mut Worker) -> usize {
    let mut jobs = 0;
    while let Ok(message) = worker.messages.try_recv() {
        jobs += usize::from(matches!(message, ToWorker::Decode(_)));
    }
    jobs
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_joins_the_running_stream_and_later_ones_find_it() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying(30)).await;
    let mut first = ask(&cluster, "/v1/chat/completions", &chat(), "k").await;
    assert_eq!(status(&first), "started");
    let beginning = some(&mut first, 5).await;
    let second = ask(&cluster, "/v1/chat/completions", &chat(), "k").await;
    assert_eq!(status(&second), "joined");
    drop(first);
    let whole = second.text().await.unwrap();
    assert!(whole.starts_with(&beginning), "from its first event");
    let third = ask(&cluster, "/v1/chat/completions", &chat(), "k").await;
    assert_eq!((status(&third), third.headers()["content-type"].to_str().unwrap()), ("replayed".into(), "text/event-stream"));
    assert_eq!(third.text().await.unwrap(), whole);
    let events = events(&whole);
    assert_eq!(said(&events), WORDS.repeat(30));
    assert!(events.iter().enumerate().all(|(n, event)| id(event).ends_with(&format!(":{n}"))), "events are numbered from 0");
    assert!(events.last().unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(jobs(&mut worker), 1, "it was computed once");
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    assert_eq!((&view["replays"]["recordings"], &view["replays"]["running"]), (&json!(1), &json!(0)), "{}", view["replays"]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_protocol_answers_a_repeat_with_the_same_bytes() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying(1)).await;
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let bodies = [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "Hello"})),
        ("/v1/completions", json!({"prompt": "Hello", "stream": true})),
        ("/v1/responses", json!({"input": "Hello"})),
        ("/v1/responses", json!({"input": "Hello", "stream": true})),
        ("/v1/messages", json!({"max_tokens": 50, "messages": messages})),
        ("/v1/messages", json!({"max_tokens": 50, "messages": messages, "stream": true})),
        ("/v1/embeddings", json!({"input": "Hello"})),
    ];
    for (n, (path, body)) in bodies.iter().enumerate() {
        let key = format!("key {n}");
        let (first, again) = (ask(&cluster, path, body, &key).await, ask(&cluster, path, body, &key).await);
        assert_eq!((first.status(), again.status()), (200.try_into().unwrap(), 200.try_into().unwrap()), "{path}");
        assert_eq!(first.headers()["content-type"], again.headers()["content-type"], "{path}");
        let first = first.text().await.unwrap();
        assert_eq!(again.text().await.unwrap(), first, "{path}");
        let other = ask(&cluster, path, &json!({"input": "Bye", "prompt": "Bye", "max_tokens": 3, "messages": messages}), &key).await;
        assert_eq!(other.status(), 422, "{path}");
        let error: Value = other.json().await.unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains(&key), "{error}");
        assert_eq!(error["type"] == "error", *path == "/v1/messages", "in its protocol's words: {error}");
    }
    assert_eq!(jobs(&mut worker), bodies.len());
    // Different credentials are a different caller; a refused request leaves its key free.
    let (path, body) = &bodies[0];
    let other = asked(&cluster, path, body, "key 0").header("Authorization", "Bearer x").send().await.unwrap();
    assert_eq!(status(&other), "started");
    for body in [json!({"messages": []}), json!({"messages": messages})] {
        assert_eq!(status(&ask(&cluster, path, &body, "bad first").await), "started");
    }
    let long = ask(&cluster, path, body, &"k".repeat(256)).await;
    assert_eq!(long.status(), 400);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_after_its_last_event() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying(10)).await;
    let mut first = ask(&cluster, "/v1/chat/completions", &chat(), "k").await;
    let beginning = some(&mut first, 7).await;
    drop(first);
    let heard = events(&beginning);
    let again = asked(&cluster, "/v1/chat/completions", &chat(), "k").header("Last-Event-ID", id(heard.last().unwrap()));
    let again = again.send().await.unwrap();
    assert_eq!(status(&again), "resumed");
    let rest = again.text().await.unwrap();
    let joined: Vec<_> = heard.iter().copied().chain(events(&rest)).collect();
    assert_eq!(said(&joined), WORDS.repeat(10));
    assert!(joined.iter().enumerate().all(|(n, event)| id(event).ends_with(&format!(":{n}"))));
    // A stream can also be resumed by its id.
    let name = data(joined[0]).unwrap()["id"].as_str().unwrap().to_owned();
    let by_id = cluster.get(&format!("/v1/chat/completions/{name}?stream=true&starting_after=6")).await;
    assert_eq!((status(&by_id), by_id.text().await.unwrap()), ("resumed".into(), joined[7..].concat()));
    assert_eq!(cluster.get("/v1/chat/completions/chatcmpl-x?stream=true").await.status(), 404);
    // The numbers of a response's events are their sequence numbers.
    let body = json!({"input": "Hello", "stream": true});
    let whole = ask(&cluster, "/v1/responses", &body, "r").await.text().await.unwrap();
    let whole = events(&whole);
    assert!(whole.iter().enumerate().all(|(n, event)| data(event).unwrap()["sequence_number"] == n));
    let name = data(whole[0]).unwrap()["response"]["id"].as_str().unwrap().to_owned();
    let rest = cluster.get(&format!("/v1/responses/{name}?stream=true&starting_after=3")).await.text().await.unwrap();
    assert_eq!(events(&rest), whole[4..]);
    let stored: Value = cluster.get(&format!("/v1/responses/{name}")).await.json().await.unwrap();
    assert_eq!(stored["status"], "completed", "without stream=true it is what is stored");
    assert_eq!(jobs(&mut worker), 2);
    for (key, last, wrong) in [("k", "x:3", 400), ("k", "3", 400), ("k", id(whole[0]), 400)] {
        let refused = asked(&cluster, "/v1/chat/completions", &chat(), key).header("Last-Event-ID", last).send().await.unwrap();
        assert_eq!(refused.status(), wrong, "{last}");
    }
    let keyless = reqwest::Client::new().post(format!("{}/v1/chat/completions", cluster.url)).json(&chat()).header("Last-Event-ID", "a:1");
    assert_eq!(keyless.send().await.unwrap().status(), 400);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_listeners_a_request_goes_on_for_its_grace_time() {
    let cluster = Cluster::start(|flags| flags.replay_grace_s = Some(2)).await;
    let mut worker = cluster.join("decode-0", decode(), Script { stall_after: 20, ..saying(10) }).await;
    let mut first = ask(&cluster, "/v1/chat/completions", &chat(), "k").await;
    some(&mut first, 3).await;
    let left = Instant::now();
    drop(first);
    let sequence = worker.decode_job().await.sequence;
    worker.expect(|message| matches!(message, ToWorker::CancelSequence { sequence: s } if s == sequence).then_some(())).await;
    assert!(left.elapsed() >= Duration::from_secs(2), "not before its grace time is over");
    assert_eq!(status(&ask(&cluster, "/v1/chat/completions", &chat(), "k").await), "started", "it is forgotten");
    // Without a key, it is cancelled at once, without a grace period.
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    assert_eq!(view["replays"]["abandoned"], 1);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_kept_is_computed_and_says_so() {
    let cluster = Cluster::start(|flags| flags.replay_bytes_max = Some("0".into())).await;
    let mut worker = cluster.join("decode-0", decode(), saying(1)).await;
    for _ in 0..2 {
        let response = ask(&cluster, "/v1/chat/completions", &chat(), "k").await;
        assert_eq!(status(&response), "not-kept");
        let text = response.text().await.unwrap();
        assert_eq!(said(&events(&text)), WORDS);
    }
    assert_eq!(jobs(&mut worker), 2);
    cluster.stop().await;
    // A stream longer than the room for replays still arrives whole.
    let cluster = Cluster::start(|flags| flags.replay_bytes_max = Some("2KiB".into())).await;
    let _worker = cluster.join("decode-0", decode(), saying(10)).await;
    let text = ask(&cluster, "/v1/chat/completions", &chat(), "k").await.text().await.unwrap();
    assert_eq!(said(&events(&text)), WORDS.repeat(10));
    assert_eq!(status(&ask(&cluster, "/v1/chat/completions", &chat(), "k").await), "started");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_its_coordinator_dies_a_stream_goes_on_at_another() {
    let (one, other) = (Cluster::start(|_| ()).await, Cluster::start(|_| ()).await);
    let _first = one.join("decode-0", decode(), saying(20)).await;
    let mut second = other.join("decode-0", decode(), saying(20)).await;
    let mut stream = ask(&one, "/v1/chat/completions", &chat(), "k").await;
    let beginning = some(&mut stream, 9).await;
    one.kill().await;
    drop(stream);
    let heard = events(&beginning);
    let resume = |body: Value| asked(&other, "/v1/chat/completions", &body, "k").header("Last-Event-ID", id(heard.last().unwrap())).send();
    let again = resume(chat()).await.unwrap();
    assert_eq!(status(&again), "recomputed");
    let rest = again.text().await.unwrap();
    let joined: Vec<_> = heard.iter().copied().chain(events(&rest)).collect();
    assert_eq!(said(&joined), WORDS.repeat(20), "the text goes on where it broke off");
    assert!(joined.iter().enumerate().all(|(n, event)| id(event).ends_with(&format!(":{n}"))));
    assert_eq!(jobs(&mut second), 1);
    // A random answer would come out differently: its stream cannot be resumed.
    let random = json!({"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "Hello"}]});
    let mut stream = ask(&other, "/v1/chat/completions", &random, "random").await;
    let name = id(events(&some(&mut stream, 1).await)[0]).to_owned();
    let third = Cluster::start(|_| ()).await;
    let refused = asked(&third, "/v1/chat/completions", &random, "random").header("Last-Event-ID", name).send().await.unwrap();
    assert_eq!(refused.status(), 409);
    drop(stream);
    other.stop().await;
    third.stop().await;
}
