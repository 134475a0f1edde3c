//! A response from its start to its last event, the same whether streamed or not.

use super::{
    output::Output,
    request::{Before, Named, Request},
};
use crate::{
    base::{
        json,
        stamp::{new_id, unix_seconds},
    },
    dialog::{Dialog, Message},
    generation::piece::{Finish, FinishReason, StopReason},
    http::{
        blocks::Blocks as _,
        conversations::{record::Conversation, retitled},
        protocol::{Begun, Ending, Protocol, named},
        written,
    },
    metrics::usage::Usage,
    requests::{
        body::Kept,
        error::ApiError,
        items::{self, ItemContent, Sent},
    },
    serving::{
        answer::{Delta, Ran},
        gateway::{Gateway, start::Start},
        rounds::{
            Rounds,
            rounded::{Rounded, Spent},
        },
        running::{Fixed, Place},
    },
    store::{Addition, Item, NewRecord, Owner, Part, Record, Rewrite, StoreError, access::Loaded},
    text::tokenizer::Tokenizer,
};
use axum::response::{Response, sse::Event};
use serde_json::{Map, Value, json};
use std::{collections::HashMap, mem, sync::Arc};

/// A response that is being made.
#[derive(Debug)]
pub(super) struct Run {
    gateway: Arc<Gateway>,
    output: Output,
    record: Recording,
    /// The number of events so far.
    sequence: u64,
    place: Place,
    /// The end of the model's last answer, if there are several rounds.
    ended: Option<Finish>,
}

/// The parts of a response that are stored at its end.
#[derive(Debug)]
struct Recording {
    id: String,
    owner: Owner,
    fixed: Fixed,
    store: bool,
    /// Ids of stored items at the beginning of the history.
    earlier: Vec<String>,
    input: Vec<Item>,
    /// The conversation as it was loaded, without its items.
    conversation: Option<Record>,
}

/// The stored data that a request named.
#[derive(Debug)]
pub(super) struct Stored {
    /// The response or the conversation that it continues, with all items.
    before: Option<Loaded<Record>>,
    /// Items that the input names.
    named: Option<Loaded<Vec<Item>>>,
}

impl Stored {
    pub(super) async fn look_up(gateway: &Gateway, Named { before, items }: Named) -> Result<Self, ApiError> {
        let owner = gateway.owner();
        let before = match &before {
            Before::Nothing => None,
            Before::Response(id) => Some(history(gateway, &owner, "previous_response_id", "resp_", id).await?),
            Before::Conversation(id) => Some(history(gateway, &owner, "conversation", "conv_", id).await?),
        };
        let named = match items.is_empty() {
            true => None,
            false => Some(gateway.store().find(&owner, &items).await.map_err(|error| ApiError::of_store("input", error))?),
        };
        Ok(Self { before, named })
    }

    fn bytes(&self) -> usize {
        let items = self.before.iter().flat_map(|record| &record.items).chain(self.named.iter().flat_map(|items| items.iter()));
        items.map(|item| item.body.len()).sum()
    }
}

/// A request whose dialog is complete.
struct Completed {
    id: String,
    fixed: Fixed,
    request: Request,
    dialog: Dialog,
    /// Ids of the history's items.
    earlier: Vec<String>,
    /// The input's items in their stored form.
    input: Vec<Item>,
    conversation: Option<Record>,
}

