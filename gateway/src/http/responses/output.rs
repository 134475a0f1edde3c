//! An answer's pieces as output items, and the events by which these grow.

use crate::{
    base::stamp::new_id,
    generation::piece::{Logprob, Piece},
    http::{
        blocks::{Blocks, Kind},
        logprob::json_logprob,
    },
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
    open: Option<Kind>,
    growing: Growing,
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
#[derive(Debug, Default)]
struct Growing {
    id: String,
    /// The text so far: reasoning, a message's text, or a call's arguments.
    text: String,
    /// Log-probabilities of a message's text.
    logprobs: Vec<Value>,
    /// The reader of a call's text, if its tool is called with text.
    custom: Option<InputReader>,
}

impl Output {
    pub(crate) fn new(custom: HashSet<String>, tokenizer: Option<Arc<Tokenizer>>) -> Self {
        Self { custom, tokenizer, ..Self::default() }
    }

    pub(crate) fn push(&mut self, piece: &Piece) {
        if let Some(tokenizer) = &self.tokenizer {
            self.logprobs.extend(piece.logprobs.iter().map(|logprob| logprob_value(tokenizer, logprob)));
        }
        self.add(piece);
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
            self.begin(Kind::Text);
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

    fn event(&mut self, kind: &'static str, fields: Value) {
        self.events.push(Event { kind, fields });
    }
}

impl Blocks for Output {
    fn open(&mut self) -> &mut Option<Kind> {
        &mut self.open
    }

    fn opened(&mut self, kind: &Kind) {
        let custom = matches!(kind, Kind::Call { name, .. } if self.custom.contains(name)).then(InputReader::default);
        let prefix = match kind {
            Kind::Thought => "rs_",
            Kind::Text => "msg_",
            Kind::Call { .. } if custom.is_some() => "ctc_",
            Kind::Call { .. } => "fc_",
        };
        self.growing = Growing { id: new_id(prefix), custom, ..Growing::default() };
        let (index, growing) = (self.done.len(), &self.growing);
        let added = json!({"output_index": index, "item": growing.item(kind, "in_progress")});
        let part = growing.part(kind).map(|part| json!({"item_id": growing.id, "output_index": index, "content_index": 0, "part": part}));
        self.event("response.output_item.added", added);
        part.into_iter().for_each(|part| self.event("response.content_part.added", part));
    }

    fn grown(&mut self, kind: &Kind, text: &str) {
        let growing = &mut self.growing;
        let text = growing.custom.as_mut().map_or_else(|| text.to_owned(), |reader| reader.push(text));
        if text.is_empty() {
            return;
        }
        growing.text += &text;
        let mut fields = json!({"item_id": growing.id, "output_index": self.done.len(), "delta": text});
        let event = match kind {
            Kind::Thought => "response.reasoning_text.delta",
            Kind::Text => "response.output_text.delta",
            Kind::Call { .. } if growing.custom.is_some() => "response.custom_tool_call_input.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        let logprobs = if *kind == Kind::Text { std::mem::take(&mut self.logprobs) } else { Vec::new() };
        complete(&mut fields, kind, &logprobs);
        growing.logprobs.extend(logprobs);
        self.event(event, fields);
    }

    fn closed(&mut self, kind: Kind, status: &'static str) {
        let (index, growing) = (self.done.len(), std::mem::take(&mut self.growing));
        let (event, name) = match &kind {
            Kind::Thought => ("response.reasoning_text.done", "text"),
            Kind::Text => ("response.output_text.done", "text"),
            Kind::Call { .. } if growing.custom.is_some() => ("response.custom_tool_call_input.done", "input"),
            Kind::Call { .. } => ("response.function_call_arguments.done", "arguments"),
        };
        let mut fields = json!({"item_id": growing.id, "output_index": index, name: growing.text});
        complete(&mut fields, &kind, &growing.logprobs);
        if let (Kind::Call { name, .. }, None) = (&kind, &growing.custom) {
            fields["name"] = json!(name);
        }
        self.event(event, fields);
        if let Some(part) = growing.part(&kind) {
            self.event(
                "response.content_part.done",
                json!({"item_id": growing.id, "output_index": index, "content_index": 0, "part": part}),
            );
        }
        let item = growing.item(&kind, status);
        self.done.push(Item { id: growing.id, body: item.to_string(), tokens: 0 });
        self.event("response.output_item.done", json!({"output_index": index, "item": item}));
    }
}

impl Growing {
    /// The single content part, for items that have one.
    fn part(&self, kind: &Kind) -> Option<Value> {
        match kind {
            Kind::Thought => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Text => Some(json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs})),
            Kind::Call { .. } => None,
        }
    }

    fn item(&self, kind: &Kind, status: &'static str) -> Value {
        let content: Vec<_> = if status == "in_progress" { Vec::new() } else { self.part(kind).into_iter().collect() };
        match kind {
            Kind::Thought => json!({"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}),
            Kind::Text => json!({"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}),
            Kind::Call { id, name, .. } => {
                let (kind, input) = if self.custom.is_some() { ("custom_tool_call", "input") } else { ("function_call", "arguments") };
                json!({"id": self.id, "type": kind, "status": status, "call_id": id, "name": name, input: self.text})
            }
        }
    }
}

/// Adds the further fields of events for this kind of item.
fn complete(fields: &mut Value, kind: &Kind, logprobs: &[Value]) {
    if matches!(kind, Kind::Thought | Kind::Text) {
        fields["content_index"] = json!(0);
    }
    if *kind == Kind::Text {
        fields["logprobs"] = json!(logprobs);
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
    use crate::generation::piece::CallDelta;

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
