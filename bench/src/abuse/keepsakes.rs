//! The data that other tenants have stored before the attacks: conversations, responses, files, batches, votes, facts, and answers that are
//! kept for a while. Everything is read back after each attack, and must be identical to the byte.

use super::{
    attacker::{FORM_TYPE, form},
    cluster::{Cluster, wait_for},
};
use anyhow::{Context, ensure};
use bytes::Bytes;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

const OWNERS: [&str; 2] = ["ann", "bob"];
const BATCH_MAX: Duration = Duration::from_secs(60);
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The ids of other tenants' objects, for an attacker to try.
#[derive(Debug, Default)]
pub struct Ids {
    /// The paths that show an object to its owner.
    pub paths: Vec<String>,
    pub conversation: String,
    pub response: String,
    pub chat: String,
    pub file: String,
}

pub struct Keepsakes {
    owners: Vec<Owner>,
    ids: Arc<Ids>,
}

struct Owner {
    name: &'static str,
    door: Door,
    things: Vec<Thing>,
    /// The answer that has a vote.
    judged: String,
    opinions: String,
}

struct Thing {
    path: String,
    body: Bytes,
}

/// An answer that is kept for its repetition, by its `Idempotency-Key`.
#[derive(Clone, Debug)]
pub struct Kept {
    pub key: String,
    pub request: Value,
    pub answer: Bytes,
}

/// The front door, as used by one tenant.
struct Door {
    http: reqwest::Client,
    url: String,
    key: String,
}

impl Door {
    async fn send(&self, request: reqwest::RequestBuilder) -> anyhow::Result<reqwest::Response> {
        let response = request.bearer_auth(&self.key).timeout(ANSWER_MAX).send().await?;
        let status = response.status();
        if !status.is_success() {
            let url = response.url().path().to_owned();
            anyhow::bail!("{url}: {status} {}", response.text().await?);
        }
        Ok(response)
    }

    async fn get(&self, path: &str) -> anyhow::Result<Bytes> {
        Ok(self.send(self.http.get(format!("{}{path}", self.url))).await?.bytes().await?)
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        Ok(self.send(self.http.post(format!("{}{path}", self.url)).json(body)).await?.json().await?)
    }

    async fn upload(&self, file: &str) -> anyhow::Result<Value> {
        let request = self.http.post(format!("{}/v1/files", self.url)).header("content-type", FORM_TYPE).body(form(file));
        Ok(self.send(request).await?.json().await?)
    }
}

fn id(of: &Value) -> anyhow::Result<String> {
    Ok(of["id"].as_str().with_context(|| format!("no id in {of}"))?.to_owned())
}

impl Keepsakes {
    pub async fn make(cluster: &Cluster) -> anyhow::Result<Self> {
        let mut owners = Vec::new();
        let mut ids = Ids::default();
        for name in OWNERS {
            let key = cluster.key(name, "premium").await?.secret;
            let http = reqwest::Client::builder().no_proxy().build()?;
            let door = Door { http, url: cluster.url().to_owned(), key };
            owners.push(Owner::store(name, door, cluster, &mut ids).await.with_context(|| format!("tenant {name}"))?);
        }
        Ok(Self { owners, ids: Arc::new(ids) })
    }

    pub fn ids(&self) -> Arc<Ids> {
        Arc::clone(&self.ids)
    }

    /// Makes the cluster keep one more answer, for the attack of this name.
    pub async fn keep_answer(&self, attack: &str) -> anyhow::Result<Kept> {
        let Owner { door, .. } = self.owners.first().context("there are owners")?;
        let said = json!([{"role": "user", "content": format!("What is kept during {attack}?")}]);
        let request = json!({"messages": said, "max_tokens": 8, "temperature": 0});
        let mut kept = Kept { key: format!("kept-{attack}"), request, answer: Bytes::new() };
        kept.answer = door.repeat(&kept).await?.1;
        Ok(kept)
    }