impl Completed {
    fn new(gateway: &Gateway, mut request: Request, Stored { before, named }: Stored) -> Result<Self, ApiError> {
        // Their shares end with the work on them.
        let (mut record, _share) = before.map(Loaded::into_parts).unzip();
        let before = record.as_mut().map(|record| mem::take(&mut record.items)).unwrap_or_default();
        let conversation = record.filter(|record| record.id.starts_with("conv_"));
        let id = new_id("resp_");
        let mut fixed = Map::new();
        fixed.insert("id".into(), id.clone().into());
        fixed.insert("object".into(), "response".into());
        fixed.insert("created_at".into(), unix_seconds().into());
        fixed.insert("model".into(), gateway.model_name().into());
        fixed.insert("background".into(), false.into());
        fixed.extend(mem::take(&mut request.echo));
        let instructions = match (request.instructions.take(), &conversation) {
            (None, Some(record)) => Conversation::read(record)?.instructions().map(str::to_owned),
            (instructions, _) => instructions,
        };
        let recalled = before.iter().map(|item| items::recall(item).map(|(_, said)| said)).collect::<Result<Vec<_>, _>>()?;
        let mut looked_up = HashMap::new();
        for item in named.iter().flat_map(|items| items.iter()) {
            looked_up.insert(item.id.as_str(), (item, items::recall(item)?.1));
        }
        let (last, chained) = (before.last().map_or("", |item| &item.id), conversation.is_none());
        let (input, said) = complete(&request.input, &looked_up, last, chained, &gateway.text().tokenizer)?;
        let system = instructions.map(|text| Message { role: "system".into(), content: Some(text), ..Message::default() });
        let messages = system.into_iter().chain(items::turns(recalled.into_iter().chain(said))).collect();
        let dialog = Dialog {
            messages,
            tools: mem::take(&mut request.tools),
            tool_choice: mem::take(&mut request.tool_choice),
            parallel: request.parallel,
            reasoning: mem::take(&mut request.reasoning),
            ..Dialog::default()
        };
        // It takes as much memory as the dialog, and is no longer needed.
        request.input = Vec::new();
        let fixed = Fixed::new(fixed);
        Ok(Self { id, fixed, request, dialog, earlier: before.into_iter().map(|item| item.id).collect(), input, conversation })
    }
}

impl Run {
    /// Starts the answer to a request. `again` parses it from its body, if it was not kept.
    pub(super) async fn start(
        gateway: &Arc<Gateway>,
        request: Kept<Request>,
        again: impl FnOnce(&[u8]) -> Result<Request, ApiError> + Send + 'static,
        stored: Stored,
        question: Option<Vec<Value>>,
    ) -> Result<Begun<Self>, ApiError> {
        let worker = Arc::clone(gateway);
        let completed = gateway
            .compute_on(request.weight() + stored.bytes(), move || request.with(again, |request| Completed::new(&worker, request, stored)));
        let Completed { id, fixed, request, dialog, earlier, input, conversation } = completed.await?;
        let Request { options, store, custom, server_tools, .. } = request;
        let rounds = Rounds::new(gateway, "input", server_tools, &dialog, &options);
        let streams = options.stream;
        let tokenizer = options.sampling.logprobs.map(|_| Arc::clone(&gateway.text().tokenizer));
        let answer = gateway.start_dialog(dialog, options, Start { id: &id, question, ..Start::of("input") }).await?;
        let record = Recording { id, owner: gateway.owner(), fixed, store, earlier, input, conversation };
        let place = gateway.running().enter(&record.owner, &record.id, record.fixed.clone());
        let answer = Rounded::new(gateway, answer, rounds).showing_calls();
        let output = Output::new(custom, tokenizer);
        let protocol = Self { gateway: Arc::clone(gateway), output, record, sequence: 0, place, ended: None };
        Ok(Begun { answer, protocol, streams })
    }

    fn hear(&mut self, Delta { piece, ran, .. }: Delta, spent: &Spent) {
        self.output.push(&piece);
        if let Some(finish) = piece.finish {
            if finish.reason == FinishReason::ToolCalls {
                self.output.close("completed");
            }
            self.ended = Some(finish);
        }
        if !ran.is_empty() {
            self.output.end_round(&spent.round);
        }
        for Ran { id: call_id, output: text, .. } in ran {
            let returned = ItemContent::Returned { call_id, text };
            let tokens = returned.tokens(&self.gateway.text().tokenizer);
            if let ItemContent::Returned { call_id, text } = &returned {
                self.output.returned(call_id, text, tokens);
            }
        }
    }

