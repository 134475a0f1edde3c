//! A call as a JSON object: `{"name": "f", "arguments": {…}}`, with keys in any order and possibly others.

use super::json::{JsonTracker, Tracked};
use crate::text::{
    events::Events,
    tools::format::{Names, Reader, Step},
};

/// Keys that hold the arguments; the second is Llama's.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
/// The maximum length of a name, or of a name and other keys together.
const KEY_BYTES_MAX: usize = 1024;
/// The maximum length of arguments that are held back because they come before the name.
const HELD_BYTES_MAX: usize = 1 << 16;

#[derive(Debug)]
pub(super) struct JsonCall {
    names: Names,
    state: State,
    name: Option<String>,
    said: bool,
    /// Whether some arguments have come.
    given: bool,
    /// Arguments that came before the name.
    held: String,
}

#[derive(Debug)]
enum State {
    Open,
    /// At a key, or the end.
    Key,
    KeyString(JsonTracker, String),
    Colon(String),
    Value(String),
    Name(JsonTracker, String),
    /// After the brace that opens the arguments and following white space: it is still unclear whether they are an object.
    Brace(String),
    Arguments(JsonTracker),
    /// Arguments as JSON in a string.
    Quoted(JsonTracker, String),
    Null(String),
    Skipped(JsonTracker),
    SkippedWord,
    /// After a value.
    Comma,
}

impl JsonCall {
    pub(super) fn new(names: &Names) -> Self {
        Self { names: names.clone(), state: State::Open, name: None, said: false, given: false, held: String::new() }
    }

    /// Emits the next characters of the arguments.
    fn arguments(&mut self, json: &str, events: &mut Events) {
        if self.said {
            events.arguments(json);
        } else {
            self.held.push_str(json);
        }
    }

    /// Emits the name, if it is known and the arguments have started.
    fn say(&mut self, events: &mut Events) {
        if let (false, true, Some(name)) = (self.said, self.given, &self.name) {
            self.said = true;
            events.call(name);
            events.arguments(&std::mem::take(&mut self.held));
        }
    }

    fn end(&mut self, events: &mut Events) -> Step {
        if self.name.is_none() {
            return Step::refused();
        }
        if !self.given {
            self.given = true;
            self.say(events);
            self.arguments("{}", events);
        }
        Step::Done
    }

    fn value(&mut self, key: &str, c: char) -> Result<State, Step> {
        let mut text = String::new();
        let mut tracker = JsonTracker::default();
        match (key, c) {
            ("name", '"') if self.name.is_none() => {
                tracker.step(c, &mut text);
                Ok(State::Name(tracker, text))
            }
            ("name", _) if self.name.is_none() => Err(Step::refused()),
            (key, c) if ARGUMENTS.contains(&key) && !self.given => match c {
                '{' => Ok(State::Brace("{".into())),
                '"' => {
                    tracker.step(c, &mut text);
                    Ok(State::Quoted(tracker, text))
                }
                'n' | 'N' => Ok(State::Null(c.to_ascii_lowercase().into())),
                _ => Err(Step::refused()),
            },
            (_, '"' | '{' | '[') => {
                tracker.step(c, &mut text);
                Ok(State::Skipped(tracker))
            }
            (_, c) if c.is_ascii_alphanumeric() || c == '-' => Ok(State::SkippedWord),
            _ => Err(Step::refused()),
        }
    }

