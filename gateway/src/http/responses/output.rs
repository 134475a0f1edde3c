//! An answer's pieces as output items, and the events by which these grow.

use crate::{
    base::stamp::new_id,
    generation::piece::{CallDelta, Logprob, Piece},
    http::logprob::json_logprob,
    metrics::usage::Usage,
    requests::custom::InputReader,
    store::Item,
    text::tokenizer::{Tokenizer, printable},
};
use serde_json::{Value, json};
use std::{collections::HashSet, sync::Arc};
use tidemill_proto::block::Token;

/// Items in the order of their start; the last may still grow.
#[derive(Debug, Default)]
pub(crate) struct Output {
    done: Vec<Item>,
    /// The number of items in `done` whose tokens are counted: those of earlier rounds.
    counted: usize,
    open: Option<Open>,
    events: Vec<Event>,
    /// Names of tools that are called with text.
    custom: HashSet<String>,
    /// The tokenizer for log-probabilities, if they are wanted.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Log-probabilities of tokens whose text has not arrived yet.
    logprobs: Vec<Value>,
}

/// An event of a stream, without its sequence number.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) kind: &'static str,
    /// The event's fields, as an object.
    pub(crate) fields: Value,
}

/// The item that still grows.
#[derive(Debug)]
struct Open {
    id: String,
    kind: Kind,
    /// The text so far: reasoning, a message's text, or a call's arguments.
    text: String,
    /// Log-probabilities of a message's text.
    logprobs: Vec<Value>,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Thought,
    Message,
    /// A call; `custom` if its tool is called with text.
    Call {
        index: u32,
        call_id: String,
        name: String,
        custom: Option<InputReader>,
    },
}

impl Output {
    pub(crate) fn new(custom: HashSet<String>, tokenizer: Option<Arc<Tokenizer>>) -> Self {
        Self { custom, tokenizer, ..Self::default() }
    }

    pub(crate) fn push(&mut self, piece: &Piece) {
        if let Some(tokenizer) = &self.tokenizer {
            self.logprobs.extend(piece.logprobs.iter().map(|logprob| logprob_value(tokenizer, logprob)));
        }
        if !piece.reasoning.is_empty() || !piece.calls.is_empty() && piece.text.is_empty() {
            // Only text has log-probabilities.
            self.logprobs.clear();
        }
        if !piece.reasoning.is_empty() {
            self.grow(Kind::Thought, &piece.reasoning);
        }
        if !piece.text.is_empty() {
            self.grow(Kind::Message, &piece.text);
        }
        for call in &piece.calls {
            self.call(call);
        }
    }

    /// Adds the output of a call that ran on the server.
    pub(crate) fn returned(&mut self, call_id: &str, text: &str, tokens: u32) {
        self.close("completed");
        let (id, index) = (new_id("fco_"), self.done.len());
        let item = json!({"id": id, "type": "function_call_output", "status": "completed", "call_id": call_id, "output": text});
        for kind in ["response.output_item.added", "response.output_item.done"] {
            self.event(kind, json!({"output_index": index, "item": item}));
        }
        self.done.push(Item { id, body: item.to_string(), tokens });
        self.counted = self.done.len();
    }

    /// Ends a round, whose items took the tokens of `usage`.
    pub(crate) fn end_round(&mut self, usage: &Usage) {
        self.close("completed");
        self.done = self.counted(usage);
        self.counted = self.done.len();
    }

    /// Returns all items with their tokens: in this round, the first has those of the reasoning, the last all others.
    pub(crate) fn counted(&self, usage: &Usage) -> Vec<Item> {
        let mut items = self.items().to_vec();
        let thought = usage.completion_tokens_details.reasoning_tokens;
        let said = usage.completion_tokens.saturating_sub(thought);
        let round = &mut items[self.counted..];
        if let Some(first) = round.first_mut() {
            first.tokens += thought as u32;
        }
        if let Some(last) = round.last_mut() {
            last.tokens += said as u32;
        }
        items
    }

    /// Ends the answer. An answer without items becomes an empty message.
    pub(crate) fn finish(&mut self, status: &'static str) {
        if self.done.is_empty() && self.open.is_none() {
            self.open(Kind::Message);
        }
        self.close(status);
    }

    /// Returns the events since the last call.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Returns all items, once finished.
    pub(crate) fn items(&self) -> &[Item] {
        debug_assert!(self.open.is_none(), "an item still grows");
        &self.done
    }

