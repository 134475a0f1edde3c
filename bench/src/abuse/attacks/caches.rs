//! Attacks on answers that are kept, and on votes.

use super::super::attacker::Attacker;
use bytes::Bytes;
use reqwest::Method;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn chat(question: &str) -> Value {
    json!({"messages": [{"role": "user", "content": question}], "max_tokens": 4, "temperature": 0})
}

pub async fn replays(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            let body = json!({"messages": [{"role": "user", "content": format!("{n}")}], "n": 8, "max_tokens": 30, "logprobs": true,
                              "top_logprobs": 20, "stream": n % 2 == 0});
            attacker.ask(Method::POST, CHAT, body.to_string().into(), &[("idempotency-key", &format!("flood-{n}"))]).await;
        })
        .await;
}

pub async fn large_replays(attacker: Attacker) {
    let body = Bytes::from(json!({"prompt": "x".repeat(7 << 20)}).to_string());
    attacker
        .each(8, async |n| {
            attacker.ask(Method::POST, "/v1/completions", body.clone(), &[("idempotency-key", &format!("large-{n}"))]).await;
        })
        .await;
}

/// Asks for another tenant's kept answer by its id, and by repeating the request with its idempotency key, which must give the
/// attacker an answer of its own.
pub async fn others_replay(attacker: Attacker) {
    let by_id = format!("{CHAT}/{}?stream=true", attacker.others.chat);
    let (key, body) = (attacker.kept.key.clone(), attacker.kept.request.to_string());
    attacker
        .each(2, async |n| {
            let answer = match n % 2 {
                0 => attacker.get(&by_id).await,
                _ => attacker.ask(Method::POST, CHAT, body.clone().into(), &[("idempotency-key", &key)]).await,
            };
            // The second time, the attacker's own answer is repeated.
            if let Some(answer) = answer
                && answer.status == 200
                && (n % 2 == 0 || answer.body == attacker.kept.answer)
            {
                attacker.find(&format!("another's answer was given again: {:?}", answer.headers.get("x-idempotency")));
            }
        })
        .await;
}

pub async fn response_cache(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            attacker.post_json(CHAT, &chat(&format!("{n} {}", "and then? ".repeat(50)))).await;
        })
        .await;
}

pub async fn semantic_cache(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            let question =
                format!("How does the {} of mill {n} turn the {}?", ["wheel", "stone", "shaft"][n as usize % 3], "grain ".repeat(20));
            attacker.post_json(CHAT, &chat(&question)).await;
        })
        .await;
}

pub async fn votes(attacker: Attacker) {
    let own = attacker.post_json(CHAT, &chat("hi")).await.and_then(|answer| answer.id());
    attacker
        .each(4, async |n| {
            let id = own.as_ref().filter(|_| n % 2 == 0).unwrap_or(&attacker.others.chat);
            let vote = json!({"response_id": id, "rating": "down", "user": format!("v{n}"), "comment": "x".repeat(4000)});
            if let Some(answer) = attacker.post_json("/v1/feedback", &vote).await
                && answer.status == 200
                && *id == attacker.others.chat
            {
                attacker.find("a vote on another's answer was taken");
            }
        })
        .await;
}
