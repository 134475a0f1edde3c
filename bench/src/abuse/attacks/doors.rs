//! Attacks on data of other tenants and of operators, and guesses of keys.

use super::{
    super::attacker::Attacker,
    stored::{LISTS, try_all},
};
use bytes::Bytes;
use reqwest::Method;
use serde_json::json;
use std::time::Duration;

pub async fn others(attacker: Attacker) {
    let ids = attacker.others.clone();
    // Lists must only show the attacker's own objects.
    for path in LISTS {
        if let Some(answer) = attacker.get(path).await {
            let listed = String::from_utf8_lossy(&answer.body).into_owned();
            if [&ids.conversation, &ids.response, &ids.chat, &ids.file].iter().any(|id| listed.contains(id.as_str())) {
                attacker.find(&format!("{path} lists what is another's"));
            }
        }
    }
    let gone_on = json!({"input": "And?", "previous_response_id": ids.response, "max_output_tokens": 1});
    let joined = json!({"messages": [{"role": "user", "content": "And?"}], "conversation": ids.conversation, "max_tokens": 1});
    let batch = json!({"input_file_id": ids.file, "endpoint": "/v1/completions", "completion_window": "24h"});
    for (path, body) in [("/v1/responses", gone_on), ("/v1/chat/completions", joined), ("/v1/batches", batch)] {
        if attacker.post_json(path, &body).await.is_some_and(|answer| answer.status == 200) {
            attacker.find(&format!("{path} went on from what is another's"));
        }
    }
    let conversation = format!("/v1/conversations/{}", ids.conversation);
    let more = [format!("{conversation}/branch"), format!("/v1/responses/{}/cancel", ids.response)];
    let paths: Vec<_> = ids.paths.iter().cloned().chain(more).collect();
    try_all(&attacker, &[Method::GET, Method::DELETE, Method::POST], &paths).await;
}

pub async fn operators(attacker: Attacker) {
    let paths = [
        "/metrics",
        "/cluster",
        "/cluster/events",
        "/admin/keys",
        "/admin/tenants",
        "/admin/tenants/ann",
        "/admin/feedback",
        "/admin/appeals",
        "/registry",
        "/rollouts",
        "/rollouts/votes",
        "/coordinators/coordinator-0",
    ];
    try_all(&attacker, &[Method::GET, Method::POST, Method::PUT, Method::DELETE], &paths.map(str::to_owned)).await;
}

pub async fn odd_paths(attacker: Attacker) {
    let paths = [
        "/v1/files/..%2f..%2f..%2fetc%2fpasswd/content",
        "/v1/files/../../../etc/passwd",
        "//v1//models//..",
        "/v1/models/%00",
        "/console/..%2f..%2fkey",
        "/v1/conversations/%2e%2e",
        "/%",
        "*",
        "/v1/files/a%0d%0ax:y/content",
        "/\u{7f}",
        "/v1/batches/'%20or%201=1--",
    ];
    let long = format!("/v1/models/{}", "a/".repeat(8000));
    attacker
        .each(8, async |n| {
            let path = paths.get(n as usize % (paths.len() + 1)).copied().unwrap_or(&long);
            let request = format!("{}\r\n", attacker.head("GET", path));
            if let Some(mut stream) = attacker.say(request.as_bytes()).await {
                attacker.hear(&mut stream, Duration::from_secs(5)).await;
            }
        })
        .await;
}

pub async fn guessed_keys(attacker: Attacker) {
    let body = Bytes::from(json!({"messages": [{"role": "user", "content": "x".repeat(1 << 20)}]}).to_string());
    let token = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4iLCJ0ZW5hbnQiOiJhbm4ifQ.";
    attacker
        .each(16, async |n| {
            let key = if n % 2 == 0 { format!("tm_{n:064x}") } else { format!("{token}{}", "A".repeat(n as usize % 8000)) };
            let mut guesser = attacker.clone();
            guesser.key = key;
            guesser.ask(Method::POST, "/v1/chat/completions", if n % 8 == 0 { body.clone() } else { Bytes::from_static(b"{}") }, &[]).await;
        })
        .await;
}