    fn grow(&mut self, kind: Kind, text: &str) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.open(kind);
        }
        self.append(text);
    }

    fn call(&mut self, delta: &CallDelta) {
        let goes_on = |open: &Open| matches!(open.kind, Kind::Call { index, .. } if index == delta.index);
        if !self.open.as_ref().is_some_and(goes_on) {
            let (call_id, name) = (delta.id.clone().unwrap_or_default(), delta.name.clone().unwrap_or_default());
            let custom = self.custom.contains(&name).then(InputReader::default);
            self.open(Kind::Call { index: delta.index, call_id, name, custom });
        }
        let text = match self.open.as_mut().map(|open| &mut open.kind) {
            Some(Kind::Call { custom: Some(reader), .. }) => reader.push(&delta.arguments),
            _ => delta.arguments.clone(),
        };
        if !text.is_empty() {
            self.append(&text);
        }
    }

    fn open(&mut self, kind: Kind) {
        self.close("completed");
        let prefix = match kind {
            Kind::Thought => "rs_",
            Kind::Message => "msg_",
            Kind::Call { custom: None, .. } => "fc_",
            Kind::Call { custom: Some(_), .. } => "ctc_",
        };
        let open = Open { id: new_id(prefix), kind, text: String::new(), logprobs: Vec::new() };
        let index = self.done.len();
        self.event("response.output_item.added", json!({"output_index": index, "item": open.item("in_progress")}));
        if let Some(part) = open.part() {
            self.event("response.content_part.added", json!({"item_id": open.id, "output_index": index, "content_index": 0, "part": part}));
        }
        self.open = Some(open);
    }

    fn append(&mut self, text: &str) {
        let Some(open) = &mut self.open else { return };
        open.text += text;
        let mut fields = json!({"item_id": open.id, "output_index": self.done.len(), "delta": text});
        let kind = match open.kind {
            Kind::Thought => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
            Kind::Call { custom: None, .. } => "response.function_call_arguments.delta",
            Kind::Call { custom: Some(_), .. } => "response.custom_tool_call_input.delta",
        };
        let logprobs = if open.kind == Kind::Message { std::mem::take(&mut self.logprobs) } else { Vec::new() };
        open.complete(&mut fields, &logprobs);
        open.logprobs.extend(logprobs);
        self.event(kind, fields);
    }

    /// Ends the item that still grows, if there is one.
    pub(crate) fn close(&mut self, status: &'static str) {
        let Some(open) = self.open.take() else { return };
        let index = self.done.len();
        let (kind, name) = match &open.kind {
            Kind::Thought => ("response.reasoning_text.done", "text"),
            Kind::Message => ("response.output_text.done", "text"),
            Kind::Call { custom: None, .. } => ("response.function_call_arguments.done", "arguments"),
            Kind::Call { custom: Some(_), .. } => ("response.custom_tool_call_input.done", "input"),
        };
        let mut fields = json!({"item_id": open.id, "output_index": index, name: open.text});
        open.complete(&mut fields, &open.logprobs);
        if let Kind::Call { name, custom: None, .. } = &open.kind {
            fields["name"] = json!(name);
        }
        self.event(kind, fields);
        if let Some(part) = open.part() {
            self.event("response.content_part.done", json!({"item_id": open.id, "output_index": index, "content_index": 0, "part": part}));
        }
        let item = open.item(status);
        self.done.push(Item { id: open.id, body: item.to_string(), tokens: 0 });
        self.event("response.output_item.done", json!({"output_index": index, "item": item}));
    }

    fn event(&mut self, kind: &'static str, fields: Value) {
        self.events.push(Event { kind, fields });
    }
}

