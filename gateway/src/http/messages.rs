//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API. Internally a dialog like any other, with its own events and errors.
//! `anthropic-…` headers are accepted unchecked.
//!
//! - `request`: the body as a dialog; `blocks`: an answer's pieces as content blocks and events

mod blocks;
pub mod error;
mod request;

use super::{
    access::Client,
    protocol::{self, Begun, Ending, Protocol, named},
    written,
};
use crate::{
    base::stamp::new_id,
    generation::piece::{Finish, FinishReason, StopReason},
    metrics::usage::Usage,
    requests::{error::ApiError, parse::JsonBody},
    serving::{
        answer::Delta,
        gateway::{Gateway, start::Start},
        rounds::rounded::{Rounded, Spent},
    },
};
use axum::{
    Json,
    body::Body,
    response::{Response, sse::Event},
};
use blocks::Blocks;
use error::MessagesError;
#[cfg(test)]
pub(super) use request::read;
use serde_json::{Value, json};
use std::{sync::Arc, time::Instant};

/// `POST /v1/messages`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, MessagesError> {
    Ok(protocol::respond(start(&gateway, body)).await?)
}

/// `POST /v1/messages/count_tokens`: includes system prompt and tools, because the prompt itself is counted.
pub async fn count_tokens(Client(gateway): Client, body: Body) -> Result<Json<Value>, MessagesError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(&gateway);
    let count = gateway.compute_body(body.weight(), move || {
        let (worker, dialog, ..) = request::understand(&worker, JsonBody::parse(&body)?, None)?;
        Ok(worker.prompt_only("messages", &dialog)?.len())
    });
    Ok(Json(json!({"input_tokens": count.await?})))
}

async fn start(gateway: &Arc<Gateway>, body: Body) -> Result<Begun<Message>, ApiError> {
    let arrived = Instant::now();
    let (gateway, body) = gateway.weighed(gateway.read(body).await?).await?;
    let worker = Arc::clone(&gateway);
    let understood = gateway.compute_body(body.weight(), move || {
        let parsed = JsonBody::parse(&body)?;
        let asked = worker.asked(parsed.fields());
        Ok((request::to_answer(&worker, arrived, parsed)?, asked))
    });
    let ((gateway, dialog, options, rounds), asked) = understood.await?;
    let streams = options.stream;
    let id = new_id("msg_");
    let answer = gateway.start_dialog(dialog, options, Start { id: &id, question: asked, ..Start::of("messages") }).await?;
    let protocol = Message {
        model: gateway.model_name().to_owned(),
        id,
        blocks: Blocks::default(),
        finish: None,
        begun: false,
        gateway: Arc::clone(&gateway),
    };
    Ok(Begun { answer: Rounded::new(&gateway, answer, rounds), protocol, streams })
}

/// An answer as one message of content blocks.
#[derive(Debug)]
struct Message {
    gateway: Arc<Gateway>,
    id: String,
    model: String,
    blocks: Blocks,
    finish: Option<Finish>,
    begun: bool,
}

impl Protocol for Message {
    async fn take(&mut self, delta: Delta, _: &Spent) {
        self.hear(&delta);
    }

    async fn whole(mut self, spent: Spent) -> Result<Response, ApiError> {
        self.blocks.finish();
        let (reason, sequence) = self.stop();
        let mut message = self.message(self.blocks.content(), json!(reason), json!(sequence), &spent.total);
        self.tell_refusal(&mut message);
        written::write(&self.gateway, 0, move || Ok(message)).await
    }

    async fn events(&mut self, delta: Delta, spent: &Spent) -> Vec<Event> {
        let mut events = self.beginning(&spent.total);
        self.hear(&delta);
        events.extend(self.blocks.events());
        events.iter().map(named).collect()
    }

    async fn closing(&mut self, ending: Ending, spent: &Spent) -> Vec<Event> {
        if let Ending::Failed(error) = ending {
            return vec![named(&error::body(&error))];
        }
        let mut events = self.beginning(&spent.total);
        self.blocks.finish();
        events.extend(self.blocks.events());
        let (reason, sequence) = self.stop();
        let mut delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        self.tell_refusal(&mut delta);
        events.push(json!({"type": "message_delta", "delta": delta, "usage": usage(&spent.total)}));
        events.push(json!({"type": "message_stop"}));
        events.iter().map(named).collect()
    }
}

impl Message {
    fn hear(&mut self, delta: &Delta) {
        self.blocks.push(delta);
        self.finish = delta.piece.finish.clone().or(self.finish.take());
    }

    /// Returns the first events, once. They come with the first token, since the number of cached tokens is unknown before.
    fn beginning(&mut self, used: &Usage) -> Vec<Value> {
        if std::mem::replace(&mut self.begun, true) {
            return Vec::new();
        }
        let start = json!({"type": "message_start", "message": self.message(&[], Value::Null, Value::Null, used)});
        vec![start, json!({"type": "ping"})]
    }

    /// Adds to a refused answer the finding and the way to appeal, or the reason why it could not be checked.
    fn tell_refusal(&self, message: &mut Value) {
        if let Some(reason @ (StopReason::Violation(_) | StopReason::Unchecked(_))) =
            self.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref())
        {
            message["stop_details"] = json!(reason);
            message["stop_details"]["type"] = "refusal".into();
        }
    }

    fn message(&self, content: &[Value], stop_reason: Value, stop_sequence: Value, used: &Usage) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage(used),
        })
    }

    /// Returns the reason why the message ended, and the client's stop sequence if it was one.
    fn stop(&self) -> (&'static str, Option<&str>) {
        match &self.finish {
            Some(Finish { reason: FinishReason::ToolCalls, .. }) => ("tool_use", None),
            Some(Finish { reason: FinishReason::Stop, stop_reason: Some(StopReason::Text(text)) }) => ("stop_sequence", Some(text)),
            Some(Finish { reason: FinishReason::Stop, .. }) => ("end_turn", None),
            Some(Finish { reason: FinishReason::ContentFilter, .. }) => ("refusal", None),
            Some(Finish { reason: FinishReason::Length, .. }) | None => ("max_tokens", None),
        }
    }
}

/// Writes the usage: Anthropic counts cached tokens separately.
fn usage(usage: &Usage) -> Value {
    let cached = usage.prompt_tokens_details.cached_tokens;
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "tidemill": usage.tidemill,
    })
}
