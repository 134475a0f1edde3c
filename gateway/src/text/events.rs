//! Stretches of a model's output, each of one kind.

/// A stretch of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Thought(String),
    Text(String),
    /// The start of a call of this name.
    Call(String),
    /// More of the last call's arguments: JSON text.
    Arguments(String),
}

/// Events in order; consecutive ones of a kind are merged.
#[derive(Debug, Default)]
pub(super) struct Events(pub(super) Vec<Event>);

impl Events {
    pub(super) fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            Some(Event::Text(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.0.push(Event::Text(text.to_owned())),
        }
    }

    pub(super) fn thought(&mut self, text: &str) {
        match self.0.last_mut() {
            Some(Event::Thought(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.0.push(Event::Thought(text.to_owned())),
        }
    }

    pub(super) fn call(&mut self, name: &str) {
        self.0.push(Event::Call(name.to_owned()));
    }

    pub(super) fn arguments(&mut self, json: &str) {
        match self.0.last_mut() {
            Some(Event::Arguments(last)) => last.push_str(json),
            _ if json.is_empty() => {}
            _ => self.0.push(Event::Arguments(json.to_owned())),
        }
    }
}
