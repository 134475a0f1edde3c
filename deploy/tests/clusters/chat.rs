//! `tidemill chat` through pipes, against a small server that streams in OpenAI's format.

use axum::{
    Json, Router,
    extract::State,
    http::header,
    response::IntoResponse,
    routing::{get, post},
};
use serde_json::{Value, json};
use std::{
    process::{Output, Stdio},
    sync::{Arc, Mutex},
};
use tokio::{io::AsyncWriteExt, net::TcpListener, process::Command};

type Asked = Arc<Mutex<Vec<Value>>>;

/// Answers the n-th question with `answer n`, in two pieces.
async fn answer(State(asked): State<Asked>, Json(question): Json<Value>) -> impl IntoResponse {
    let n = {
        let mut asked = asked.lock().unwrap();
        asked.push(question);
        asked.len()
    };
    let piece = |text: &str| json!({"choices": [{"delta": {"content": text}}]});
    let usage = json!({"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32},
        "tidemill": {"tokens": {"dram": 32, "local": 8}}});
    let events = [
        json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        piece("answer"),
        piece(&format!(" {n}")),
        json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        json!({"choices": [], "usage": usage}),
    ];
    let events: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    ([(header::CONTENT_TYPE, "text/event-stream")], events + "data: [DONE]\n\n")
}

async fn server() -> (Asked, String) {
    let asked = Asked::default();
    let models = Json(json!({"object": "list", "data": [{"id": "tiny"}]}));
    let app = Router::new().route("/v1/models", get(async || models)).route("/v1/chat/completions", post(answer)).with_state(asked.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (asked, url)
}

async fn chat(url: &str, flags: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidemill"));
    command.args(["chat", "--url", url]).args(flags).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().unwrap();
    // A chat that ends at once may be gone before its input arrives.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes()).await;
    child.wait_with_output().await.unwrap()
}

#[tokio::test]
async fn a_conversation_goes_on_until_it_is_reset() {
    let (asked, url) = server().await;
    let output = chat(&url, &["--system", "Be brief.", "--max-tokens", "9"], "one\n\ntwo\n/reset\nthree\n/quit\nfour\n").await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "answer 1\nanswer 2\nanswer 3\n");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr.matches("32 of 40 prompt tokens cached · dram 32, local 8").count(), 3, "{stderr}");

    let asked = asked.lock().unwrap();
    let said =
        |n: usize| -> Vec<&str> { asked[n]["messages"].as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap()).collect() };
    assert_eq!(asked.len(), 3, "an empty line and what follows /quit ask nothing");
    assert_eq!(said(0), ["Be brief.", "one"]);
    assert_eq!(said(1), ["Be brief.", "one", "answer 1", "two"]);
    assert_eq!(said(2), ["Be brief.", "three"]);
    assert_eq!((&asked[0]["model"], &asked[0]["max_tokens"]), (&json!("tiny"), &json!(9)));
}

#[tokio::test]
async fn a_line_that_ends_in_a_backslash_goes_on_and_stats_sum_up() {
    let (asked, url) = server().await;
    let output = chat(&url, &[], "/stats\none \\\ntwo\nthree\n/stats\n").await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.starts_with("no answers yet"), "{stderr}");
    assert!(stderr.contains("2 answers · 4 tokens") && stderr.contains("64 of 80 prompt tokens cached"), "{stderr}");
    let asked = asked.lock().unwrap();
    assert_eq!(asked[0]["messages"][0]["content"], "one \ntwo");
    assert_eq!(asked.len(), 2);
}

#[tokio::test]
async fn without_a_server_it_says_how_to_start_one() {
    let output = chat("http://127.0.0.1:1/v1", &[], "hello\n").await;
    assert!(!output.status.success() && output.stdout.is_empty());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("make up"), "{stderr}");
}
