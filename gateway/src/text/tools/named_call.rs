//! A call as its name, then its arguments as a JSON object: `f[ARGS]{…}`, `f[CALL_ID]x[ARGS]{…}`, or `f{…}`.

use super::json::{JsonTracker, Tracked};
use crate::text::{
    events::Events,
    tools::format::{Names, Reader, Step},
};

const ARGUMENTS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";
/// The maximum length of a call's name.
const NAME_BYTES_MAX: usize = 256;

#[derive(Debug)]
pub(super) struct NamedCall {
    names: Names,
    state: State,
    name: String,
    said: bool,
}

#[derive(Debug)]
enum State {
    Name,
    /// In a mark, with its text so far.
    Mark(String),
    /// The model's own id of the call, which is only needed by prompt templates: everything up to the next mark.
    CallId(usize),
    /// White space before the arguments.
    Space,
    Brace(String),
    Arguments(JsonTracker),
}

impl NamedCall {
    pub(super) fn new(names: &Names) -> Self {
        Self { names: names.clone(), state: State::Name, name: String::new(), said: false }
    }

    fn advance(&mut self, c: char, events: &mut Events) -> Result<State, Step> {
        let mut text = String::new();
        Ok(match std::mem::replace(&mut self.state, State::Space) {
            State::Name | State::Space if c == '{' && self.names.allow(&self.name) => State::Brace("{".into()),
            State::Name if c == '[' && self.names.allow(&self.name) => State::Mark("[".into()),
            State::Name if c.is_whitespace() => State::Space,
            State::Name if is_name(c) && self.name.len() < NAME_BYTES_MAX => {
                self.name.push(c);
                State::Name
            }
            State::Space if c.is_whitespace() => State::Space,
            State::Space if c == '[' => State::Mark("[".into()),
            State::Mark(mut mark) => {
                mark.push(c);
                match mark.as_str() {
                    ARGUMENTS => State::Space,
                    CALL_ID => State::CallId(0),
                    mark if ARGUMENTS.starts_with(mark) || CALL_ID.starts_with(mark) => State::Mark(mark.to_owned()),
                    _ => return Err(Step::refused()),
                }
            }
            State::CallId(_) if c == '[' => State::Mark("[".into()),
            State::CallId(bytes) if is_name(c) && bytes < NAME_BYTES_MAX => State::CallId(bytes + c.len_utf8()),
            State::Brace(mut begun) if c.is_whitespace() && begun.len() < NAME_BYTES_MAX => {
                begun.push(c);
                State::Brace(begun)
            }
            State::Brace(begun) if matches!(c, '"' | '}') => {
                self.said = true;
                events.call(&self.name);
                let mut tracker = JsonTracker::default();
                let ended = begun.chars().chain([c]).map(|c| tracker.step(c, &mut text)).last() == Some(Tracked::Ended);
                events.arguments(&text);
                if ended {
                    return Err(Step::Done);
                }
                State::Arguments(tracker)
            }
            State::Arguments(mut tracker) => {
                let tracked = tracker.step(c, &mut text);
                events.arguments(&text);
                match tracked {
                    Tracked::Inside => State::Arguments(tracker),
                    Tracked::Ended => return Err(Step::Done),
                    Tracked::Foreign => return Err(Step::refused()),
                }
            }
            State::Name | State::CallId(_) | State::Space | State::Brace(_) => return Err(Step::refused()),
        })
    }
}

impl Reader for NamedCall {
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

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/')
}
