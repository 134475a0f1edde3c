//! A call in Python's notation: `f(a="x", b=[1, None])`. It is read as a whole, since its arguments must be converted to JSON.

use crate::text::{
    events::Events,
    tools::format::{Names, Reader, Step},
};
use serde_json::{Map, Number, Value};

/// The length from which a call is taken for text.
const CALL_BYTES_MAX: usize = 1 << 20;
const DEPTH_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct PythonCall {
    names: Names,
    text: String,
    depth: usize,
    /// The quotation mark of the string in which `text` ends, and whether the last character escapes the next one.
    string: Option<(char, bool)>,
    said: bool,
}

impl PythonCall {
    pub(super) fn new(names: &Names) -> Self {
        Self { names: names.clone(), text: String::new(), depth: 0, string: None, said: false }
    }
}

impl Reader for PythonCall {
    fn step(&mut self, c: char, events: &mut Events) -> Step {
        if self.text.len() > CALL_BYTES_MAX {
            return Step::refused();
        }
        match &mut self.string {
            Some((_, escaped @ true)) => *escaped = false,
            Some((_, escaped)) if c == '\\' => *escaped = true,
            Some((quote, _)) if *quote == c => self.string = None,
            Some(_) => {}
            // Before the first parenthesis there is only a name.
            None if self.depth == 0 && c != '(' && !is_name(c) => return Step::refused(),
            None => match c {
                '"' | '\'' => self.string = Some((c, false)),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => self.depth -= 1,
                _ => {}
            },
        }
        self.text.push(c);
        if self.depth > 0 || self.string.is_some() || is_name(c) {
            return Step::More;
        }
        match Parser(&self.text).call() {
            Some((name, arguments)) if self.names.allow(name) => {
                self.said = true;
                events.call(name);
                events.arguments(&Value::Object(arguments).to_string());
                Step::Done
            }
            _ => Step::refused(),
        }
    }

