//! An answer's pieces as content blocks, and the events by which these grow.

use crate::{
    dialog::render::OTHER_ARGUMENTS,
    http::blocks::{Blocks as _, Kind},
    serving::answer::{Delta, Ran},
};
use serde_json::{Map, Value, json};

/// Blocks in the order of their start; the last may still grow.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    done: Vec<Value>,
    open: Option<Kind>,
    /// The open block's text so far: reasoning, text, or a call's arguments.
    text: String,
    events: Vec<Value>,
}

impl Blocks {
    pub(super) fn push(&mut self, Delta { piece, ran, .. }: &Delta) {
        self.add(piece);
        if !ran.is_empty() {
            self.ran(ran);
        }
    }

    /// Ends the last block: no more follow.
    pub(super) fn finish(&mut self) {
        self.close("completed");
    }

    /// Returns the events since the last call.
    pub(super) fn events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    /// Returns all blocks, once finished.
    pub(super) fn content(&self) -> &[Value] {
        debug_assert!(self.open.is_none(), "a block still grows");
        &self.done
    }

    /// Adds a round's calls that ran on the server, followed by their outputs.
    fn ran(&mut self, ran: &[Ran]) {
        self.finish();
        let called = ran.iter().map(
            |Ran { id, name, arguments, .. }| json!({"type": "server_tool_use", "id": id, "name": name, "input": input(arguments.clone())}),
        );
        let returned = ran.iter().map(|Ran { id, output, .. }| json!({"type": "server_tool_result", "tool_use_id": id, "content": output}));
        for block in called.chain(returned) {
            let index = self.done.len();
            self.events.push(json!({"type": "content_block_start", "index": index, "content_block": block}));
            self.events.push(json!({"type": "content_block_stop", "index": index}));
            self.done.push(block);
        }
    }
}

impl crate::http::blocks::Blocks for Blocks {
    fn open(&mut self) -> &mut Option<Kind> {
        &mut self.open
    }

    fn opened(&mut self, kind: &Kind) {
        let block = match kind {
            Kind::Thought => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Kind::Text => json!({"type": "text", "text": ""}),
            Kind::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
        };
        self.events.push(json!({"type": "content_block_start", "index": self.done.len(), "content_block": block}));
    }

    fn grown(&mut self, kind: &Kind, text: &str) {
        self.text += text;
        let gain = match kind {
            Kind::Thought => json!({"type": "thinking_delta", "thinking": text}),
            Kind::Text => json!({"type": "text_delta", "text": text}),
            Kind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
        };
        self.events.push(delta(self.done.len(), gain));
    }

    /// Ends a block. None says that it was cut.
    fn closed(&mut self, kind: Kind, _: &'static str) {
        let (index, text) = (self.done.len(), std::mem::take(&mut self.text));
        let block = match kind {
            Kind::Thought => {
                self.events.push(delta(index, json!({"type": "signature_delta", "signature": ""})));
                json!({"type": "thinking", "thinking": text, "signature": ""})
            }
            Kind::Text => json!({"type": "text", "text": text}),
            Kind::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": input(text)}),
        };
        self.done.push(block);
        self.events.push(json!({"type": "content_block_stop", "index": index}));
    }
}

fn delta(index: usize, gain: Value) -> Value {
    json!({"type": "content_block_delta", "index": index, "delta": gain})
}

/// Reads a call's input, which is an object. If the model wrote anything else (possibly cut), its text is wrapped in one.
fn input(arguments: String) -> Value {
    match serde_json::from_str(&arguments) {
        Ok(object @ Value::Object(_)) => object,
        Err(_) if arguments.trim().is_empty() => Value::Object(Map::new()),
        _ => json!({OTHER_ARGUMENTS: arguments}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::piece::{CallDelta, Piece};

    /// One line per event: its type, the block's index, and its content.
    fn told(pieces: &[Piece]) -> (Vec<String>, Vec<Value>) {
        let mut blocks = Blocks::default();
        pieces.iter().for_each(|piece| blocks.push(&Delta { piece: piece.clone(), ..Delta::default() }));
        blocks.finish();
        let line = |event: Value| {
            let carried = event.get("delta").or(event.get("content_block")).map_or("-", |inner| inner["type"].as_str().unwrap());
            format!("{} {} {carried}", event["type"].as_str().unwrap(), event["index"])
        };
        (blocks.events().into_iter().map(line).collect(), blocks.content().to_vec())
    }

    #[test]
    fn a_thought_a_text_and_a_call() {
        let call = |id: Option<&str>, arguments: &str| Piece {
            calls: vec![CallDelta { index: 0, id: id.map(str::to_owned), name: id.map(|_| "look".into()), arguments: arguments.into() }],
            ..Piece::default()
        };
        let text = Piece { text: "Moment.".into(), ..Piece::default() };
        let thought = Piece { reasoning: "hm".into(), ..Piece::default() };
        let (events, content) = told(&[thought, Piece::default(), text, call(Some("c1"), ""), call(None, "{\"a\""), call(None, ": 1}")]);
        let expected = "
            content_block_start 0 thinking
            content_block_delta 0 thinking_delta
            content_block_delta 0 signature_delta
            content_block_stop 0 -
            content_block_start 1 text
            content_block_delta 1 text_delta
            content_block_stop 1 -
            content_block_start 2 tool_use
            content_block_delta 2 input_json_delta
            content_block_delta 2 input_json_delta
            content_block_stop 2 -";
        assert_eq!(events, expected.trim().lines().map(str::trim).collect::<Vec<_>>());
        assert_eq!(content[0], json!({"type": "thinking", "thinking": "hm", "signature": ""}));
        assert_eq!(content[2], json!({"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}));
    }

    #[test]
    fn an_input_is_always_an_object() {
        assert_eq!(input(String::new()), json!({}));
        assert_eq!(input("{\"a\":1}".into()), json!({"a": 1}));
        assert_eq!(input("{\"a\":".into()), json!({"arguments": "{\"a\":"}));
        assert_eq!(input("3".into()), json!({"arguments": "3"}));
    }
}
