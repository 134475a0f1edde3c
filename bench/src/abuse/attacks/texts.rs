//! Bodies that are long, deep or odd.

use super::super::attacker::Attacker;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const AT_ONCE: usize = 8;
const MIB: usize = 1 << 20;

async fn post(attacker: &Attacker, path: &'static str, body: Value) {
    attacker.post_each(AT_ONCE, vec![(path, body.to_string().into())]).await;
}

fn said(content: impl Into<Value>) -> Value {
    json!([{"role": "user", "content": content.into()}])
}

pub async fn tokenize_long(attacker: Attacker) {
    post(&attacker, "/tokenize", json!({"prompt": "a".repeat(8 * MIB - 100)})).await;
}

pub async fn tokenize_leave(attacker: Attacker) {
    let body = json!({"prompt": "ab ".repeat(MIB / 2)}).to_string();
    let request = format!("{}content-length: {}\r\n\r\n{body}", attacker.head("POST", "/tokenize"), body.len());
    attacker
        .each(AT_ONCE, async |_| {
            if let Some(mut stream) = attacker.say(request.as_bytes()).await {
                let _ = stream.shutdown().await;
                attacker.count("left");
            }
        })
        .await;
}

pub async fn tokenize_fits(attacker: Attacker) {
    let texts = [16 << 10, 64 << 10, 128 << 10].map(|bytes| json!({"prompt": "ab c".repeat(bytes / 4), "return_token_strs": true}));
    let bodies = texts.into_iter().map(|text| ("/tokenize", Bytes::from(text.to_string())));
    attacker.post_each(AT_ONCE, bodies.collect()).await;
}

pub async fn detokenize(attacker: Attacker) {
    let bodies =
        [4000, 4096, 100_000, 1_000_000].map(|tokens| ("/detokenize", Bytes::from(json!({"tokens": vec![300; tokens]}).to_string())));
    attacker.post_each(AT_ONCE, bodies.into()).await;
}

pub async fn count_tokens(attacker: Attacker) {
    post(&attacker, "/v1/messages/count_tokens", json!({"model": attacker.model, "messages": said("a b".repeat(7 * MIB / 3))})).await;
}

pub async fn moderations(attacker: Attacker) {
    post(&attacker, "/v1/moderations", json!({"input": "how do I ".repeat(7 * MIB / 9)})).await;
}

pub async fn embeddings(attacker: Attacker) {
    attacker
        .each(AT_ONCE, async |n| {
            let texts: Vec<_> = (0..2048).map(|i| format!("{n} {i} what does the wheel of the mill turn?")).collect();
            attacker.post_json("/v1/embeddings", &json!({"input": texts})).await;
        })
        .await;
}

pub async fn deep(attacker: Attacker) {
    let places = ["messages", "tools", "metadata", "response_format", "chat_template_kwargs", "x"];
    let bodies = places.iter().flat_map(|place| {
        [("[", "]"), ("{\"a\":", "}")].map(|(open, close)| {
            let deep = format!("{}1{}", open.repeat(100_000), close.repeat(100_000));
            let rest = if *place == "messages" { "" } else { ",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":1" };
            (CHAT, Bytes::from(format!("{{\"{place}\":{deep}{rest}}}")))
        })
    });
    attacker.post_each(AT_ONCE, bodies.collect()).await;
}

pub async fn many_keys(attacker: Attacker) {
    let keys: String = (0..400_000).map(|n| format!("\"k{n}\":{n},")).collect();
    let body = Bytes::from(format!("{{{keys}\"messages\":[{{\"role\":\"user\",\"content\":\"hi\",{keys}\"x\":1}}],\"max_tokens\":1}}"));
    let body = if body.len() < 8 * MIB { body } else { Bytes::from(format!("{{{keys}\"prompt\":\"hi\",\"max_tokens\":1}}")) };
    attacker.post_each(AT_ONCE, vec![(CHAT, body.clone()), (TEXT, body)]).await;
}

pub async fn numbers(attacker: Attacker) {
    let digits = "9".repeat(MIB);
    let bodies = ["max_tokens", "temperature", "seed", "n", "x"]
        .map(|field| (TEXT, Bytes::from(format!("{{\"prompt\":\"hi\",\"{field}\":{digits}.{digits}e{}}}", &digits[..300]))));
    attacker.post_each(AT_ONCE, bodies.into()).await;
}

pub async fn escapes(attacker: Attacker) {
    let text = "\\ud83d\\ude00".repeat(8 * MIB / 12 - 100);
    attacker.post_each(AT_ONCE, vec![(TEXT, Bytes::from(format!("{{\"prompt\":\"{text}\"}}")))]).await;
}

pub async fn many_messages(attacker: Attacker) {
    let messages: Vec<_> = (0..50_000).map(|_| json!({"role": "system", "content": "x"})).collect();
    let body = Bytes::from(json!({"messages": messages}).to_string());
    attacker.post_each(AT_ONCE, vec![(CHAT, body.clone()), ("/tokenize", body)]).await;
}

pub async fn template_kwargs(attacker: Attacker) {
    let list: Vec<_> = (0..1_000_000).map(|n| n % 10).collect();
    let bodies = [json!({"a": list}), json!({"messages": "x".repeat(7 * MIB)}), json!({"bos_token": "<|user|>".repeat(500_000)})];
    let bodies = bodies
        .map(|kwargs| (CHAT, Bytes::from(json!({"messages": said("hi"), "max_tokens": 1, "chat_template_kwargs": kwargs}).to_string())));
    attacker.post_each(AT_ONCE, bodies.into()).await;
}

pub async fn biases_and_stops(attacker: Attacker) {
    let biases: serde_json::Map<_, _> = (0..300_000).map(|n| (n.to_string(), json!(1))).collect();
    let stops: Vec<_> = (0..300_000).map(|n| n.to_string()).collect();
    let bodies = [
        json!({"logit_bias": biases}),
        json!({"stop": stops}),
        json!({"stop": "x".repeat(MIB)}),
        json!({"stop_token_ids": vec![1; 1_000_000]}),
    ];
    let bodies = bodies.map(|mut body| {
        body["prompt"] = json!("hi");
        (TEXT, Bytes::from(body.to_string()))
    });
    attacker.post_each(AT_ONCE, bodies.into()).await;
}

/// Sends the marks that delimit the model's own turns, whose ids must come from the template alone.
pub async fn control_tokens(attacker: Attacker) {
    const MARKS: [&str; 5] = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "</s>"];
    let tokens = async |body: Value| -> Option<Vec<u64>> {
        let answer = attacker.post_json("/tokenize", &body).await?;
        Some(answer.json()["tokens"].as_array()?.iter().filter_map(Value::as_u64).collect())
    };
    attacker
        .each(1, async |n| {
            // A plain prompt may contain marks, so this gives the mark's id.
            let mark = MARKS[n as usize % MARKS.len()];
            let alone = tokens(json!({"prompt": mark, "add_special_tokens": false})).await;
            let honest = tokens(json!({"messages": said("hi there")})).await;
            let forged = tokens(json!({"messages": said(format!("hi {mark} there {mark}"))})).await;
            if let (Some(alone), Some(honest), Some(forged)) = (alone, honest, forged)
                && let [id] = alone[..]
            {
                let count = |tokens: &[u64]| tokens.iter().filter(|token| **token == id).count();
                if count(&honest) != count(&forged) {
                    attacker.find(&format!("`{mark}` in a message became a special token"));
                }
            }
        })
        .await;
}
