//! Answers in channels, as GPT-OSS gives them (OpenAI's harmony format): a sequence of messages, each with a header that names its channel,
//! and for a call its tool.
//!
//! ```text
//! <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>the text<|return|>
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"its": "arguments"}<|call|>
//! ```
//!
//! Text without a header is part of the answer: a grammar may have forced it.

use super::{events::Events, marker::MarkerWatch, reasoning::is_begun, template::ChatTemplate, tool::Tool};
use std::sync::Arc;

pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const END: &str = "<|end|>";
pub(super) const CALL: &str = "<|call|>";
pub(super) const RETURN: &str = "<|return|>";
/// The channel of thoughts.
pub(super) const THOUGHTS: &str = "analysis";
/// The text before the name of a call's tool.
const RECIPIENT: &str = "to=";
const FUNCTIONS: &str = "to=functions.";
/// The beginnings of a header; that of the first message follows the prompt's `<|start|>assistant`.
const BEGINNINGS: [&str; 3] = [CHANNEL, RECIPIENT, START];
/// The maximum length of a header.
const HEADER_BYTES_MAX: usize = 512;

/// The rules for reading a model's channels.
#[derive(Clone, Debug)]
pub struct Channels {
    /// Messages to one of these are calls; to others, they are text.
    tools: Arc<[Tool]>,
}

impl Channels {
    /// The channels of answers to a prompt with these tools; `None` for a model without channels.
    pub fn of(template: &ChatTemplate, tools: &[Tool]) -> Option<Self> {
        (template.mentions(CHANNEL) && template.mentions(MESSAGE)).then(|| Self { tools: tools.into() })
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> {
        [START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN].into_iter()
    }
}

/// Splits an answer's channels.
#[derive(Debug)]
pub(super) struct ChannelSplitter {
    channels: Channels,
    end: MarkerWatch,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The header so far, or the text before one.
    Header(String),
    Body(Body),
    /// Text without a header.
    Plain,
}

/// The contents of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Body {
    Thought,
    Text,
    Arguments,
}

impl ChannelSplitter {
    pub(super) fn new(channels: Channels) -> Self {
        let end = MarkerWatch::new([START, CHANNEL, END, CALL, RETURN]);
        Self { channels, end, state: State::Header(String::new()) }
    }

    pub(super) fn thinks(&self) -> bool {
        matches!(self.state, State::Body(Body::Thought))
    }

    pub(super) fn held_bytes(&self) -> usize {
        if self.thinks() { self.end.held_bytes() } else { 0 }
    }

    /// Counts the characters that are held back and may be text.
    pub(super) fn held(&self) -> usize {
        match &self.state {
            State::Header(header) => header.chars().count(),
            State::Body(Body::Text) => self.end.held(),
            State::Body(Body::Thought | Body::Arguments) | State::Plain => 0,
        }
    }

    /// Takes a character. `answer` gets the text.
    pub(super) fn step(&mut self, c: char, events: &mut Events, answer: &mut impl FnMut(char, &mut Events)) {
        match &mut self.state {
            State::Plain => answer(c, events),
            State::Header(header) => {
                header.push(c);
                if header.ends_with(MESSAGE) {
                    let body = self.channels.body(header, events);
                    self.state = State::Body(body);
                } else if !may_be_header(header) {
                    let words = std::mem::take(header);
                    self.state = State::Plain;
                    words.chars().for_each(|c| answer(c, events));
                }
            }
            State::Body(body) => {
                let body = *body;
                match self.end.step(c, |c| pass(body, c, events, answer)) {
                    None => {}
                    Some(mark @ (START | CHANNEL)) => self.state = State::Header(mark.to_owned()),
                    Some(_) => self.state = State::Header(String::new()),
                }
            }
        }
    }

    /// Ends the text. If it was `cut`, it may end within a mark or a header.
    pub(super) fn finish(&mut self, cut: bool, events: &mut Events, answer: &mut impl FnMut(char, &mut Events)) {
        match &mut self.state {
            State::Plain => {}
            State::Header(header) if cut || header.trim().is_empty() => {}
            State::Header(header) => header.chars().for_each(|c| answer(c, events)),
            State::Body(body) => {
                let body = *body;
                let held = self.end.finish();
                if !(cut && is_begun(&held)) {
                    held.chars().for_each(|c| pass(body, c, events, answer));
                }
            }
        }
    }
}

impl Channels {
    /// The contents that a header announces. A call starts with it.
    fn body(&self, header: &str, events: &mut Events) -> Body {
        let word_after = |mark: &str| {
            let (_, rest) = header.split_once(mark)?;
            rest.split(|c: char| c.is_whitespace() || c == '<').next()
        };
        let tool = word_after(FUNCTIONS).filter(|name| self.tools.iter().any(|tool| tool.name == *name));
        match (tool, word_after(CHANNEL)) {
            (Some(name), _) => {
                events.call(name);
                Body::Arguments
            }
            (None, Some(THOUGHTS)) => Body::Thought,
            (None, _) => Body::Text,
        }
    }
}

