//! A call as tags: `<function=f>`, `<parameter=a>` with a value as plain text on lines of its own, `</parameter>`, `</function>`. The
//! tool's schema tells which values are strings; others are JSON.

use super::json::{push_quoted, quote};
use crate::text::{
    events::Events,
    tools::format::{Names, Reader, Step},
};
use serde_json::Value;
use tidemill_grammar::schema::outline::Outline;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// The tag after a call, if the model forgot the function's end.
const CALL_END: &str = "</tool_call>";
/// The maximum length of a call's name.
const NAME_BYTES_MAX: usize = 256;
/// The maximum white space between a parameter's end and the next tag: more is part of a value.
const SPACE_MAX: usize = 64;
/// The maximum length of a value that is read as a whole because it is not a string. Longer ones are strings.
const JSON_BYTES_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct XmlCall {
    names: Names,
    name: String,
    state: State,
    said: bool,
    /// Whether a parameter was written.
    given: bool,
}

#[derive(Debug)]
enum State {
    Function(String),
    FunctionName,
    /// Between parameters, in a part of a tag.
    Between(String),
    ParameterName(String),
    Value(ParameterValue),
}

#[derive(Debug)]
struct ParameterValue {
    name: String,
    /// Whether it is a string, whatever its text; otherwise the text decides when it is complete.
    string: bool,
    /// Whether the value has started: the line break after the tag does not belong to it.
    begun: bool,
    /// Text that may be the value's end.
    held: String,
    /// The whole value, if it may be JSON.
    text: String,
}

impl XmlCall {
    pub(super) fn new(names: &Names) -> Self {
        Self { names: names.clone(), name: String::new(), state: State::Function(String::new()), said: false, given: false }
    }

    fn advance(&mut self, c: char, events: &mut Events) -> Result<State, Step> {
        Ok(match std::mem::replace(&mut self.state, State::FunctionName) {
            State::Function(mut tag) => {
                tag.push(c);
                match tag.as_str() {
                    FUNCTION => State::FunctionName,
                    tag if FUNCTION.starts_with(tag) => State::Function(tag.to_owned()),
                    _ => return Err(Step::refused()),
                }
            }
            State::FunctionName if c == '>' && self.names.allow(&self.name) => {
                self.said = true;
                events.call(&self.name);
                events.arguments("{");
                State::Between(String::new())
            }
            State::FunctionName if is_name(c) && self.name.len() < NAME_BYTES_MAX => {
                self.name.push(c);
                State::FunctionName
            }
            State::FunctionName => return Err(Step::refused()),
            State::Between(tag) if tag.is_empty() && c.is_whitespace() => State::Between(tag),
            State::Between(mut tag) => {
                tag.push(c);
                match tag.as_str() {
                    PARAMETER => State::ParameterName(String::new()),
                    FUNCTION_END => {
                        events.arguments("}");
                        return Err(Step::Done);
                    }
                    text if PARAMETER.starts_with(text) || FUNCTION_END.starts_with(text) => State::Between(tag),
                    _ => {
                        events.arguments("}");
                        tag.pop();
                        return Err(Step::Refused(tag));
                    }
                }
            }
            State::ParameterName(name) if c == '>' && !name.is_empty() => {
                let string = self.names.values(&self.name, &name).is_text();
                let comma = if std::mem::replace(&mut self.given, true) { ", " } else { "" };
                let quote_mark = if string { "\"" } else { "" };
                events.arguments(&format!("{comma}{}: {quote_mark}", quote(&name)));
                State::Value(ParameterValue { name, string, begun: false, held: String::new(), text: String::new() })
            }
            State::ParameterName(mut name) if c != '>' && !c.is_control() && name.len() < NAME_BYTES_MAX => {
                name.push(c);
                State::ParameterName(name)
            }
            State::ParameterName(name) => {
                events.arguments("}");
                return Err(Step::Refused(PARAMETER.to_owned() + &name));
            }
            State::Value(mut value) => match value.step(c, events) {
                None => State::Value(value),
                Some(tag) => {
                    value.end(self.names.values(&self.name, &value.name), events);
                    return after_value(tag, events);
                }
            },
        })
    }
}