    /// Closes open items and stores the response. Returns the kind of the last event, the response's fields that were open until then, and
    /// an error if it failed.
    async fn finish(&mut self, ending: Ending, spent: &Spent) -> (&'static str, Map<String, Value>, Option<ApiError>) {
        let incomplete = match self.ended.as_ref().map(|finish| finish.reason) {
            Some(FinishReason::Length) => Some("max_output_tokens"),
            Some(FinishReason::ContentFilter) => Some("content_filter"),
            _ => None,
        };
        let (kind, status, error) = match ending {
            Ending::Complete if incomplete.is_some() => ("response.incomplete", "incomplete", None),
            Ending::Complete => ("response.completed", "completed", None),
            Ending::Cancelled => ("response.incomplete", "cancelled", None),
            Ending::Failed(error) => ("response.failed", "failed", Some(error)),
        };
        self.output.finish(if status == "completed" { "completed" } else { "incomplete" });
        let items = self.output.counted(&spent.round);
        let mut response = others(status, &items, Some(&spent.total));
        match (status, &error) {
            ("completed", _) => {
                response.insert("completed_at".into(), unix_seconds().into());
            }
            ("incomplete", _) => {
                response["incomplete_details"] = json!({"reason": incomplete});
                match self.ended.as_ref().and_then(|finish| finish.stop_reason.as_ref()) {
                    Some(StopReason::Violation(violation)) => response["incomplete_details"]["violation"] = json!(violation),
                    Some(StopReason::Unchecked(unchecked)) => response["incomplete_details"]["unchecked"] = json!(unchecked),
                    _ => {}
                }
            }
            (_, Some(error)) => response["error"] = failure(error),
            _ => {}
        }
        match self.record.keep(&self.gateway, &response, &items).await {
            Ok(()) => (kind, response, error),
            // A response that cannot be continued has failed: the next turn would lack its context.
            Err(lost) => {
                let error = error.unwrap_or_else(|| ApiError::of_store("store", lost));
                response["status"] = "failed".into();
                response["error"] = failure(&error);
                ("response.failed", response, Some(error))
            }
        }
    }

    fn output_events(&mut self) -> Vec<Event> {
        self.output.events().into_iter().map(|event| self.event(event.kind, event.fields)).collect()
    }

    fn response_event(&mut self, kind: &str, response: &str) -> Event {
        let event = format!(r#"{{"type":"{kind}","sequence_number":{},"response":{response}}}"#, self.sequence);
        self.sequence += 1;
        Event::default().event(kind).data(event)
    }

    fn event(&mut self, kind: &str, fields: Value) -> Event {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        named(&event)
    }
}

impl Protocol for Run {
    fn opening(&mut self) -> Vec<Event> {
        let response = self.record.fixed.with(&others("in_progress", &[], None));
        ["response.created", "response.in_progress"].map(|kind| self.response_event(kind, &response)).into()
    }

    async fn take(&mut self, delta: Delta, spent: &Spent) {
        self.hear(delta, spent);
    }

    async fn whole(mut self, spent: Spent) -> Result<Response, ApiError> {
        match self.finish(Ending::Complete, &spent).await {
            (_, _, Some(error)) => Err(error),
            (_, response, None) => {
                let fixed = self.record.fixed.clone();
                Ok(written::json(self.gateway.compute(move || Ok(fixed.with(&response))).await?))
            }
        }
    }

    async fn events(&mut self, delta: Delta, spent: &Spent) -> Vec<Event> {
        self.hear(delta, spent);
        self.output_events()
    }

    async fn closing(&mut self, ending: Ending, spent: &Spent) -> Vec<Event> {
        let (kind, response, error) = self.finish(ending, spent).await;
        let mut events = self.output_events();
        if let Some(error) = error {
            events.push(self.event("error", json!({"code": code(&error), "message": error.message(), "param": null})));
        }
        let response = self.record.fixed.with(&response);
        events.push(self.response_event(kind, &response));
        events
    }

