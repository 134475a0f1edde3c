//! Requests of clients and of operators, over HTTP, to a real coordinator in this process with a real echo worker behind it.
//!
//! A case is a short session, in which later requests refer to results of earlier ones.

pub(super) mod cluster;
mod requests;

use crate::{
    dice::Dice,
    mutate::{bytes, json, text},
    target::{Subject, Target},
};
use cluster::Cluster;
use requests::{CLIENTS, OPERATORS as OPERATORS_REQUESTS, Template};
use reqwest::{Client, Method, header::HeaderValue};
use serde_json::Value;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

pub(crate) const ENDPOINTS: Target = Target {
    name: "endpoints",
    about: "requests of clients, to a coordinator with a worker behind it",
    open: || open(CLIENTS, false),
    cpu_max: Duration::from_secs(20),
    bytes_max: 2 << 30,
    short: 250,
};

pub(crate) const OPERATORS: Target = Target {
    name: "operators",
    about: "requests of operators, to a coordinator's port for them",
    open: || open(OPERATORS_REQUESTS, true),
    cpu_max: Duration::from_secs(20),
    bytes_max: 2 << 30,
    short: 150,
};

/// The time within which any request must be answered.
const ANSWER_MAX: Duration = Duration::from_secs(300);
/// The time within which the worker is back: a machine with much else to do costs it its link.
const REJOIN_MAX: Duration = Duration::from_secs(60);
const ANSWER_BYTES_MAX: usize = 256 << 20;

fn open(requests: &'static str, operators: bool) -> anyhow::Result<Box<dyn Subject>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let cluster = runtime.block_on(Cluster::start())?;
    let templates = requests::read(requests)?;
    let keys = json::keys(templates.iter().map(|template| &template.body));
    let client = Client::builder().timeout(ANSWER_MAX).build()?;
    Ok(Box::new(move |dice: &mut Dice| {
        // The closure captures the whole cluster, so that its data directory lives as long.
        let cluster = &cluster;
        let url = if operators { &cluster.admin } else { &cluster.url };
        let mut session = Session { url, makes_keys: operators, client: &client, made: HashMap::new() };
        for _ in 0..dice.few(5) {
            let template = dice.pick(&templates);
            runtime.block_on(session.ask(dice, template, &keys))?;
        }
        // The next valid request must be served.
        if dice.one_in(50) {
            runtime.block_on(session.ask_well(&cluster.url))?;
        }
        Ok(())
    }))
}

struct Session<'a> {
    url: &'a str,
    /// Whether a request may make a key, from which on the front door refuses requests without one.
    makes_keys: bool,
    client: &'a Client,
    /// The last id of each kind, by its prefix.
    made: HashMap<String, String>,
}

impl Session<'_> {
    async fn ask(&mut self, dice: &mut Dice, template: &Template, keys: &[String]) -> Result<(), String> {
        let mut path = self.filled(dice, &template.path);
        if dice.one_in(8) {
            path = text::mutate(dice, &path, PATH_WORDS);
        }
        // These characters cannot be sent in a request line.
        path.retain(|c| !c.is_control() && c != ' ');
        path = path.chars().take(PATH_CHARS_MAX).collect();
        let (kind, body) = self.body(dice, template, keys);
        let method = if dice.one_in(30) { *dice.pick(&["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]) } else { &template.method };
        dice.show(&format!("{method} {path}"), &body);
        let Ok(url) = reqwest::Url::parse(&format!("{}/", self.url)).and_then(|url| url.join(path.trim_start_matches('/'))) else {
            return Ok(());
        };
        if !url.as_str().starts_with(self.url) {
            return Ok(());
        }
        let mut request = self.client.request(Method::from_bytes(method.as_bytes()).unwrap_or_default(), url);
        if method != "GET" || dice.one_in(10) {
            request = request.header("content-type", if dice.one_in(50) { "text/plain" } else { kind }).body(body);
        }
        for (name, values) in HEADERS {
            if dice.one_in(12) {
                let value = if dice.one_in(3) { dice.odd_text() } else { (*dice.pick(values)).to_owned() };
                if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
                    dice.show(name, value.as_bytes());
                    request = request.header(*name, value);
                }
            }
        }
        let leaves = dice.one_in(40).then(|| Duration::from_millis(dice.below(20) as u64));
        let answer = answer(request);
        let answer = match leaves {
            // This client does not wait for the answer.
            Some(after) => match tokio::time::timeout(after, answer).await {
                Ok(answer) => answer,
                Err(_) => return Ok(()),
            },
            None => answer.await,
        };
        let (status, answer) = answer.map_err(|error| format!("{method} {path}: no answer: {error}"))?;
        self.remember(&answer);
        check(status, &answer).map_err(|problem| format!("{method} {path}: {problem}"))
    }

    async fn ask_well(&self, url: &str) -> Result<(), String> {
        let body = r#"{"prompt": "hello", "max_tokens": 3}"#;
        let deadline = Instant::now() + REJOIN_MAX;
        loop {
            let request = self.client.post(format!("{url}/v1/completions")).header("content-type", "application/json").body(body);
            match answer(request).await {
                Ok((200, _)) => return Ok(()),
                Ok((401, _)) if self.makes_keys => return Ok(()),
                Ok((503, _)) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(200)).await,
                Ok((status, answer)) => return Err(format!("a good request gets {status}: {}", String::from_utf8_lossy(&answer))),
                Err(error) => return Err(format!("a good request gets no answer: {error}")),
            }
        }
    }

    /// Replaces the names in braces by ids.
    fn filled(&self, dice: &mut Dice, path: &str) -> String {
        let mut filled = path.to_owned();
        while let Some((before, rest)) = filled.split_once('{') {
            let Some((name, after)) = rest.split_once('}') else { break };
            let id = match self.made.get(name) {
                Some(id) if !dice.one_in(10) => id.clone(),
                _ if dice.one_in(2) => format!("{name}x"),
                _ => dice.odd_text().replace(['{', '}'], ""),
            };
            filled = format!("{before}{id}{after}");
        }
        filled
    }

    fn body(&self, dice: &mut Dice, template: &Template, keys: &[String]) -> (&'static str, Vec<u8>) {
        let mut tree = template.body.clone();
        fill(&mut tree, &self.made);
        if !dice.one_in(8) {
            json::mutate(dice, &mut tree, keys);
        }
        if template.form {
            return ("multipart/form-data; boundary=b", form(dice, &tree));
        }
        let written = json::text(dice, &tree);
        if dice.one_in(15) {
            let mut body = written.into_bytes();
            bytes::mutate(dice, &mut body);
            return ("application/json", body);
        }
        ("application/json", written.into_bytes())
    }

    fn remember(&mut self, answer: &[u8]) {
        let Ok(answer) = serde_json::from_slice::<Value>(answer) else { return };
        let ids = [&answer["id"], &answer["data"][0]["id"], &answer["conversation"]["id"], &answer["output_file_id"]];
        for id in ids.into_iter().filter_map(Value::as_str) {
            if let Some(prefix) = id.split_inclusive(['_', '-']).next() {
                self.made.insert(prefix.to_owned(), id.to_owned());
            }
        }
    }
}