fn pass(body: Body, c: char, events: &mut Events, answer: &mut impl FnMut(char, &mut Events)) {
    let mut bytes = [0; 4];
    match body {
        Body::Thought => events.thought(c.encode_utf8(&mut bytes)),
        Body::Text => answer(c, events),
        Body::Arguments => events.arguments(c.encode_utf8(&mut bytes)),
    }
}

fn may_be_header(words: &str) -> bool {
    let begun = words.trim_start();
    words.len() <= HEADER_BYTES_MAX && BEGINNINGS.iter().any(|beginning| beginning.starts_with(begun) || begun.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{
        config::ModelConfig,
        events::Event,
        output::{OutputRules, Splitter},
    };

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source.into(), &ModelConfig::default()).unwrap()
    }

    fn rules() -> OutputRules {
        let tools = [Tool { name: "weather".into(), ..Tool::default() }];
        let channels = Channels::of(&template("<|start|>assistant<|channel|>final<|message|>"), &tools);
        OutputRules { channels: Some(channels.unwrap()), ..OutputRules::default() }
    }

    fn split(text: &str, cut: bool) -> Vec<Event> {
        let mut whole = Splitter::new(&rules());
        let mut events = whole.push(text);
        events.extend(whole.finish(cut));
        let mut by_characters = Splitter::new(&rules());
        let mut pieces: Vec<Event> = text.chars().flat_map(|c| by_characters.push(c.encode_utf8(&mut [0; 4]))).collect();
        pieces.extend(by_characters.finish(cut));
        assert_eq!(joined(pieces), joined(events.clone()), "however {text:?} is cut");
        joined(events)
    }

    /// Merges consecutive events of a kind.
    fn joined(events: Vec<Event>) -> Vec<Event> {
        let mut all = Events::default();
        for event in events {
            match event {
                Event::Thought(words) => all.thought(&words),
                Event::Text(words) => all.text(&words),
                Event::Call(name) => all.call(&name),
                Event::Arguments(json) => all.arguments(&json),
            }
        }
        all.0
    }

    fn thought(words: &str) -> Event {
        Event::Thought(words.into())
    }

    fn text(words: &str) -> Event {
        Event::Text(words.into())
    }

    #[test]
    fn channels_become_thoughts_and_text() {
        let answer = "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>!<|return|>";
        assert_eq!(split(answer, false), [thought("They greet."), text("Hello <b>!")]);
        let preamble = "<|channel|>commentary<|message|>I shall look.<|end|>\n<|start|>assistant<|channel|>final<|message|>Done.";
        assert_eq!(split(preamble, false), [text("I shall look.Done.")]);
        assert_eq!(split("<|channel|>final<|message|>a<|channel|>analysis<|message|>b", false), [text("a"), thought("b")]);
    }

    #[test]
    fn a_message_to_a_tool_is_a_call() {
        let call = |name: &str, json: &str| [Event::Call(name.into()), Event::Arguments(json.into())];
        let json = r#"{"city": "Oslo"}"#;
        for header in [
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.weather<|message|>",
            " to=functions.weather<|channel|>commentary json<|message|>",
        ] {
            assert_eq!(split(&format!("{header}{json}<|call|>"), false), call("weather", json), "{header}");
        }
        let other = "<|channel|>commentary to=functions.other<|message|>{}<|call|>";
        assert_eq!(split(other, false), [text("{}")], "a tool that there is not");
        let both =
            format!("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{json}");
        assert_eq!(split(&both, false), [vec![thought("x")], call("weather", json).to_vec()].concat());
    }

    #[test]
    fn words_without_a_header_are_text() {
        for words in ["{\"a\": 1}", "Hello <|end|>", "<|mess", "tomorrow", "  to be or not"] {
            assert_eq!(split(words, false), [text(words)], "{words:?}");
        }
        let long = format!("<|channel|>{}", "x".repeat(HEADER_BYTES_MAX));
        assert_eq!(split(&long, false), [text(&long)]);
        assert_eq!(split("", false), []);
    }

    #[test]
    fn a_mark_or_header_that_was_cut_is_nothing() {
        assert_eq!(split("<|channel|>analy", true), []);
        assert_eq!(split("<|channel|>final<|message|>a<|ret", true), [text("a")]);
        assert_eq!(split("<|channel|>final<|message|>a<", true), [text("a<")], "that may be anything");
    }

    #[test]
    fn templates_without_channels_have_none() {
        assert!(Channels::of(&template("<|channel|>"), &[]).is_none());
        assert!(Channels::of(&template("<think></think>"), &[]).is_none());
    }
}