    /// The differences from the original state.
    pub async fn compare(&self, cluster: &Cluster, kept: &Kept) -> Vec<String> {
        let mut lost = Vec::new();
        for Owner { name, door, things, judged, opinions } in &self.owners {
            for Thing { path, body } in things {
                match door.get(path).await {
                    Ok(now) if now == body => {}
                    Ok(_) => lost.push(format!("{name}: {path} is another")),
                    Err(error) => lost.push(format!("{name}: {error:#}")),
                }
            }
            if cluster.operator(&opinion_path(judged)).await.is_ok_and(|now| now == *opinions) {
                continue;
            }
            lost.push(format!("{name}: its opinion of {judged}"));
        }
        let Some(Owner { name, door, .. }) = self.owners.first() else { return lost };
        match door.repeat(kept).await {
            Ok((status, answer)) if status == "replayed" && answer == kept.answer => {}
            Ok((status, _)) => lost.push(format!("{name}: the answer kept for a repeat ({status})")),
            Err(error) => lost.push(format!("{name}: the answer kept for a repeat: {error:#}")),
        }
        lost
    }
}

fn opinion_path(answer: &str) -> String {
    format!("/admin/feedback?response_id={answer}")
}

impl Door {
    /// The status of a repeated request, and its answer.
    async fn repeat(&self, Kept { key, request, .. }: &Kept) -> anyhow::Result<(String, Bytes)> {
        let request = self.http.post(format!("{}/v1/chat/completions", self.url)).header("idempotency-key", key).json(request);
        let response = self.send(request).await?;
        let status = response.headers().get("x-idempotency").context("the answer says what became of it")?.to_str()?.to_owned();
        Ok((status, response.bytes().await?))
    }
}

impl Owner {
    async fn store(name: &'static str, door: Door, cluster: &Cluster, ids: &mut Ids) -> anyhow::Result<Self> {
        let said = |text: &str| json!([{"type": "message", "role": "user", "content": text}]);
        let long = format!("{name} knows where the mill is. ").repeat(400);
        let made = json!({"title": format!("{name}'s"), "metadata": {"of": name}, "items": said(&long)});
        let conversation = id(&door.post("/v1/conversations", &made).await?)?;
        let turn = json!({"conversation": conversation, "messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 8});
        let asked = json!({"messages": [{"role": "user", "content": "Is it far?"}], "max_tokens": 8});
        let chat = id(&door.post("/v1/chat/completions", &asked).await?)?;
        door.post("/v1/chat/completions", &turn).await?;
        let response = id(&door.post("/v1/responses", &json!({"input": "What does it grind?", "max_output_tokens": 8})).await?)?;
        let line = |n: u32| {
            let body = json!({"model": cluster.model, "prompt": format!("{name} {n}"), "max_tokens": 4});
            json!({"custom_id": format!("{n}"), "method": "POST", "url": "/v1/completions", "body": body}).to_string()
        };
        let file = id(&door.upload(&(0..3).map(line).collect::<Vec<_>>().join("\n")).await?)?;
        let wanted = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        let batch = id(&door.post("/v1/batches", &wanted).await?)?;
        let output = wait_for("a batch of three", BATCH_MAX, || async {
            let now: Value = serde_json::from_slice(&door.get(&format!("/v1/batches/{batch}")).await?)?;
            Ok(now["output_file_id"].as_str().filter(|_| now["status"] == "completed").map(str::to_owned))
        });
        let output = output.await?;
        for n in 0..3 {
            door.post("/v1/memories", &json!({"text": format!("{name} has {n} mills")})).await?;
        }
        door.post("/v1/feedback", &json!({"response_id": chat, "rating": "up", "comment": format!("{name} likes it")})).await?;
        let paths = [
            format!("/v1/conversations/{conversation}"),
            format!("/v1/conversations/{conversation}/items?limit=100"),
            format!("/v1/conversations/{conversation}/export"),
            format!("/v1/responses/{response}"),
            format!("/v1/responses/{response}/input_items"),
            format!("/v1/files/{file}"),
            format!("/v1/files/{file}/content"),
            format!("/v1/files/{output}/content"),
            format!("/v1/batches/{batch}"),
            "/v1/memories".to_owned(),
        ];
        let mut things = Vec::new();
        for path in &paths {
            things.push(Thing { path: path.clone(), body: door.get(path).await? });
        }
        let opinions = cluster.operator(&opinion_path(&chat)).await?;
        ensure!(opinions.contains("likes it"), "the opinion is not kept: {opinions}");
        // `/v1/memories` shows each tenant its own.
        ids.paths.extend(paths.into_iter().filter(|path| !path.ends_with("/memories")));
        (ids.conversation, ids.response, ids.chat, ids.file) = (conversation, response, chat.clone(), file);
        Ok(Self { name, door, things, judged: chat, opinions })
    }
}
