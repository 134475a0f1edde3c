//! `tidemill-bench load` against a small server that speaks OpenAI's stream, with known delays and known faults.

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use clap::Parser;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tidemill_bench::load::{LoadArgs, run};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    load: LoadArgs,
}

/// A server that answers requests in order of arrival as `answers` says; the first is the probe.
struct Server {
    answer: fn(usize) -> Answer,
    asked: Mutex<Vec<Value>>,
    running: AtomicUsize,
    running_max: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq)]
enum Answer {
    /// As many tokens as requested, this far apart.
    Tokens(Duration),
    Refuse,
    /// Two tokens, then a closed connection.
    Break,
    /// One token, then an error object.
    Fail,
    Silence,
}

async fn start(answer: fn(usize) -> Answer) -> (Arc<Server>, String) {
    let server = Arc::new(Server { answer, asked: Mutex::default(), running: 0.into(), running_max: 0.into() });
    let models = Json(json!({"object": "list", "data": [{"id": "tiny", "object": "model"}]}));
    let app = Router::new()
        .route("/v1/models", get(async || models))
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(complete))
        .with_state(server.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (server, url)
}

async fn complete(State(server): State<Arc<Server>>, Json(ask): Json<Value>) -> Response {
    let index = server.asked.lock().unwrap().len();
    server.asked.lock().unwrap().push(ask.clone());
    let running = server.running.fetch_add(1, Relaxed) + 1;
    server.running_max.fetch_max(running, Relaxed);

    let chat = ask.get("messages").is_some();
    let tokens = ask["max_tokens"].as_u64().unwrap();
    let event = |data: String| Ok::<_, io::Error>(Bytes::from(format!("data: {data}\n\n")));
    let token =
        event(if chat { json!({"choices": [{"delta": {"content": "x"}}]}) } else { json!({"choices": [{"text": "x"}]}) }.to_string());
    let usage = json!({"prompt_tokens": 32, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 16}});
    let mut events = Vec::new();
    if chat {
        events.push(event(json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}).to_string()));
    }
    // The break comes late enough for the headers to be sent before it.
    let mut apart = Duration::from_millis(20);
    match (server.answer)(index) {
        Answer::Refuse => {
            server.running.fetch_sub(1, Relaxed);
            return (StatusCode::TOO_MANY_REQUESTS, Json(json!({"error": {"message": "come back later"}}))).into_response();
        }
        Answer::Tokens(gap) => {
            apart = gap;
            events.extend((0..tokens).map(|_| Ok(token.as_ref().unwrap().clone())));
            events.push(event(json!({"choices": [], "usage": usage}).to_string()));
            events.push(event("[DONE]".into()));
        }
        Answer::Break => events.extend([token, Err(io::ErrorKind::ConnectionReset.into())]),
        Answer::Fail => events.extend([token, event(json!({"error": {"message": "no worker is left"}}).to_string())]),
        Answer::Silence => {}
    }
    let silent = (server.answer)(index) == Answer::Silence;
    let paced = stream::iter(events).then(move |event| async move {
        tokio::time::sleep(apart).await;
        event
    });
    let at_end = stream::once(async move {
        if silent {
            std::future::pending::<()>().await;
        }
        server.running.fetch_sub(1, Relaxed);
        Ok(Bytes::new())
    });
    ([("content-type", "text/event-stream")], Body::from_stream(paced.chain(at_end))).into_response()
}

