//! Attacks by answers that are many, long, not read, or abandoned.

use super::super::attacker::Attacker;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::{io::AsyncWriteExt, time::sleep};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

pub async fn queue(attacker: Attacker) {
    // This is 31,744 of the 100,000 tokens per minute of the tier.
    let body = json!({"prompt": vec![vec![5]; 1024], "max_tokens": 30}).to_string();
    attacker.post_each(8, vec![(TEXT, body.into())]).await;
}

pub async fn choices(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            let body = json!({"prompt": format!("{n}"), "n": 128, "max_tokens": 200, "logprobs": 20, "temperature": 1, "ignore_eos": true});
            attacker.post_json(TEXT, &body).await;
        })
        .await;
}

pub async fn long_prompts(attacker: Attacker) {
    attacker
        .each(16, async |n| {
            let prompt: Vec<u64> = (0..4000).map(|i| 3 + (i * 31 + n * 977) % 3000).collect();
            attacker.post_json(TEXT, &json!({"prompt": prompt, "max_tokens": 1})).await;
        })
        .await;
}

fn long_stream() -> Value {
    json!({"messages": [{"role": "user", "content": "Tell me all."}], "stream": true, "n": 4, "max_tokens": 1000, "ignore_eos": true,
           "logprobs": true, "top_logprobs": 20})
}

/// Answers of a megabyte, to clients whose sockets take a few kilobytes.
pub async fn unread(attacker: Attacker) {
    let body = long_stream().to_string();
    let request = format!("{}content-length: {}\r\n\r\n{body}", attacker.head("POST", CHAT), body.len());
    attacker
        .each(32, async |_| {
            if let Some(mut stream) = attacker.say(request.as_bytes()).await {
                attacker.hear(&mut stream, Duration::from_secs(10)).await;
                attacker.linger().await;
                let _ = stream.shutdown().await;
            }
        })
        .await;
}

pub async fn left(attacker: Attacker) {
    let body = long_stream().to_string();
    attacker
        .each(8, async |n| {
            if let Some(mut response) = attacker.send(Method::POST, CHAT, body.clone().into(), &[]).await
                && n % 2 == 0
            {
                let _ = response.chunk().await;
            }
        })
        .await;
}

pub async fn many(attacker: Attacker) {
    let body = json!({"messages": [{"role": "user", "content": "Go on."}], "stream": true, "max_tokens": 500, "ignore_eos": true});
    attacker
        .each(64, async |_| {
            if attacker.post_json(CHAT, &body).await.is_some_and(|answer| answer.status != 200) {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
}