    fn advance(&mut self, c: char, events: &mut Events) -> Result<State, Step> {
        let mut text = String::new();
        Ok(match std::mem::replace(&mut self.state, State::Comma) {
            State::Open if c == '{' => State::Key,
            State::Key if c == '"' => {
                let mut tracker = JsonTracker::default();
                tracker.step(c, &mut text);
                State::KeyString(tracker, text)
            }
            State::Key | State::Comma if c == '}' => return Err(self.end(events)),
            state @ (State::Key | State::Colon(_) | State::Value(_) | State::Comma) if c.is_whitespace() => state,
            State::KeyString(mut tracker, mut key) => match tracker.step(c, &mut key) {
                Tracked::Ended => State::Colon(unquoted(&key)?),
                _ if key.len() > KEY_BYTES_MAX => return Err(Step::refused()),
                _ => State::KeyString(tracker, key),
            },
            State::Colon(key) if c == ':' => State::Value(key),
            State::Value(key) => self.value(&key, c)?,
            State::Name(mut tracker, mut name) => match tracker.step(c, &mut name) {
                Tracked::Ended => {
                    let name = unquoted(&name)?;
                    if !self.names.allow(&name) {
                        return Err(Step::refused());
                    }
                    self.name = Some(name);
                    self.say(events);
                    State::Comma
                }
                _ if name.len() > KEY_BYTES_MAX => return Err(Step::refused()),
                _ => State::Name(tracker, name),
            },
            State::Brace(mut begun) if c.is_whitespace() && begun.len() < KEY_BYTES_MAX => {
                begun.push(c);
                State::Brace(begun)
            }
            State::Brace(begun) if matches!(c, '"' | '}') => {
                self.given = true;
                self.say(events);
                let mut tracker = JsonTracker::default();
                let ended = begun.chars().chain([c]).map(|c| tracker.step(c, &mut text)).last() == Some(Tracked::Ended);
                self.arguments(&text, events);
                if ended { State::Comma } else { State::Arguments(tracker) }
            }
            State::Arguments(mut tracker) => {
                let tracked = tracker.step(c, &mut text);
                self.arguments(&text, events);
                match tracked {
                    Tracked::Inside if self.held.len() > HELD_BYTES_MAX => return Err(Step::refused()),
                    Tracked::Inside => State::Arguments(tracker),
                    Tracked::Ended => State::Comma,
                    Tracked::Foreign => return Err(Step::refused()),
                }
            }
            State::Quoted(mut tracker, mut json) => match tracker.step(c, &mut json) {
                Tracked::Ended => {
                    let json = unquoted(&json)?;
                    self.given = true;
                    self.say(events);
                    self.arguments(if json.trim().is_empty() { "{}" } else { &json }, events);
                    State::Comma
                }
                _ if json.len() > HELD_BYTES_MAX => return Err(Step::refused()),
                _ => State::Quoted(tracker, json),
            },
            State::Null(mut word) => {
                word.push(c);
                match word.as_str() {
                    "null" | "none" => {
                        self.given = true;
                        self.say(events);
                        self.arguments("{}", events);
                        State::Comma
                    }
                    word if "null".starts_with(word) || "none".starts_with(word) => State::Null(word.to_owned()),
                    _ => return Err(Step::refused()),
                }
            }
            State::Skipped(mut tracker) => match tracker.step(c, &mut text) {
                Tracked::Inside => State::Skipped(tracker),
                Tracked::Ended => State::Comma,
                Tracked::Foreign => return Err(Step::refused()),
            },
            State::SkippedWord if c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.') => State::SkippedWord,
            State::SkippedWord => return self.advance(c, events),
            State::Comma if c == ',' => State::Key,
            State::Open | State::Key | State::Colon(_) | State::Brace(_) | State::Comma => return Err(Step::refused()),
        })
    }
}

impl Reader for JsonCall {
    fn step(&mut self, c: char, events: &mut Events) -> Step {
        let next = self.advance(c, events);
        Step::into(&mut self.state, next)
    }

    fn said(&self) -> bool {
        self.said
    }

    fn finish(&mut self, events: &mut Events) {
        if let State::Arguments(tracker) = &mut self.state {
            let mut text = String::new();
            tracker.finish(&mut text);
            events.arguments(&text);
        }
    }
}

fn unquoted(json: &str) -> Result<String, Step> {
    serde_json::from_str(json).map_err(|_| Step::refused())
}
