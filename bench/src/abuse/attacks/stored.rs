//! Attacks that fill the stores: conversations, responses, facts, files and batches, beyond their limits.

use super::super::attacker::{Attacker, FORM_TYPE};
use bytes::Bytes;
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::{fmt::Write, time::Duration};
use tokio::{
    io::AsyncWriteExt,
    time::{Instant, sleep},
};

const MIB: usize = 1 << 20;
const CONVERSATIONS: &str = "/v1/conversations";
/// The time between two requests of a tenant that pays.
const SOON: Duration = Duration::from_millis(500);
/// The time within which a short batch of a tenant that pays must end.
const BATCH_MAX: Duration = Duration::from_secs(10);
/// The room of a tenant's files, by the cluster's settings.
const ROOM_BYTES: u64 = 256 << 20;

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

/// Requests that go on with a history of the largest size, which no model's context holds.
pub async fn gone_on_with(attacker: Attacker) {
    let Some(id) = large(&attacker).await else { return };
    let said = item("hi");
    let whole = json!({"messages": said, "conversation": id, "context": "none", "max_tokens": 1});
    let cut = json!({"messages": said, "conversation": id, "context": "steps", "max_tokens": 1});
    let bodies = [
        ("/v1/chat/completions", whole),
        ("/v1/chat/completions", cut),
        ("/v1/responses", json!({"input": "hi", "conversation": id, "max_output_tokens": 1})),
    ];
    attacker.post_each(16, bodies.into_iter().map(|(path, body)| (path, body.to_string().into())).collect()).await;
}

/// Requests whose input names one stored item thousands of times.
pub async fn named_often(attacker: Attacker) {
    let made = attacker.post_json(CONVERSATIONS, &json!({"items": item(&"a ".repeat(4000))})).await;
    let Some(id) = made.and_then(|made| made.id()) else { return };
    let items = attacker.get(&format!("{CONVERSATIONS}/{id}/items")).await.map(|answer| answer.json()).unwrap_or_default();
    let reference = json!({"type": "item_reference", "id": items["data"][0]["id"]});
    let bodies = [1000, 100_000].map(|times| json!({"input": vec![&reference; times], "max_output_tokens": 1}).to_string());
    attacker.post_each(8, bodies.into_iter().map(|body| ("/v1/responses", body.into())).collect()).await;
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
    send_slowly(&attacker, 16).await;
}

/// The uploads of a tenant that pays, beside slow ones of several keys.
pub async fn slow_uploads_of_many(attacker: Attacker) {
    let clients: Vec<_> = attacker.more_keys.iter().map(|key| attacker.with_key(key)).collect();
    let paying = attacker.paying();
    let beside = attacker.each(1, async |n| {
        sleep(SOON).await;
        if let Some(answer) = paying.upload(&line(n as usize, &paying.model)).await
            && answer.status != 200
        {
            attacker.find(&format!("who pays cannot upload: {} {}", answer.status, answer.json()));
        }
    });
    tokio::join!(join_all(clients.iter().map(|client| send_slowly(client, 4))), beside);
}

async fn send_slowly(attacker: &Attacker, at_once: usize) {
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
    join_all((0..at_once).map(|_| slow())).await;
}

/// Forms from which no part can be cut: the bytes before the first boundary do not end, or the head of a field, first or later. And one of
/// many small parts, for each of which the parser may ask for more.
pub async fn endless_uploads(attacker: Attacker) {
    let second = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}\r\n--b\r\n";
    let small = "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n".repeat(1000);
    let many = format!("{small}--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n");
    let beginnings = ["", "--b\r\ncontent-disposition: ", second, &many];
    let forms = beginnings.map(|beginning| Bytes::from(format!("{beginning}{}", "a".repeat(64 * MIB))));
    attacker
        .each(4, async |n| {
            attacker.ask(Method::POST, "/v1/files", forms[n as usize % forms.len()].clone(), &[("content-type", FORM_TYPE)]).await;
        })
        .await;
}