impl Open {
    /// The single content part, for items that have one.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Thought => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Message => Some(json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs})),
            Kind::Call { .. } => None,
        }
    }

    fn item(&self, status: &'static str) -> Value {
        let content: Vec<_> = if status == "in_progress" { Vec::new() } else { self.part().into_iter().collect() };
        match &self.kind {
            Kind::Thought => json!({"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}),
            Kind::Message => json!({"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}),
            Kind::Call { call_id, name, custom: Some(_), .. } => json!({
                "id": self.id, "type": "custom_tool_call", "status": status, "call_id": call_id, "name": name, "input": self.text,
            }),
            Kind::Call { call_id, name, custom: None, .. } => json!({
                "id": self.id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": self.text,
            }),
        }
    }

    /// Adds the further fields of events for this kind of item.
    fn complete(&self, fields: &mut Value, logprobs: &[Value]) {
        match self.kind {
            Kind::Thought => fields["content_index"] = json!(0),
            Kind::Message => {
                fields["content_index"] = json!(0);
                fields["logprobs"] = json!(logprobs);
            }
            Kind::Call { .. } => {}
        }
    }
}

fn logprob_value(tokenizer: &Tokenizer, Logprob { token, logprob, .. }: &Logprob) -> Value {
    let one = |token: Token, logprob: f32| {
        let bytes = tokenizer.token_bytes(token);
        json!({"token": printable(&bytes), "logprob": json_logprob(logprob), "bytes": bytes})
    };
    let mut value = one(*token, logprob.logprob);
    value["top_logprobs"] = logprob.top.iter().map(|(token, logprob)| one(*token, *logprob)).collect();
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Piece {
        Piece { text: text.into(), ..Piece::default() }
    }

    fn call(index: u32, name: Option<&str>, arguments: &str) -> Piece {
        let id = name.map(|_| format!("call_{index}"));
        let delta = CallDelta { index, id, name: name.map(str::to_owned), arguments: arguments.into() };
        Piece { calls: vec![delta], ..Piece::default() }
    }

    /// One line per event: its name without `response.`, the output index, and its content.
    fn told(pieces: &[Piece], status: &'static str) -> (Vec<String>, Vec<Value>) {
        let mut output = Output::default();
        let mut events = Vec::new();
        for piece in pieces {
            output.push(piece);
            events.extend(output.events());
        }
        output.finish(status);
        events.extend(output.events());
        let line = |Event { kind, fields }: Event| {
            let carried = ["delta", "text", "arguments"].into_iter().find_map(|name| fields[name].as_str());
            let carried = carried.or(fields["part"]["text"].as_str()).or(fields["item"]["status"].as_str());
            format!("{} {} {}", kind.trim_start_matches("response."), fields["output_index"], carried.unwrap_or("-"))
        };
        let items = output.items().iter().map(|item| serde_json::from_str(&item.body).unwrap());
        (events.into_iter().map(line).collect(), items.collect())
    }

    #[test]
    fn a_thought_a_text_and_two_calls() {
        let thought = Piece { reasoning: "hm".into(), ..Piece::default() };
        let pieces = [
            thought,
            text("one "),
            Piece::default(),
            text("two"),
            call(0, Some("f"), ""),
            call(0, None, "{}"),
            call(1, Some("g"), "{\"a\":"),
            call(1, None, "1}"),
        ];
        let (events, items) = told(&pieces, "completed");
        let expected = "
            output_item.added 0 in_progress
            content_part.added 0
            reasoning_text.delta 0 hm
            reasoning_text.done 0 hm
            content_part.done 0 hm
            output_item.done 0 completed
            output_item.added 1 in_progress
            content_part.added 1
            output_text.delta 1 one
            output_text.delta 1 two
            output_text.done 1 one two
            content_part.done 1 one two
            output_item.done 1 completed
            output_item.added 2 in_progress
            function_call_arguments.delta 2 {}
            function_call_arguments.done 2 {}
            output_item.done 2 completed
            output_item.added 3 in_progress
            function_call_arguments.delta 3 {\"a\":
            function_call_arguments.delta 3 1}
            function_call_arguments.done 3 {\"a\":1}
            output_item.done 3 completed";
        let expected: Vec<_> = expected.trim().lines().map(str::trim).collect();
        assert_eq!(events.iter().map(|line| line.trim()).collect::<Vec<_>>(), expected);
        assert_eq!(items[1]["content"][0]["text"], "one two");
        assert_eq!((&items[3]["call_id"], &items[3]["name"], &items[3]["arguments"]), (&json!("call_1"), &json!("g"), &json!("{\"a\":1}")));
        for (item, prefix) in items.iter().zip(["rs_", "msg_", "fc_", "fc_"]) {
            assert!(item["id"].as_str().unwrap().starts_with(prefix));
        }
    }

    #[test]
    fn a_custom_tool_is_called_with_text() {
        let mut output = Output::new(["f".to_owned()].into(), None);
        for piece in [call(0, Some("f"), ""), call(0, None, "{\"input\": \"a"), call(0, None, "\\nb\"}"), call(1, Some("g"), "{}")] {
            output.push(&piece);
        }
        output.finish("completed");
        let deltas = output.events().into_iter().filter(|event| event.kind == "response.custom_tool_call_input.delta");
        assert_eq!(deltas.map(|event| event.fields["delta"].as_str().unwrap().to_owned()).collect::<String>(), "a\nb");
        let items: Vec<Value> = output.items().iter().map(|item| serde_json::from_str(&item.body).unwrap()).collect();
        assert_eq!((&items[0]["type"], &items[0]["input"]), (&json!("custom_tool_call"), &json!("a\nb")));
        assert_eq!((&items[1]["type"], &items[1]["arguments"]), (&json!("function_call"), &json!("{}")));
    }

    #[test]
    fn what_was_cut_is_incomplete_and_nothing_is_an_empty_message() {
        let (_, items) = told(&[call(0, Some("f"), "{"), text("x")], "incomplete");
        assert_eq!((&items[0]["status"], &items[1]["status"]), (&json!("completed"), &json!("incomplete")));
        let (events, items) = told(&[Piece::default()], "completed");
        assert_eq!((events.len(), &items[0]["content"][0]["text"]), (5, &json!("")));
    }
}
