//! Attacks on data of other tenants and of operators, and guesses of keys.

use super::{
    super::attacker::Attacker,
    connections::hold,
    stored::{LISTS, try_all},
};
use bytes::Bytes;
use futures_util::future::join_all;
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

/// Tokens that are well-formed, and signed by a key of which nothing is known.
pub async fn forged_tokens(attacker: Attacker) {
    // {"alg":"ES256","kid":"x"}, {"sub":"ann"}
    let token = format!("eyJhbGciOiJFUzI1NiIsImtpZCI6IngifQ.eyJzdWIiOiJhbm4ifQ.{}", "A".repeat(86));
    let request = format!("{}\r\n", attacker.with_key(&token).head("GET", "/v1/models"));
    join_all((0..16).map(|address| hold(&attacker, address, 256, request.as_bytes()))).await;
}

/// The requests of one key in a minute.
const PER_KEY: usize = 20;

/// Requests that each key may send: together, many times as many as the cluster can answer.
pub async fn many_keys(attacker: Attacker) {
    let clients: Vec<_> = attacker.more_keys.iter().map(|key| attacker.with_key(key)).collect();
    let line = json!({"custom_id": "a", "method": "POST", "url": "/v1/completions",
                      "body": {"model": attacker.model, "prompt": "hi", "max_tokens": 64}});
    let file = format!("{line}\n");
    attacker
        .each(128, async |n| {
            let (turn, place) = (n as usize / clients.len(), n as usize % clients.len());
            if turn >= PER_KEY {
                return attacker.linger().await;
            }
            let client = &clients[place];
            match (turn + place) % 4 {
                0 => {
                    let said = json!([{"role": "user", "content": format!("{n}: go on, and on, and on.")}]);
                    client.post_json("/v1/chat/completions", &json!({"messages": said, "max_tokens": 64, "stream": n % 2 == 0})).await;
                }
                1 => {
                    let texts: Vec<_> = (0..16).map(|i| format!("{n} {i} what does the wheel of the mill turn?")).collect();
                    client.post_json("/v1/embeddings", &json!({"input": texts})).await;
                }
                2 => drop(client.upload(&file.repeat(200)).await),
                _ => {
                    let item = json!({"type": "message", "role": "user", "content": format!("{n} ").repeat(1000)});
                    client.post_json("/v1/conversations", &json!({"items": [item]})).await;
                }
            }
        })
        .await;
}