pub async fn many_files_in_one(attacker: Attacker) {
    let file = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}\r\n";
    let form = Bytes::from(format!("{}--b--\r\n", file.repeat(1000)));
    attacker
        .each(8, async |_| {
            attacker.ask(Method::POST, "/v1/files", form.clone(), &[("content-type", FORM_TYPE)]).await;
        })
        .await;
}

fn line(n: usize, model: &str) -> String {
    let body = json!({"model": model, "prompt": "hi", "max_tokens": 1});
    json!({"custom_id": format!("{n}"), "method": "POST", "url": "/v1/completions", "body": body}).to_string()
}

/// Makes a batch of a file. Returns its id.
async fn batch(attacker: &Attacker, file: &str) -> Option<String> {
    let file = attacker.upload(file).await?.id()?;
    let wanted = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
    attacker.post_json("/v1/batches", &wanted).await?.id()
}

pub async fn large_batches(attacker: Attacker) {
    let file = (0..50_000).fold(String::new(), |mut file, n| {
        let _ = writeln!(file, "{}", line(n, &attacker.model));
        file
    });
    attacker.each(2, async |_| drop(batch(&attacker, &file).await)).await;
}

pub async fn many_batches(attacker: Attacker) {
    attacker.each(8, async |n| drop(batch(&attacker, &line(n as usize, &attacker.model)).await)).await;
}

/// Lines with this in their bodies.
fn lines(count: usize, model: &str, more: &Value) -> String {
    let of = |n: usize| {
        let mut body = json!({"model": model, "prompt": format!("{n}"), "ignore_eos": true});
        body.as_object_mut().into_iter().for_each(|body| body.extend(more.as_object().cloned().unwrap_or_default()));
        format!("{}\n", json!({"custom_id": format!("{n}"), "method": "POST", "url": "/v1/completions", "body": body}))
    };
    (0..count).map(of).collect()
}

/// Long batches, and beside them those of a tenant that pays, of one short line each.
pub async fn before_one(attacker: Attacker) {
    let long = lines(20, &attacker.model, &json!({"max_tokens": 500}));
    let paying = attacker.paying();
    let beside = attacker.each(1, async |n| {
        sleep(SOON).await;
        let began = Instant::now();
        let Some(id) = batch(&paying, &line(n as usize, &paying.model)).await else {
            attacker.find("who pays cannot make a batch");
            return;
        };
        while paying.get(&format!("/v1/batches/{id}")).await.is_none_or(|answer| answer.json()["status"] != "completed") {
            if began.elapsed() > BATCH_MAX {
                attacker.find(&format!("a batch of one line of who pays has not ended after {BATCH_MAX:?}"));
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
        attacker.count("batches of who pays");
    });
    tokio::join!(attacker.each(2, async |_| drop(batch(&attacker, &long).await)), beside);
}

/// Batches whose answers are much longer than their lines, until the tenant's room is full.
pub async fn large_answers(attacker: Attacker) {
    let file = lines(100, &attacker.model, &json!({"max_tokens": 200, "n": 8, "logprobs": 20}));
    attacker
        .each(2, async |_| {
            batch(&attacker, &file).await;
            let files = attacker.get("/v1/files?limit=1000").await.map(|answer| answer.json()).unwrap_or_default();
            let bytes = files["data"].as_array().into_iter().flatten().filter_map(|file| file["bytes"].as_u64()).sum::<u64>();
            if bytes > ROOM_BYTES {
                attacker.find(&format!("files and answers of {bytes} bytes are kept"));
            }
        })
        .await;
}

pub async fn odd_files(attacker: Attacker) {
    let all = [
        "\n".repeat(4 * MIB),
        "{}\n".repeat(MIB),
        "[".repeat(4 * MIB),
        "x".repeat(40 * MIB),
        format!("{}\n", line(1, &attacker.model)).repeat(40_000),
    ];
    attacker.each(2, async |n| drop(batch(&attacker, &all[n as usize % all.len()]).await)).await;
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
