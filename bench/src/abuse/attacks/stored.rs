//! Attacks that fill the stores: conversations, responses, facts, files and batches, beyond their limits.

use super::super::attacker::{Attacker, FORM_TYPE};
use bytes::Bytes;
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::{fmt::Write, time::Duration};
use tokio::{io::AsyncWriteExt, time::sleep};

const MIB: usize = 1 << 20;
const CONVERSATIONS: &str = "/v1/conversations";

fn item(text: &str) -> Value {
    json!([{"type": "message", "role": "user", "content": text}])
}

pub async fn large_conversations(attacker: Attacker) {
    // These are many texts of a size that a context may hold.
    let items: Vec<_> = (0..20).map(|n| json!({"type": "message", "role": "user", "content": format!("{n}").repeat(8000)})).collect();
    let part = json!({"type": "input_text", "text": "a"});
    let parts = json!([{"type": "message", "role": "user", "content": vec![part; 4 * MIB / 32]}]);
    let bodies = [json!({"items": items}), json!({"items": parts}), json!({"metadata": {"a": "x".repeat(500)}, "title": "y".repeat(MIB)})];
    attacker.post_each(4, bodies.into_iter().map(|body| (CONVERSATIONS, body.to_string().into())).collect()).await;
}

/// Requests that are expensive after parsing, and then wait for the store.
pub async fn waited_for(attacker: Attacker) {
    let made = attacker.post_json(CONVERSATIONS, &json!({})).await;
    let Some(id) = made.and_then(|answer| answer.id()) else { return };
    let fields: Map<_, _> = (0..150_000).map(|n| (format!("{n}"), json!({}))).collect();
    let parameters = json!({"type": "object", "properties": fields});
    let function = json!({"name": "f", "parameters": parameters});
    let chat = json!({
        "messages": [{"role": "user", "content": "hi"}], "conversation": id, "tools": [{"type": "function", "function": function}],
    });
    let response = json!({"input": "hi", "conversation": id, "tools": [{"type": "function", "name": "f", "parameters": parameters}]});
    let bodies = [("/v1/chat/completions", chat), ("/v1/responses", response)];
    attacker.post_each(16, bodies.into_iter().map(|(path, body)| (path, body.to_string().into())).collect()).await;
}

pub async fn many_conversations(attacker: Attacker) {
    let body = json!({"items": item("hi"), "title": "one of many"}).to_string();
    attacker.post_each(16, vec![(CONVERSATIONS, body.into())]).await;
}

/// Creates a conversation of the largest size allowed.
async fn large(attacker: &Attacker) -> Option<String> {
    let id = attacker.post_json(CONVERSATIONS, &json!({})).await?.id()?;
    let part = json!({"type": "input_text", "text": "a"});
    let body = Bytes::from(json!({"items": [{"type": "message", "role": "user", "content": vec![part; 7 * MIB / 32]}]}).to_string());
    for _ in 0..4 {
        attacker.post(&format!("{CONVERSATIONS}/{id}/items"), body.clone()).await?;
    }
    Some(id)
}

pub async fn read_back(attacker: Attacker) {
    let Some(id) = large(&attacker).await else { return };
    let paths = [format!("{CONVERSATIONS}/{id}/items?limit=100"), format!("{CONVERSATIONS}/{id}/export")];
    attacker
        .each(4, async |n| {
            attacker.get(&paths[n as usize % 2]).await;
        })
        .await;
}

pub async fn read_slowly(attacker: Attacker) {
    let Some(id) = large(&attacker).await else { return };
    let request = format!("{}\r\n", attacker.head("GET", &format!("{CONVERSATIONS}/{id}/export")));
    attacker
        .each(32, async |_| {
            if let Some(mut stream) = attacker.say(request.as_bytes()).await
                && attacker.hear(&mut stream, Duration::from_secs(10)).await == Some(200)
            {
                attacker.linger().await;
            }
        })
        .await;
}