/// The state after a value and the tag that follows it.
fn after_value(tag: &'static str, events: &mut Events) -> Result<State, Step> {
    if tag == PARAMETER {
        return Ok(State::ParameterName(String::new()));
    }
    events.arguments("}");
    Err(match tag {
        FUNCTION_END => Step::Done,
        // The last character comes again.
        tag => Step::Refused(tag[..tag.len() - 1].to_owned()),
    })
}

impl Reader for XmlCall {
    fn step(&mut self, c: char, events: &mut Events) -> Step {
        let next = self.advance(c, events);
        Step::into(&mut self.state, next)
    }

    fn said(&self) -> bool {
        self.said
    }

    fn finish(&mut self, events: &mut Events) {
        if let State::Value(value) = &mut self.state {
            value.cut(events);
        }
    }
}

impl ParameterValue {
    /// Takes a character. Returns the tag that follows the value, when it is complete with `c`.
    fn step(&mut self, c: char, events: &mut Events) -> Option<&'static str> {
        if !std::mem::replace(&mut self.begun, true) && c == '\n' {
            return None;
        }
        self.held.push(c);
        loop {
            match following(&self.held) {
                Following::Tag(tag) => return Some(tag),
                Following::Open => return None,
                Following::Other => {
                    let c = self.held.remove(0);
                    self.add(c, events);
                }
            }
        }
    }

    fn add(&mut self, c: char, events: &mut Events) {
        if self.string {
            let mut text = String::new();
            push_quoted(c, &mut text);
            return events.arguments(&text);
        }
        self.text.push(c);
        if self.text.len() > JSON_BYTES_MAX {
            self.string = true;
            let quoted = quote(&std::mem::take(&mut self.text));
            events.arguments(&quoted[..quoted.len() - 1]);
        }
    }

    fn end(&self, values: &Outline, events: &mut Events) {
        match self.string {
            true => events.arguments("\""),
            false => events.arguments(&json(&self.text, values)),
        }
    }

    /// Ends the text: a value that was cut stays open.
    fn cut(&mut self, events: &mut Events) {
        let held = std::mem::take(&mut self.held);
        held.chars().for_each(|c| self.add(c, events));
        events.arguments(&std::mem::take(&mut self.text));
    }
}

enum Following {
    Tag(&'static str),
    /// It may still become a tag.
    Open,
    Other,
}

/// Whether this is a parameter's end followed by a tag. Otherwise the end is part of the value.
fn following(held: &str) -> Following {
    let end = held.strip_prefix('\n').unwrap_or(held);
    let Some(rest) = end.strip_prefix(PARAMETER_END) else {
        return if PARAMETER_END.starts_with(end) { Following::Open } else { Following::Other };
    };
    let tag = rest.trim_start();
    if rest.len() - tag.len() > SPACE_MAX {
        return Following::Other;
    }
    let tags = [PARAMETER, FUNCTION_END, CALL_END];
    match tags.iter().find(|known| **known == tag) {
        Some(known) => Following::Tag(known),
        None if tags.iter().any(|known| known.starts_with(tag)) => Following::Open,
        None => Following::Other,
    }
}

/// The JSON of a value that need not be a string.
fn json(text: &str, values: &Outline) -> String {
    let trimmed = text.trim();
    let python = match trimmed {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Value>(python) {
        // `"a"` is a string with quotes, and `1999` one of digits, where that is what the schema allows.
        Ok(value) if !values.allows_text() || (!value.is_string() && values.allows(&value)) => python.to_owned(),
        _ => quote(text),
    }
}

fn is_name(c: char) -> bool {
    !c.is_whitespace() && !c.is_control() && !matches!(c, '<' | '>' | '"' | '=')
}
