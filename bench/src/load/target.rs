//! The server under load, and one request to it.

use super::{
    length::Length,
    summary::Failure,
    timeline::{Answer, Timeline},
    workload::{Ask, Prompt, Workload, WorkloadArgs},
};
use anyhow::{Context, bail};
use futures_util::StreamExt;
use serde::Serialize;
use serde_json::{Value, json};
use std::time::Duration;
use tidemill_deploy::client::{Client, ClientError};
use tokio::time::{Instant, timeout_at};

/// The form of requests.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct RequestArgs {
    /// The model, if the server has several; the first by default.
    #[arg(long)]
    pub model: Option<String>,
    /// OpenAI's `service_tier`: auto, default, flex or priority.
    #[arg(long)]
    pub service_tier: Option<String>,
    /// Ask /v1/chat/completions (prompts are text) instead of /v1/completions.
    #[arg(long)]
    pub chat: bool,
    /// Kind of output other than plain text. Such answers end where the model ends them.
    #[arg(long, value_enum, default_value_t = Form::Text, requires_if("structured", "chat"), requires_if("tools", "chat"))]
    pub form: Form,
    /// Let answers end where the model ends them: for servers that do not support `ignore_eos`.
    #[arg(long)]
    pub allow_eos: bool,
    /// JSON fields added to every request, such as '{"response_format": {"type": "json_object"}}'
    #[arg(long, value_parser = fields)]
    pub fields: Option<Value>,
    /// Seconds after its due time at which a request fails.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout_s: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    Text,
    /// An answer described by a JSON schema.
    Structured,
    /// Two tools are offered; the model chooses.
    Tools,
}

fn fields(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(fields @ Value::Object(_)) => Ok(fields),
        Ok(_) => Err("fields of a request are a JSON object".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Messages of a chat so far.
pub type History = Vec<Value>;

#[derive(Clone, Debug)]
pub struct Target {
    client: Client,
    model: String,
    args: RequestArgs,
}

impl Target {
    /// Creates a target, and asks the server for its models if none is named.
    pub async fn new(url: &str, args: &RequestArgs) -> anyhow::Result<Target> {
        let client = Client::new(url)?;
        let model = match &args.model {
            Some(model) => model.clone(),
            None => {
                let models = client.models().await.context("no model is given with --model, and the server does not list any")?;
                models.first().context("the server lists no model: give --model")?.clone()
            }
        };
        Ok(Target { client, model, args: args.clone() })
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    /// The same server with a different service tier.
    pub fn with_tier(&self, tier: Option<&str>) -> Target {
        let args = RequestArgs { service_tier: tier.map(str::to_owned).or_else(|| self.args.service_tier.clone()), ..self.args.clone() };
        Target { args, ..self.clone() }
    }

    /// Reports a refusal that would affect every request before the load starts.
    pub async fn probe(&self, workload: &WorkloadArgs, seed: u64) -> anyhow::Result<()> {
        let short = WorkloadArgs { output_len: Length::fixed(2), turns: 1, ..workload.clone() };
        // The seed is different, so that this request caches no part of the measured prompts.
        let Some(session) = Workload::new(&short)?.draw(1, !seed).pop() else { return Ok(()) };
        for turn in session.turns.iter().take(1) {
            if let Err(failure) = self.ask(&turn.ask, &mut History::new(), Instant::now()).await {
                bail!("the server does not take such requests ({}): {}", failure.kind, failure.message);
            }
        }
        Ok(())
    }

    /// Sends the request and waits for the end of the answer, at most until the deadline that follows from `due`. Both are added to a
    /// chat's history.
    pub async fn ask(&self, ask: &Ask, history: &mut History, due: Instant) -> Result<Answer, Failure> {
        let deadline = due + Duration::from_secs(self.args.timeout_s);
        let answered = timeout_at(deadline, self.stream(ask, history, due)).await;
        answered.unwrap_or_else(|_| {
            let message = format!("not answered within {} s", self.args.timeout_s);
            Err(Failure { kind: "timeout".into(), message })
        })
    }

    async fn stream(&self, ask: &Ask, history: &mut History, due: Instant) -> Result<Answer, Failure> {
        let failure = |e: ClientError| Failure { kind: e.kind(), message: e.to_string() };
        let path = if self.args.chat { "/chat/completions" } else { "/completions" };
        let body = self.body(ask, history);
        let mut stream = Box::pin(self.client.stream(path, &body).await.map_err(failure)?);
        let (mut timeline, mut text, mut usage) = (Timeline::default(), String::new(), None);
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(failure)?;
            if chunk.is_token {
                timeline.token(due.elapsed());
            }
            text += &chunk.text;
            usage = chunk.usage.or(usage);
        }
        if self.args.chat {
            history.push(json!({"role": "assistant", "content": text}));
        }
        let counts = usage.map(|usage| (usage.prompt_tokens, usage.cached_tokens(), usage.completion_tokens));
        let nothing = || Failure { kind: "empty".into(), message: "the answer has no token".into() };
        timeline.finish(counts).ok_or_else(nothing)
    }

    fn body(&self, ask: &Ask, history: &mut History) -> Value {
        let mut body = json!({
            "model": self.model,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        match &ask.prompt {
            Prompt::Text(text) if self.args.chat => {
                history.push(json!({"role": "user", "content": text}));
                body["messages"] = json!(history);
            }
            prompt => body["prompt"] = json!(prompt),
        }
        if let Some(tier) = &self.args.service_tier {
            body["service_tier"] = json!(tier);
        }
        match self.args.form {
            Form::Text => {}
            Form::Structured => body["response_format"] = structured(),
            Form::Tools => body["tools"] = tools(),
        }
        if !self.args.allow_eos && self.args.form == Form::Text {
            body["ignore_eos"] = json!(true);
        }
        if let (Some(body), Some(Value::Object(fields))) = (body.as_object_mut(), &self.args.fields) {
            body.extend(fields.clone());
        }
        body
    }
}

/// A request for an answer by a schema, which is bounded everywhere, so that an answer of random weights also ends.
fn structured() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "order", "strict": true, "schema": {
        "type": "object",
        "properties": {
            "item": {"type": "string", "maxLength": 24},
            "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
            "size": {"enum": ["small", "medium", "large"]},
            "gift": {"type": "boolean"},
        },
        "required": ["item", "quantity", "size", "gift"],
        "additionalProperties": false,
    }}})
}

fn tools() -> Value {
    let tool = |name: &str, about: &str, argument: &str| {
        let parameters = json!({
            "type": "object",
            "properties": {argument: {"type": "string", "maxLength": 32}},
            "required": [argument],
            "additionalProperties": false,
        });
        json!({"type": "function", "function": {"name": name, "description": about, "parameters": parameters}})
    };
    json!([tool("get_weather", "The weather in a city", "city"), tool("search", "Search the web", "query")])
}
