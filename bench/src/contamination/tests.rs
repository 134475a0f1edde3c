use super::*;
use axum::{Json, Router, extract::State, routing::get, routing::post};
use clap::Parser;
use serde_json::json;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// A server that answers with a prompt's secret word, and caches answers with a certain fault.
struct Server {
    fault: Fault,
    cache: Mutex<HashMap<String, String>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Prompts of equal length get one answer: that of the first.
    MixesUp,
    /// Answers from the cache lack a letter.
    LosesALetter,
    NoCache,
}

async fn answer(State(server): State<Arc<Server>>, Json(ask): Json<Value>) -> String {
    let text = ask["messages"].to_string();
    let tokens = text.split(' ').count();
    let secret = text.split("conversation is ").nth(1).and_then(|rest| rest.split('.').next());
    let right = format!("It is {}", secret.map_or_else(|| text.len().to_string(), str::to_owned));
    let salt = ask["cache_salt"].to_string();
    let name = if server.fault == Fault::MixesUp { format!("{salt} {tokens}") } else { format!("{salt} {text}") };
    let mut cache = server.cache.lock().unwrap();
    let found = cache.get(&name).filter(|_| server.fault != Fault::NoCache).cloned();
    let cached = if found.is_some() { tokens } else { 0 };
    let answer = match found {
        Some(found) if server.fault == Fault::LosesALetter => found[1..].to_owned(),
        Some(found) => found,
        None => cache.entry(name).or_insert(right).clone(),
    };
    let usage = json!({"prompt_tokens": tokens, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}});
    let event = json!({"choices": [{"delta": {"content": answer}, "finish_reason": "stop"}], "usage": usage});
    format!("data: {event}\n\ndata: [DONE]\n\n")
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: ContaminationArgs,
}

async fn measured(fault: Fault, flags: &[&str]) -> Report {
    let server = Arc::new(Server { fault, cache: Mutex::default() });
    let models = get(|| async { Json(json!({"data": [{"id": "fake"}]})) });
    let app = Router::new().route("/v1/models", models).route("/v1/chat/completions", post(answer)).with_state(server);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let few = ["test", "--url", &url, "--conversations", "5", "--tokens", "400", "--short", "8", "--settle-s", "0"];
    measure(Cli::parse_from(few.iter().chain(flags)).args).await.unwrap()
}

#[tokio::test]
async fn a_good_server_is_found_good_and_restarts_have_passes() {
    let dir = tempfile::tempdir().unwrap();
    let restart = format!("touch {}", dir.path().join("restarted").display());
    let report = measured(Fault::None, &["--restart", &restart]).await;
    assert!(dir.path().join("restarted").exists());
    assert_eq!(report.passes.len(), 3);
    assert!(report.passes.iter().chain([&report.reference]).all(|pass| pass.requests == 13 && pass.is_clean()), "{report:?}");
    let cached: Vec<bool> = report.passes.iter().map(|pass| pass.cached_tokens > 0).collect();
    assert_eq!((report.reference.cached_tokens, cached), (0, vec![false, true, true]));
    assert_eq!(report.doubts, Vec::<String>::new());
}

#[tokio::test]
async fn a_server_that_gives_one_the_answer_of_another_is_found_out() {
    let report = measured(Fault::MixesUp, &[]).await;
    let leaked: Vec<u64> = report.passes.iter().map(|pass| pass.leaked).collect();
    assert!(leaked.iter().all(|leaked| *leaked == 4), "all but the first conversation: {report:?}");
    assert!(report.passes[0].findings.iter().any(|finding| finding.contains("has the secret word of conversation")), "{report:?}");
}

#[tokio::test]
async fn another_byte_from_the_cache_is_found() {
    let report = measured(Fault::LosesALetter, &[]).await;
    assert_eq!(report.passes.iter().map(|pass| (pass.different, pass.leaked)).collect::<Vec<_>>(), [(0, 0), (13, 0)]);
}

#[tokio::test]
async fn a_server_without_a_cache_proves_nothing() {
    let report = measured(Fault::NoCache, &[]).await;
    assert!(report.passes.iter().all(Pass::is_clean));
    assert!(report.doubts[0].contains("no cached token in pass 2"), "{:?}", report.doubts);
}

#[test]
fn fields_are_objects() {
    assert!(reference_fields(r#"{"cache_prompt": false}"#).is_ok());
    assert!(reference_fields("[1]").is_err() && reference_fields("{unique}").is_err());
}