pub async fn branches(attacker: Attacker) {
    let items: Vec<_> = (0..100).map(|n| json!({"type": "message", "role": "user", "content": format!("{n}").repeat(500)})).collect();
    let made = attacker.post_json(CONVERSATIONS, &json!({"items": items[..20]})).await;
    let Some(id) = made.and_then(|made| made.id()) else { return };
    for items in items[20..].chunks(20) {
        attacker.post_json(&format!("{CONVERSATIONS}/{id}/items"), &json!({"items": items})).await;
    }
    let newest = std::cell::RefCell::new(id);
    attacker
        .each(8, async |_| {
            let of = newest.borrow().clone();
            if let Some(id) = attacker.post_json(&format!("{CONVERSATIONS}/{of}/branch"), &json!({})).await.and_then(|made| made.id()) {
                newest.replace(id);
            }
        })
        .await;
}

pub async fn exports(attacker: Attacker) {
    for n in 0..4 {
        attacker.post_json(CONVERSATIONS, &json!({"items": item(&format!("{n}").repeat(10_000))})).await;
    }
    attacker
        .each(8, async |_| {
            attacker.get("/v1/conversations/export").await;
        })
        .await;
}

pub async fn responses(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            let body =
                json!({"input": format!("{n} and what it was. ").repeat(400), "max_output_tokens": 1, "metadata": {"n": format!("{n}")}});
            attacker.post_json("/v1/responses", &body).await;
        })
        .await;
}

pub async fn facts(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            attacker.post_json("/v1/memories", &json!({"text": format!("{n}").repeat(100)})).await;
        })
        .await;
}

pub async fn files(attacker: Attacker) {
    attacker
        .each(8, async |n| {
            attacker.upload(&format!("{{\"custom_id\":\"{n}\"}}\n").repeat(if n % 10 == 0 { 200_000 } else { 10 })).await;
        })
        .await;
}

pub async fn slow_uploads(attacker: Attacker) {
    let head = format!("POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: {FORM_TYPE}\r\n", attacker.key);
    let form = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{";
    let request = format!("{head}content-length: 100000\r\n\r\n{form}");
    let slow = || async {
        while !attacker.is_over() {
            let Some(mut stream) = attacker.say(request.as_bytes()).await else { continue };
            while !attacker.is_over() && stream.write_all(b" ").await.is_ok() {
                sleep(Duration::from_millis(200)).await;
            }
            // Reads the refusal, if there is one.
            attacker.hear(&mut stream, Duration::from_millis(100)).await;
        }
    };
    join_all((0..16).map(|_| slow())).await;
}

fn line(n: usize, model: &str) -> String {
    let body = json!({"model": model, "prompt": "hi", "max_tokens": 1});
    json!({"custom_id": format!("{n}"), "method": "POST", "url": "/v1/completions", "body": body}).to_string()
}

async fn batch(attacker: &Attacker, file: &str) {
    if let Some(file) = attacker.upload(file).await.and_then(|answer| answer.id()) {
        let wanted = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        attacker.post_json("/v1/batches", &wanted).await;
    }
}

pub async fn large_batches(attacker: Attacker) {
    let file = (0..50_000).fold(String::new(), |mut file, n| {
        let _ = writeln!(file, "{}", line(n, &attacker.model));
        file
    });
    attacker.each(2, async |_| batch(&attacker, &file).await).await;
}

pub async fn many_batches(attacker: Attacker) {
    attacker.each(8, async |n| batch(&attacker, &line(n as usize, &attacker.model)).await).await;
}

pub async fn odd_files(attacker: Attacker) {
    let all = [
        "\n".repeat(4 * MIB),
        "{}\n".repeat(MIB),
        "[".repeat(4 * MIB),
        "x".repeat(40 * MIB),
        format!("{}\n", line(1, &attacker.model)).repeat(40_000),
    ];
    attacker.each(2, async |n| batch(&attacker, &all[n as usize % all.len()]).await).await;
}

/// The paths that list objects.
pub const LISTS: [&str; 4] = ["/v1/conversations", "/v1/files", "/v1/batches", "/v1/memories"];

/// Tries all methods on other tenants' objects; it deletes nothing of its own.
pub async fn try_all(attacker: &Attacker, methods: &[Method], paths: &[String]) {
    attacker
        .each(4, async |n| {
            let path = &paths[n as usize % paths.len()];
            let method = methods[n as usize / paths.len() % methods.len()].clone();
            let body = if method == Method::GET { Bytes::new() } else { Bytes::from_static(b"{}") };
            if let Some(answer) = attacker.ask(method.clone(), path, body, &[]).await
                && answer.status == 200
            {
                attacker.find(&format!("{method} {path} was answered"));
            }
        })
        .await;
}
