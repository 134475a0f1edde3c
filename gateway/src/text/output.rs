//! A model's output split into its reasoning, its text and its calls, one character at a time, so that the result cannot depend on how the
//! text was cut into tokens.
//!
//! ```text
//!   text ──► channels, or thought? ──► calls? ──► Event, Event, …
//! ```

use super::{
    TextModel,
    events::{Event, Events},
    harmony::{ChannelSplitter, Channels},
    reasoning::{Thought, ThoughtSplitter},
    tools::{Calls, frame::Frame},
};
use tidemill_proto::block::Token;

/// The parts that a model's output may have besides text.
#[derive(Clone, Debug, Default)]
pub struct OutputRules {
    pub thought: Option<Thought>,
    pub calls: Option<Calls>,
    pub channels: Option<Channels>,
    /// Special tokens whose text is kept, although that of others is not: they are marks.
    pub(super) marks: Vec<(Token, &'static str)>,
}

impl OutputRules {
    pub fn new(model: &TextModel, thought: Option<Thought>, calls: Option<Calls>, channels: Option<Channels>) -> Self {
        let marks = thought.iter().flat_map(Thought::marks).chain(calls.iter().flat_map(Calls::marks));
        let marks = marks.chain(channels.iter().flat_map(Channels::marks));
        let special = |mark| Some((model.tokenizer.special_id_of(mark)?, mark));
        let marks = marks.filter_map(special).collect();
        Self { thought, calls, channels, marks }
    }

    /// The mark that this special token is.
    pub fn mark(&self, token: Token) -> Option<&'static str> {
        self.marks.iter().find(|(id, _)| *id == token).map(|(_, mark)| *mark)
    }

    /// Whether an answer may contain calls.
    pub fn may_call(&self) -> bool {
        self.calls.is_some() || self.channels.is_some()
    }

    pub fn is_plain(&self) -> bool {
        self.thought.is_none() && self.calls.is_none() && self.channels.is_none()
    }
}

/// Splits the output of one choice.
#[derive(Debug)]
pub struct Splitter {
    channels: Option<ChannelSplitter>,
    thought: Option<ThoughtSplitter>,
    calls: Option<Frame>,
}

impl Splitter {
    pub fn new(rules: &OutputRules) -> Self {
        let channels = rules.channels.clone().map(ChannelSplitter::new);
        Self { channels, thought: rules.thought.clone().map(ThoughtSplitter::new), calls: rules.calls.clone().map(Frame::new) }
    }

    /// Whether it is inside reasoning.
    pub fn thinks(&self) -> bool {
        self.thought.as_ref().is_some_and(ThoughtSplitter::thinks) || self.channels.as_ref().is_some_and(ChannelSplitter::thinks)
    }

    /// The bytes at the end of the reasoning so far that may be part of the mark at its end.
    pub fn held_bytes(&self) -> usize {
        let of_thought = self.thought.as_ref().map_or(0, ThoughtSplitter::held_bytes);
        self.channels.as_ref().map_or(of_thought, ChannelSplitter::held_bytes)
    }

    /// Counts the characters that are held back and may be text: the last ones that were pushed.
    pub fn held(&self) -> usize {
        let outer = match (&self.channels, &self.thought) {
            (Some(channels), _) => channels.held(),
            (None, Some(thought)) => thought.held(),
            (None, None) => 0,
        };
        outer + self.calls.as_ref().map_or(0, Frame::held)
    }

    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let mut events = Events::default();
        let mut answer = answer(&mut self.calls);
        for c in text.chars() {
            match (&mut self.channels, &mut self.thought) {
                (Some(channels), _) => channels.step(c, &mut events, &mut answer),
                (None, Some(thought)) => thought.step(c, &mut events, &mut answer),
                (None, None) => answer(c, &mut events),
            }
        }
        events.0
    }

    /// Ends the text. If it was `cut` by its length, it may end within a mark or the beginning of a call.
    pub fn finish(&mut self, cut: bool) -> Vec<Event> {
        let mut events = Events::default();
        if let Some(channels) = &mut self.channels {
            channels.finish(cut, &mut events, &mut answer(&mut self.calls));
        } else if let Some(thought) = &mut self.thought {
            thought.finish(cut, &mut events, &mut answer(&mut self.calls));
        }
        if let Some(frame) = &mut self.calls {
            frame.finish(cut, &mut events);
        }
        events.0
    }
}

/// Handles the output outside reasoning.
fn answer(calls: &mut Option<Frame>) -> impl FnMut(char, &mut Events) {
    move |c, events| match calls {
        Some(frame) => frame.step(c, events),
        None => events.text(c.encode_utf8(&mut [0; 4])),
    }
}
