//! Schemas, expressions and grammars that take long to read, to compile or to follow.

use super::super::attacker::Attacker;
use bytes::Bytes;
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
/// Concurrent requests.
const AT_ONCE: usize = 4;

/// A schema that would be compared with itself in (1 + √k)^16 ways.
fn compared(k: usize) -> Value {
    let x = vec![json!({"$ref": "#/$defs/x"}); k];
    json!({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": x}}})
}

fn all_compared() -> Vec<Value> {
    [2, 3, 4, 20].map(compared).into()
}

fn intersection(patterns: usize) -> Value {
    let all: Vec<_> = (10..10 + patterns).map(|n| json!({"type": "string", "pattern": format!(".*{n}.*")})).collect();
    json!({"allOf": all})
}

/// A schema with many parts to search for the one at fault, each beside the same large definition.
fn with_fault(properties: usize) -> Value {
    let mut all: Map<_, _> = (0..properties).map(|n| (format!("p{n}"), json!({}))).collect();
    let big: Map<_, _> = (0..2 * properties).map(|n| (format!("q{n}"), json!({}))).collect();
    all.insert("bad".into(), json!({"type": "string", "pattern": "("}));
    json!({"properties": all, "items": {"$ref": "#/$defs/big"}, "$defs": {"big": {"properties": big}}})
}

/// A request at `path` whose answer must follow `schema`.
fn asking(path: &str, schema: &Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let flat = json!({"type": "json_schema", "name": "s", "schema": schema});
    match path {
        CHAT => json!({"messages": messages, "max_tokens": 4, "response_format": format}),
        MESSAGES => json!({"messages": messages, "max_tokens": 4, "output_config": {"format": flat}}),
        RESPONSES => json!({"input": "hi", "max_output_tokens": 4, "text": {"format": flat}}),
        _ => json!({"prompt": "hi", "max_tokens": 4, "response_format": format}),
    }
}

async fn ask(attacker: &Attacker, paths: &[&'static str], schemas: &[Value]) {
    let body = |path: &&'static str, schema: &Value| {
        let mut body = asking(path, schema);
        body["model"] = attacker.model.clone().into();
        (*path, Bytes::from(body.to_string()))
    };
    let bodies = schemas.iter().flat_map(|schema| paths.iter().map(move |path| body(path, schema))).collect();
    attacker.post_each(AT_ONCE, bodies).await;
}

pub async fn compared_chat(attacker: Attacker) {
    ask(&attacker, &[CHAT], &all_compared()).await;
}

pub async fn compared_completions(attacker: Attacker) {
    ask(&attacker, &[TEXT], &all_compared()).await;
}

pub async fn compared_messages(attacker: Attacker) {
    ask(&attacker, &[MESSAGES], &all_compared()).await;
}

pub async fn compared_responses(attacker: Attacker) {
    ask(&attacker, &[RESPONSES], &all_compared()).await;
}

pub async fn compared_batch(attacker: Attacker) {
    let line = |(n, schema): (usize, &Value)| {
        let mut body = asking(CHAT, schema);
        body["model"] = attacker.model.clone().into();
        json!({"custom_id": format!("{n}"), "method": "POST", "url": CHAT, "body": body}).to_string()
    };
    let file = all_compared().iter().enumerate().map(line).collect::<Vec<_>>().join("\n");
    attacker
        .each(1, async |_| {
            let file = attacker.upload(&file).await.and_then(|answer| answer.id());
            if let Some(file) = file {
                let wanted = json!({"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"});
                attacker.post_json("/v1/batches", &wanted).await;
            }
        })
        .await;
}

pub async fn intersected(attacker: Attacker) {
    ask(&attacker, &[CHAT, TEXT, MESSAGES, RESPONSES], &[12, 14, 16, 20, 100].map(intersection)).await;
}

pub async fn faulty(attacker: Attacker) {
    ask(&attacker, &[CHAT, TEXT], &[1000, 2000, 3000].map(with_fault)).await;
}

/// Schemas that are new each time, so that no verdict is cached.
pub async fn never_seen(attacker: Attacker) {
    attacker
        .each(AT_ONCE, async |n| {
            let patterns: Vec<_> = (0..8).map(|i| json!({"pattern": format!(".*{n}{i}.{{1,{}}}", 20 + n % 40)})).collect();
            let schema = json!({"type": "object", "properties": {format!("p{n}"): {"type": "string", "allOf": patterns}}});
            attacker.post_json(CHAT, &asking(CHAT, &schema)).await;
        })
        .await;
}

pub async fn expressions(attacker: Attacker) {
    const ALL: [&str; 8] = [
        "((((a?){9}){9}){9}){9}",
        "(.{1,40}){1,40}",
        "[^a]*a.{18}",
        r"(\w+\s?){1,200}",
        "(.*a){20}",
        r"\p{L}{2,400}",
        r"^(([a-z])+.)+[A-Z]([a-z])+$",
        "(a|a|ab)*b",
    ];
    attacker
        .each(AT_ONCE, async |n| {
            let regex = format!("{}x{{{}}}", ALL[n as usize % ALL.len()], n % 1000);
            attacker.post_json(TEXT, &json!({"prompt": "hi", "max_tokens": 4, "guided_regex": regex})).await;
        })
        .await;
}

pub async fn lark(attacker: Attacker) {
    attacker
        .each(AT_ONCE, async |n| {
            let rules: String =
                (0..50).map(|i| format!("r{i}: r{} r{} | T{} | (r{i}){{0,1000}}\n", (i + 1) % 50, (i * 7) % 50, i % 4)).collect();
            let terminals: String = (0..4).map(|i| format!("T{i}: /.*{n}{i}.*/ & /[^x]*.{{12}}/ & ~/(a|b)*{i}/\n")).collect();
            let grammar = format!("start: r0\n{rules}{terminals}");
            attacker.post_json(TEXT, &json!({"prompt": "hi", "max_tokens": 4, "guided_grammar": grammar})).await;
        })
        .await;
}

pub async fn gbnf(attacker: Attacker) {
    let rules: String = (0..40_000).map(|n| format!("\nr{n} ::= \"a\"")).collect();
    let body = json!({"prompt": "hi", "guided_grammar": format!("root ::= r0{rules}")});
    attacker.post_each(AT_ONCE, vec![(TEXT, body.to_string().into())]).await;
}

pub async fn followed(attacker: Attacker) {
    attacker
        .each(AT_ONCE, async |n| {
            let grammar = json!({"prompt": format!("{n}"), "max_tokens": 64, "guided_regex": format!("(.{{1,40}}){{1,{}}}", 20 + n % 20)});
            attacker.post_json(TEXT, &grammar).await;
        })
        .await;
}

/// Every item of a row of the parser is compared with all others. Grammars are followed for some tokens when they are judged, and each other
/// one of these is slow only after more.
pub async fn slow_masks(attacker: Attacker) {
    let names: Vec<_> = (0..400).map(|i| format!("r{i}")).collect();
    let rules: String = (0..400).map(|i| format!("\nr{i}: /[a-z]{{1,{}}}/ s?", i + 2)).collect();
    attacker
        .each(AT_ONCE, async |n| {
            let before = if n.is_multiple_of(2) { String::new() } else { format!("\"0\"{{{}}}", 40 + n % 20) };
            let grammar = format!("start: {before} s\ns: {}{rules}", names.join(" | "));
            attacker.post_json(TEXT, &json!({"prompt": format!("{n}"), "max_tokens": 64, "guided_grammar": grammar})).await;
        })
        .await;
}

pub async fn choices(attacker: Attacker) {
    let choices: Vec<_> = (0..20_000).map(|n| n.to_string()).collect();
    let body = json!({"prompt": "hi", "guided_choice": choices});
    attacker.post_each(AT_ONCE, vec![(TEXT, body.to_string().into())]).await;
}

pub async fn tools(attacker: Attacker) {
    let tools: Vec<_> = (0..150_000).map(|n| json!({"type": "function", "function": {"name": format!("{n}")}})).collect();
    let body = Bytes::from(json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools}).to_string());
    attacker.post_each(AT_ONCE, vec![(CHAT, body.clone()), ("/tokenize", body)]).await;
}

pub async fn allowed_tools(attacker: Attacker) {
    let tools: Vec<_> = (0..40_000).map(|n| json!({"type": "function", "name": format!("f{n}")})).collect();
    let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": tools});
    let body = json!({"input": "hi", "max_output_tokens": 4, "tools": tools[..1000], "tool_choice": choice});
    attacker.post_each(AT_ONCE, vec![(RESPONSES, body.to_string().into())]).await;
}

pub async fn strict_tools(attacker: Attacker) {
    attacker
        .each(AT_ONCE, async |n| {
            let tool = |i: u64| {
                let schema =
                    json!({"type": "object", "properties": {format!("p{n}"): {"type": "string", "pattern": format!(".*{i}.{{1,30}}")}}});
                json!({"type": "function", "function": {"name": format!("f{i}"), "strict": true, "parameters": schema}})
            };
            let tools: Vec<_> = (0..1000).map(tool).collect();
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "tools": tools, "tool_choice": "required"});
            attacker.post_json(CHAT, &body).await;
        })
        .await;
}