    fn said(&self) -> bool {
        self.said
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// The rest of the text. Every function returns `None` if it is not a call.
struct Parser<'a>(&'a str);

impl<'a> Parser<'a> {
    fn call(&mut self) -> Option<(&'a str, Map<String, Value>)> {
        let name = self.word();
        let mut arguments = Map::new();
        self.expect('(')?;
        while !self.take(')') {
            let key = self.word().to_owned();
            self.expect('=')?;
            let value = self.value(0)?;
            arguments.insert(Some(key).filter(|key| !key.is_empty())?, value);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        self.0.is_empty().then_some((name, arguments))
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.space();
        match self.0.chars().next()? {
            '"' | '\'' => self.string().map(Value::String),
            '[' => self.sequence('[', ']', depth),
            '(' => self.sequence('(', ')', depth),
            '{' => self.dictionary(depth),
            '-' | '+' | '.' | '0'..='9' => self.number(),
            _ => match self.word() {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn sequence(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.expect(open)?;
        let mut values = Vec::new();
        while !self.take(close) {
            values.push(self.value(depth + 1)?);
            if !self.take(',') {
                self.expect(close)?;
                break;
            }
        }
        Some(Value::Array(values))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        self.expect('{')?;
        let mut fields = Map::new();
        while !self.take('}') {
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                Value::Number(key) => key.to_string(),
                _ => return None,
            };
            self.expect(':')?;
            fields.insert(key, self.value(depth + 1)?);
            if !self.take(',') {
                self.expect('}')?;
                break;
            }
        }
        Some(Value::Object(fields))
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.0.chars().next()?;
        let mut chars = self.0[1..].chars();
        let mut text = String::new();
        loop {
            match chars.next()? {
                c if c == quote => break,
                '\\' => match chars.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    '0' => text.push('\0'),
                    c @ ('\\' | '\'' | '"') => text.push(c),
                    '\n' => {}
                    'x' => text.push(code_point(&mut chars, 2)?),
                    'u' => text.push(utf16(&mut chars)?),
                    'U' => text.push(code_point(&mut chars, 8)?),
                    c => text.extend(['\\', c]),
                },
                c => text.push(c),
            }
        }
        self.0 = chars.as_str();
        Some(text)
    }

    fn number(&mut self) -> Option<Value> {
        let number = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.' | '_');
        let length = self.0.find(|c| !number(c)).unwrap_or(self.0.len());
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        let text = text.replace('_', "");
        let text = text.strip_prefix('+').unwrap_or(&text);
        if text == "-0" {
            return Some(0.into());
        }
        if let Ok(number) = serde_json::from_str::<Number>(text) {
            return Some(Value::Number(number));
        }
        // `1.` and `.5` are numbers in Python only.
        text.parse().ok().and_then(Number::from_f64).map(Value::Number)
    }

    fn word(&mut self) -> &'a str {
        self.space();
        let length = self.0.find(|c| !is_name(c)).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(length);
        self.0 = rest;
        word
    }

    fn space(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn take(&mut self, c: char) -> bool {
        self.space();
        let rest = self.0.strip_prefix(c);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, c: char) -> Option<()> {
        self.take(c).then_some(())
    }
}

/// Reads the digits after `\u`. As in JSON, two escapes may form one character.
fn utf16(chars: &mut std::str::Chars) -> Option<char> {
    let mut next = || {
        let (hex, rest) = chars.as_str().split_at_checked(4)?;
        let code = u16::from_str_radix(hex, 16).ok()?;
        *chars = rest.chars();
        Some(code)
    };
    let first = next()?;
    if !matches!(first, 0xD800..0xDC00) {
        return Some(char::from_u32(first.into()).unwrap_or(char::REPLACEMENT_CHARACTER));
    }
    let second = chars.as_str().strip_prefix("\\u").and_then(|rest| u16::from_str_radix(rest.get(..4)?, 16).ok());
    let pair = char::decode_utf16([first, second.unwrap_or(0)]).next()?.ok();
    if pair.is_some() {
        *chars = chars.as_str()[6..].chars();
    }
    Some(pair.unwrap_or(char::REPLACEMENT_CHARACTER))
}

fn code_point(chars: &mut std::str::Chars, digits: usize) -> Option<char> {
    let (hex, rest) = chars.as_str().split_at_checked(digits)?;
    let c = u32::from_str_radix(hex, 16).ok().and_then(char::from_u32)?;
    *chars = rest.chars();
    Some(c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn python_literals_become_json() {
        for (python, expected) in [
            ("f()", json!({})),
            ("f(a=-0)", json!({"a": 0})),
            ("f( a = 1 , b=-2.5, c=1e3, d=.5, e=1_000, )", json!({"a": 1, "b": -2.5, "c": 1e3, "d": 0.5, "e": 1000})),
            ("f(a='it\\'s', b=\"x)\\n\\u00e9\", c='')", json!({"a": "it's", "b": "x)\né", "c": ""})),
            ("f(a='\\ud83c\\udf0a', b='\\ud83cx', c='\\b\\f')", json!({"a": "🌊", "b": "\u{fffd}x", "c": "\u{8}\u{c}"})),
            (
                "f(a=[True, None, [], (1, 2)], b={'k': {\"n\": False}, 3: 4})",
                json!({"a": [true, null, [], [1, 2]], "b": {"k": {"n": false}, "3": 4}}),
            ),
        ] {
            let (name, arguments) = Parser(python).call().unwrap();
            assert_eq!((name, Value::Object(arguments)), ("f", expected), "{python}");
        }
        for wrong in ["f(1)", "f(a=)", "f(a=b)", "f(a=1 b=2)", "f(a='x)", "f(a=1).g()", "f(a=0x)"] {
            assert!(Parser(wrong).call().is_none(), "{wrong}");
        }
        let deep = format!("f(a={})", "[".repeat(100_000));
        assert!(Parser(&deep).call().is_none());
    }
}