/// Runs `load` with `flags`. Returns the JSON that it wrote, and whether it succeeded.
async fn load(url: &str, flags: &[&str]) -> (Value, bool) {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("report.json");
    let fixed = ["load", "--url", url, "--json", json.to_str().unwrap()];
    let done = run(Cli::parse_from(fixed.iter().chain(flags)).load).await.is_ok();
    let text = std::fs::read_to_string(&json).unwrap_or(r#"{"result": null}"#.into());
    let record: Value = serde_json::from_str(&text).unwrap();
    (record["result"].clone(), done)
}

#[tokio::test]
async fn a_good_server_is_measured() {
    let (server, url) = start(|_| Answer::Tokens(Duration::from_millis(10))).await;
    let flags = ["--rate", "100", "--requests", "12", "--input-len", "32", "--output-len", "5", "--seed", "9", "--slo-ttft-ms", "60000"];
    let (report, done) = load(&url, &flags).await;
    assert!(done);
    assert_eq!((&report["completed"], &report["errors"]), (&json!(12), &json!(0)));
    assert_eq!((&report["output_tokens"], &report["cached_tokens"]), (&json!(60), &json!(192)));
    assert_eq!(report["goodput"]["ratio"], json!(1.0));
    // The server sleeps 10 ms before each token: no token comes earlier, regardless of the machine's load.
    let p50 = |name: &str| report[name]["p50"].as_f64().unwrap();
    assert!(p50("ttft_ms") >= 10.0 && p50("e2e_ms") >= 50.0, "{report}");
    assert!(p50("tpot_ms") > 0.0 && p50("itl_ms") > 0.0, "{report}");
    assert_eq!((&report["settings"]["seed"], &report["settings"]["model"]), (&json!(9), &json!("tiny")));

    let asked = server.asked.lock().unwrap();
    assert_eq!(asked.len(), 13, "the probe and the twelve");
    for ask in &asked[1..] {
        assert_eq!(ask["prompt"].as_array().unwrap().len(), 32);
        assert_eq!((&ask["ignore_eos"], &ask["temperature"], &ask["stream"]), (&json!(true), &json!(0), &json!(true)));
    }
}

#[tokio::test]
async fn waiting_for_a_slot_counts() {
    let (server, url) = start(|_| Answer::Tokens(Duration::from_millis(20))).await;
    let flags = ["--rate", "inf", "--requests", "6", "--output-len", "2", "--concurrency-max", "2", "--chat", "--input-len", "8"];
    let (report, done) = load(&url, &flags).await;
    assert!(done && server.running_max.load(Relaxed) <= 2);
    // Three rounds of two. A round is five events, 20 ms each (role, two tokens, usage, end), and the last one's first
    // token is its second event.
    assert!(report["ttft_ms"]["max"].as_f64().unwrap() >= 240.0, "{report}");
    let asked = server.asked.lock().unwrap();
    assert!(asked.iter().all(|ask| ask["messages"][0]["content"].as_str().unwrap().split(' ').count() == 8));
}

#[tokio::test]
async fn faults_are_counted_by_kind() {
    let (_, url) = start(|index| match index {
        1 => Answer::Refuse,
        2 => Answer::Break,
        3 => Answer::Fail,
        4 => Answer::Silence,
        _ => Answer::Tokens(Duration::ZERO),
    })
    .await;
    let (report, done) = load(&url, &["--rate", "50", "--requests", "8", "--output-len", "3", "--timeout-s", "2"]).await;
    assert!(done);
    assert_eq!((&report["completed"], &report["errors"]), (&json!(4), &json!(4)));
    for kind in ["http_429", "broken_stream", "failed_midway", "timeout"] {
        assert_eq!(report["errors_by_kind"][kind]["count"], json!(1), "{kind}: {report}");
    }
    assert_eq!(report["errors_by_kind"]["http_429"]["example"], "the server refused with status 429: come back later");
}

#[tokio::test]
async fn a_server_that_takes_no_request_is_told_before_the_load() {
    let (server, url) = start(|_| Answer::Refuse).await;
    let (report, done) = load(&url, &["--rate", "inf"]).await;
    assert!(!done && report.is_null());
    assert_eq!(server.asked.lock().unwrap().len(), 1);
    let (_, done) = load("http://127.0.0.1:1/v1", &["--rate", "inf"]).await;
    assert!(!done);
}
