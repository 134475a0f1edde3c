//! The cluster as an evaluation uses it: chats, a judge's verdicts and the safety checks' decisions.

use anyhow::{Context, bail};
use reqwest::{
    StatusCode,
    header::{AUTHORIZATION, HeaderValue},
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tidemill_eval::{
    check::{Answer, Call, Side},
    judge::Verdict,
};

/// The wait before another attempt, if an overloaded server sends no `Retry-After`.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(super) struct Server {
    http: reqwest::Client,
    base: String,
    key: Option<HeaderValue>,
    deadline: Duration,
    service_tier: Option<String>,
}

impl Server {
    pub(super) fn new(url: &str, key: Option<&str>, deadline: Duration, service_tier: Option<String>) -> anyhow::Result<Self> {
        anyhow::ensure!(url.starts_with("http://"), "`{url}` is not an http:// URL such as http://127.0.0.1:8000/v1");
        let key = key.map(|key| {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).context("the API key is not one line of ASCII")?;
            value.set_sensitive(true);
            anyhow::Ok(value)
        });
        let http = reqwest::Client::builder().no_proxy().build()?;
        Ok(Self { http, base: url.trim_end_matches('/').to_owned(), key: key.transpose()?, deadline, service_tier })
    }

    /// The models that are served.
    pub(super) async fn models(&self) -> anyhow::Result<Vec<String>> {
        let (_, listed) = self.send(reqwest::Method::GET, "/models", None).await?;
        Ok(listed["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
    }

    /// A chat's answer. A block by the safety checks also counts as an answer.
    pub(super) async fn chat(&self, model: &str, fields: Value) -> anyhow::Result<Answer> {
        let (status, body) = self.ask(model, fields).await?;
        if status == StatusCode::BAD_REQUEST && body["error"]["code"] == "content_filter" {
            return Ok(Answer { is_blocked: true, ..Answer::default() });
        }
        let choice = &checked(status, &body)?["choices"][0];
        let message = &choice["message"];
        let call = |call: &Value| Call {
            name: call["function"]["name"].as_str().unwrap_or_default().to_owned(),
            arguments: serde_json::from_str(call["function"]["arguments"].as_str().unwrap_or_default()).unwrap_or_default(),
        };
        Ok(Answer {
            text: message["content"].as_str().unwrap_or_default().to_owned(),
            calls: message["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
            is_blocked: choice["finish_reason"] == "content_filter",
        })
    }

    /// A judge's verdict.
    pub(super) async fn judge(&self, model: &str, fields: Value) -> anyhow::Result<Verdict> {
        let (status, body) = self.ask(model, fields).await?;
        let choice = &checked(status, &body)?["choices"][0];
        let likely = |token: &Value| Some((token["token"].as_str()?.to_owned(), token["logprob"].as_f64()?));
        let first = &choice["logprobs"]["content"][0];
        Ok(Verdict {
            text: choice["message"]["content"].as_str().unwrap_or_default().to_owned(),
            first: first["top_logprobs"].as_array().into_iter().flatten().filter_map(likely).collect(),
        })
    }

    /// Whether the safety checks let a text pass.
    pub(super) async fn allows(&self, text: &str, side: Side) -> anyhow::Result<bool> {
        let (status, body) = self.send(reqwest::Method::POST, "/moderations", Some(json!({"input": text, "side": side}))).await?;
        checked(status, &body)?["results"][0]["flagged"].as_bool().map(|flagged| !flagged).context("the answer says nothing of the text")
    }

    async fn ask(&self, model: &str, mut fields: Value) -> anyhow::Result<(StatusCode, Value)> {
        fields["model"] = model.into();
        if let Some(tier) = &self.service_tier {
            fields["service_tier"] = tier.as_str().into();
        }
        self.send(reqwest::Method::POST, "/chat/completions", Some(fields)).await
    }

    /// Sends a request, and repeats it until the deadline while the server is overloaded.
    async fn send(&self, method: reqwest::Method, path: &str, body: Option<Value>) -> anyhow::Result<(StatusCode, Value)> {
        let started = Instant::now();
        loop {
            let left = self.deadline.saturating_sub(started.elapsed());
            if left.is_zero() {
                bail!("no answer within {} s", self.deadline.as_secs());
            }
            let mut request = self.http.request(method.clone(), format!("{}{path}", self.base)).timeout(left);
            if let Some(key) = &self.key {
                request = request.header(AUTHORIZATION, key.clone());
            }
            if let Some(body) = &body {
                request = request.json(body);
            }
            let failed = || format!("no answer from {}", self.base);
            let response = request.send().await.map_err(reqwest::Error::without_url).with_context(failed)?;
            let status = response.status();
            let retry = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
            let answer = response.json().await.map_err(reqwest::Error::without_url).with_context(failed)?;
            if !matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                return Ok((status, answer));
            }
            tokio::time::sleep(retry.map_or(RETRY_AFTER, Duration::from_secs).min(self.deadline.saturating_sub(started.elapsed()))).await;
        }
    }
}

fn checked(status: StatusCode, body: &Value) -> anyhow::Result<&Value> {
    if !status.is_success() {
        bail!("{}", body["error"]["message"].as_str().unwrap_or("the server refused, and gave no reason"));
    }
    Ok(body)
}