/// Replaces texts that are the name of an id in braces by that id.
fn fill(tree: &mut Value, made: &HashMap<String, String>) {
    match tree {
        Value::String(text) => {
            if let Some(id) = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).and_then(|name| made.get(name)) {
                *text = id.clone();
            }
        }
        Value::Object(fields) => fields.values_mut().for_each(|value| fill(value, made)),
        Value::Array(items) => items.iter_mut().for_each(|item| fill(item, made)),
        _ => {}
    }
}

/// The fields of a body as a form: texts unchanged, and `file` as a file of lines.
fn form(dice: &mut Dice, tree: &Value) -> Vec<u8> {
    let mut form = Vec::new();
    for (name, value) in tree.as_object().into_iter().flatten() {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Array(lines) => lines.iter().map(|line| json::text(dice, line) + "\n").collect(),
            other => other.to_string(),
        };
        let filename = if name == "file" { "; filename=\"a.jsonl\"" } else { "" };
        let name = name.escape_default();
        form.extend(format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"{filename}\r\n\r\n{text}\r\n").into_bytes());
    }
    form.extend(b"--b--\r\n");
    if dice.one_in(5) {
        bytes::mutate(dice, &mut form);
    }
    form
}

async fn answer(request: reqwest::RequestBuilder) -> Result<(u16, Vec<u8>), String> {
    let said = |error: reqwest::Error| format!("{error:?}");
    let mut response = request.send().await.map_err(said)?;
    let mut body = Vec::new();
    while let Some(part) = response.chunk().await.map_err(said)? {
        body.extend_from_slice(&part);
        if body.len() > ANSWER_BYTES_MAX {
            return Err("it does not end".into());
        }
    }
    Ok((response.status().as_u16(), body))
}

fn check(status: u16, answer: &[u8]) -> Result<(), String> {
    let text = || String::from_utf8_lossy(&answer[..answer.len().min(1000)]).into_owned();
    match status {
        // The store is full of entries of earlier cases.
        507 => Ok(()),
        // The echo engine has no embeddings.
        500 if text().contains("gives no hidden states") => Ok(()),
        500.. => Err(format!("{status}: {}", text())),
        400..=499 if answer.is_empty() || status == 405 || status == 404 => Ok(()),
        400..=499 => match serde_json::from_slice::<Value>(answer) {
            Ok(error) if error["error"]["message"].is_string() => Ok(()),
            _ => Err(format!("{status} without a message: {}", text())),
        },
        _ => Ok(()),
    }
}

/// The longest path: percent-encoded, the client's library accepts at most 64 KiB.
const PATH_CHARS_MAX: usize = 2000;

const PATH_WORDS: &[&str] = &[
    "?",
    "&",
    "=",
    "limit=",
    "after=",
    "order=asc",
    "stream=true",
    "starting_after=",
    "%2f",
    "%00",
    "/",
    "..",
    "items",
    "export",
    "content",
];

const HEADERS: &[(&str, &[&str])] = &[
    ("idempotency-key", &["a", "b", "0123456789", ""]),
    ("last-event-id", &["a:0", "a:5", "chatcmpl-1:99999999999999999999", ":", "x"]),
    ("authorization", &["Bearer x", "Bearer tm_0123456789abcdef", "Basic eDp5", "Bearer a.b.c", "Bearer eyJhbGciOiJub25lIn0.e30."]),
    ("x-api-key", &["x", ""]),
    ("accept", &["text/event-stream", "*/*", "application/json"]),
    ("anthropic-version", &["2023-06-01"]),
    ("x-request-id", &["1", ""]),
    ("host", &["localhost", "evil.example", "127.0.0.1", "[::1]"]),
    ("origin", &["http://localhost", "null"]),
    ("range", &["bytes=0-", "bytes=5-1"]),
    ("x-class", &["standard"]),
    ("traceparent", &["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]),
];