    fn cancelled(&self) -> impl Future<Output = ()> + Send {
        let cancelled = self.place.cancelled();
        async move { cancelled.notified().await }
    }
}

impl Recording {
    async fn keep(&mut self, gateway: &Gateway, response: &Map<String, Value>, output: &[Item]) -> Result<(), StoreError> {
        let now = unix_seconds();
        let items: Vec<_> = mem::take(&mut self.input).into_iter().chain(output.iter().cloned()).collect();
        let conversation = self.conversation.take().map(|record| (titled(&record, &items), record.id));
        if !self.store {
            return match conversation {
                Some((body, id)) => gateway.store().append(&self.owner, &id, Addition { body, ..Addition::of(items) }, now).await,
                None => Ok(()),
            };
        }
        let mut body = response.clone();
        body["output"] = json!([]);
        let record = NewRecord {
            id: self.id.clone(),
            body: self.fixed.with(&body),
            earlier: mem::take(&mut self.earlier),
            items,
            outputs: output.len(),
            conversation: conversation.map(|(body, id)| (id, body)),
            ..NewRecord::default()
        };
        gateway.store().put(&self.owner, record, now).await
    }
}

/// The fields of a response that change until it has ended.
pub(super) fn others(status: &str, output: &[Item], usage: Option<&Usage>) -> Map<String, Value> {
    let output = output.iter().map(|item| json::from_slice(item.body.as_bytes()).unwrap_or(Value::Null)).collect();
    let fields = [
        ("status", status.into()),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("output", output),
        ("usage", usage.map_or(Value::Null, usage_value)),
    ];
    fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
}

/// Makes the conversation's title. A failure does not affect the response.
fn titled(record: &Record, items: &[Item]) -> Option<Rewrite> {
    retitled(record, items).unwrap_or_else(|error| {
        tracing::warn!(error = error.message(), "could not make a conversation's title");
        None
    })
}

/// Loads a stored response or conversation.
async fn history(gateway: &Gateway, owner: &Owner, param: &str, prefix: &str, id: &str) -> Result<Loaded<Record>, ApiError> {
    if !id.starts_with(prefix) {
        return Err(ApiError::not_found(param, format!("`{id}` is not an id that `{param}` could name: those begin with `{prefix}`")));
    }
    let tokens_max = gateway.largest_context();
    gateway.store().load_for(owner, id, Part::All, tokens_max).await.map_err(|error| ApiError::of_store(param, error))
}

/// Completes the input with ids, and returns its content as well.
fn complete(
    input: &[Sent],
    looked_up: &HashMap<&str, (&Item, ItemContent)>,
    before: &str,
    chained: bool,
    tokenizer: &Tokenizer,
) -> Result<(Vec<Item>, Vec<ItemContent>), ApiError> {
    let mut last = before.to_owned();
    let mut items = Vec::with_capacity(input.len());
    let mut all_said = Vec::with_capacity(input.len());
    for sent in input {
        let (item, said) = match &sent.said {
            ItemContent::Reference(id) => {
                let (item, said) =
                    looked_up.get(id.as_str()).ok_or_else(|| ApiError::not_found("input", format!("`{id}` is not stored here")))?;
                ((*item).clone(), said.clone())
            }
            said => {
                let id = if chained { sent.chained_id(&last) } else { new_id(sent.prefix()) };
                (Item { tokens: said.tokens(tokenizer), ..sent.named(id) }, said.clone())
            }
        };
        last.clone_from(&item.id);
        items.push(item);
        all_said.push(said);
    }
    Ok((items, all_said))
}

fn usage_value(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
        "tidemill": in_microseconds(json!(usage.tidemill)),
    })
}

/// Rounds times to few enough digits to come back from the store unchanged.
fn in_microseconds(mut usage: Value) -> Value {
    for number in usage.as_object_mut().into_iter().flat_map(Map::values_mut).filter(|value| value.is_f64()) {
        *number = number.as_f64().map(|ms| (ms * 1e3).round() / 1e3).into();
    }
    usage
}

fn failure(error: &ApiError) -> Value {
    json!({"code": code(error), "message": error.message()})
}

fn code(error: &ApiError) -> &'static str {
    if error.status() == 429 { "rate_limit_exceeded" } else { "server_error" }
}
