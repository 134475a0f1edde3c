//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API. A dialog like any other inside, with its own events and errors
//! outside. `anthropic-…` headers are accepted as they come, like everywhere here.
//!
//! - `request`: the body as a dialog; `blocks`: an answer's pieces as content blocks and events

mod blocks;
pub mod error;
mod request;

use super::{access::Client, sse::keep_alive, written};
use crate::{
    base::stamp::new_id,
    generation::piece::{Finish, FinishReason, StopReason},
    metrics::{self, usage::Usage},
    requests::{error::ApiError, parse::JsonBody},
    serving::{
        gateway::{Gateway, Start},
        rounds::rounded::Rounded,
    },
};
use axum::{
    Json,
    body::Body,
    response::{IntoResponse, Response, Sse, sse::Event},
};
use blocks::Blocks;
use error::MessagesError;
use futures_util::stream;
use serde_json::{Value, json};
use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Instant};

/// `POST /v1/messages`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, MessagesError> {
    // A request that runs is counted by its answer.
    let started = start(&gateway, body).await.inspect_err(|error| metrics::count_request(error.outcome()));
    let (mut message, streams) = started?;
    if !streams {
        let whole = message.whole().await?;
        return Ok(written::write(&message.gateway, 0, move || Ok(whole)).await?);
    }
    message.answer.running().settle().await?;
    let events = stream::unfold((message, VecDeque::new()), |(mut message, mut ready)| async move {
        while ready.is_empty() {
            ready.extend(message.next().await?);
        }
        let event: Value = ready.pop_front()?;
        let named = Event::default().event(event["type"].as_str().unwrap_or_default()).data(event.to_string());
        Some((Ok::<_, Infallible>(named), (message, ready)))
    });
    Ok(Sse::new(events).keep_alive(keep_alive()).into_response())
}

/// `POST /v1/messages/count_tokens`: system and tools included, because it is the prompt itself that is counted.
pub async fn count_tokens(Client(gateway): Client, body: Body) -> Result<Json<Value>, MessagesError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(&gateway);
    let count = gateway.compute_body(body.len(), move || {
        let (worker, dialog, ..) = request::understand(&worker, JsonBody::parse(&body)?, None)?;
        Ok(worker.prompt_only("messages", &dialog)?.len())
    });
    Ok(Json(json!({"input_tokens": count.await?})))
}

async fn start(gateway: &Arc<Gateway>, body: Body) -> Result<(Message, bool), ApiError> {
    let arrived = Instant::now();
    let body = gateway.read(body).await?;
    let worker = Arc::clone(gateway);
    let understood = gateway.compute_body(body.len(), move || {
        let parsed = JsonBody::parse(&body)?;
        let asked = worker.asked(parsed.fields());
        Ok((request::to_answer(&worker, arrived, parsed)?, asked))
    });
    let ((gateway, dialog, options, rounds), asked) = understood.await?;
    let streams = options.stream;
    let id = new_id("msg_");
    let answer = gateway.start_dialog(dialog, options, Start { id: &id, question: asked, ..Start::of("messages") }).await?;
    let message = Message {
        gateway: Arc::clone(&gateway),
        id,
        model: gateway.model_name().to_owned(),
        answer: Rounded::new(&gateway, answer, rounds),
        blocks: Blocks::default(),
        finish: None,
        begun: false,
        over: false,
    };
    Ok((message, streams))
}

/// An answer on its way.
#[derive(Debug)]
struct Message {
    gateway: Arc<Gateway>,
    id: String,
    model: String,
    answer: Rounded,
    blocks: Blocks,
    finish: Option<Finish>,
    begun: bool,
    over: bool,
}

impl Message {
    async fn whole(&mut self) -> Result<Value, ApiError> {
        while let Some(delta) = self.answer.next_delta().await? {
            self.blocks.push(&delta);
            self.finish = delta.piece.finish.or(self.finish.take());
        }
        self.blocks.finish();
        let (reason, sequence) = self.stop();
        let mut message = self.message(self.blocks.content(), json!(reason), json!(sequence));
        self.tell_refusal(&mut message);
        Ok(message)
    }

    /// Says what was found in a refused answer, and how to appeal; or that it could not be checked.
    fn tell_refusal(&self, message: &mut Value) {
        if let Some(reason @ (StopReason::Violation(_) | StopReason::Unchecked(_))) =
            self.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref())
        {
            message["stop_details"] = json!(reason);
            message["stop_details"]["type"] = "refusal".into();
        }
    }

    /// The next events; `None` after the last. The first comes with the first token: only then is known what was cached.
    async fn next(&mut self) -> Option<Vec<Value>> {
        if self.over {
            return None;
        }
        let delta = self.answer.next_delta().await;
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.begun, true) && delta.is_ok() {
            events.push(json!({"type": "message_start", "message": self.message(&[], Value::Null, Value::Null)}));
            events.push(json!({"type": "ping"}));
        }
        match delta {
            Ok(Some(delta)) => {
                self.blocks.push(&delta);
                self.finish = delta.piece.finish.or(self.finish.take());
                events.extend(self.blocks.events());
            }
            Ok(None) => {
                self.over = true;
                self.blocks.finish();
                events.extend(self.blocks.events());
                let (reason, sequence) = self.stop();
                let mut delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                self.tell_refusal(&mut delta);
                events.push(json!({"type": "message_delta", "delta": delta, "usage": usage(&self.answer.usage())}));
                events.push(json!({"type": "message_stop"}));
            }
            Err(error) => {
                self.over = true;
                events.push(error::body(&error));
            }
        }
        Some(events)
    }

    fn message(&self, content: &[Value], stop_reason: Value, stop_sequence: Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage(&self.answer.usage()),
        })
    }

    /// Why the message ended, and the client's stop sequence if that is why.
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

/// Anthropic counts cached tokens apart from the others.
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
