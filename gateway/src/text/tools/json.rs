//! A JSON value as a model writes it, one character at a time. The most common mistakes of models are corrected on the way: line breaks and
//! other control characters inside strings, escapes that JSON does not know, Python's names of constants.

/// Follows an object, a list, or a string to its end.
#[derive(Debug, Default)]
pub(super) struct JsonTracker {
    depth: usize,
    string: Option<Escape>,
    /// The letters so far of a word outside strings.
    word: String,
}

/// The place within a string: in an escape or not.
#[derive(Debug, PartialEq, Eq)]
enum Escape {
    None,
    /// After a backslash.
    Begun,
    /// After `\u`: its digits so far.
    Unicode(String),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tracked {
    Inside,
    /// The value ended with this character.
    Ended,
    /// The character belongs to the following text: it is not valid JSON here.
    Foreign,
}

impl JsonTracker {
    /// Writes what the character adds to the value's text.
    pub(super) fn step(&mut self, c: char, out: &mut String) -> Tracked {
        if let Some(escape) = &mut self.string {
            if in_string(escape, c, out) {
                self.string = None;
                return if self.depth == 0 { Tracked::Ended } else { Tracked::Inside };
            }
            return Tracked::Inside;
        }
        if c.is_ascii_alphabetic() {
            self.word.push(c);
            return Tracked::Inside;
        }
        self.finish(out);
        match c {
            '<' => return Tracked::Foreign,
            '"' => self.string = Some(Escape::None),
            '{' | '[' => self.depth += 1,
            '}' | ']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        out.push(c);
        if matches!(c, '}' | ']') && self.depth == 0 { Tracked::Ended } else { Tracked::Inside }
    }

    /// Ends a word outside strings, and writes it: Python's constants as JSON's.
    pub(super) fn finish(&mut self, out: &mut String) {
        if self.string.is_none() {
            out.push_str(match self.word.as_str() {
                "True" => "true",
                "False" => "false",
                "None" => "null",
                word => word,
            });
            self.word.clear();
        }
    }
}

/// Writes a character of a string. Returns whether it ended the string.
fn in_string(escape: &mut Escape, c: char, out: &mut String) -> bool {
    match escape {
        Escape::None => match c {
            '"' => {
                out.push(c);
                return true;
            }
            '\\' => *escape = Escape::Begun,
            c => push_escaped(c, out),
        },
        Escape::Begun => {
            *escape = Escape::None;
            match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => out.extend(['\\', c]),
                'u' => *escape = Escape::Unicode(String::new()),
                '\'' => out.push('\''),
                c => {
                    out.push_str(r"\\");
                    push_escaped(c, out);
                }
            }
        }
        Escape::Unicode(digits) if c.is_ascii_hexdigit() => {
            digits.push(c);
            if digits.len() == 4 {
                out.push_str(r"\u");
                out.push_str(digits);
                *escape = Escape::None;
            }
        }
        Escape::Unicode(digits) => {
            out.push_str(r"\\u");
            out.push_str(digits);
            *escape = Escape::None;
            return in_string(escape, c, out);
        }
    }
    false
}

/// Writes a character of a JSON string, which needs an escape only if it is a control character.
fn push_escaped(c: char, out: &mut String) {
    match c {
        '\n' => out.push_str(r"\n"),
        '\r' => out.push_str(r"\r"),
        '\t' => out.push_str(r"\t"),
        c if c < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => out.push(c),
    }
}

/// Writes a character of plain text into a JSON string.
pub(super) fn push_quoted(c: char, out: &mut String) {
    match c {
        '"' | '\\' => out.extend(['\\', c]),
        c => push_escaped(c, out),
    }
}

/// Returns plain text as a JSON string.
pub(super) fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    text.chars().for_each(|c| push_quoted(c, &mut out));
    out + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the value's text, and the rest.
    fn track(text: &str) -> (String, &str) {
        let (mut tracker, mut out) = (JsonTracker::default(), String::new());
        for (at, c) in text.char_indices() {
            match tracker.step(c, &mut out) {
                Tracked::Inside => {}
                Tracked::Ended => return (out, &text[at + c.len_utf8()..]),
                Tracked::Foreign => return (out, &text[at..]),
            }
        }
        tracker.finish(&mut out);
        (out, "")
    }

    #[test]
    fn a_value_ends_with_its_last_bracket() {
        let same = |text: &'static str, rest| assert_eq!(track(&(text.to_owned() + rest)), (text.to_owned(), rest));
        same(r#"{"a": [1, {"}": "]\"}"}], "b": {}}"#, "} x");
        same(r#""a \\""#, "\"");
        same(r#"[[], [-1.5e3, true, null]]"#, "]");
        same(r#"{"é\u00e9": "🌊</tool_call>"}"#, "");
    }

    #[test]
    fn common_mistakes_are_set_right() {
        assert_eq!(track("{\"a\": \"x\ny\u{1}\"}").0, r#"{"a": "x\ny\u0001"}"#);
        assert_eq!(track(r#"{"a": "it\'s \d \u12 \u00e"}"#).0, r#"{"a": "it's \\d \\u12 \\u00e"}"#);
        assert_eq!(track(r#"{"a": True, "b": [None, False]}"#).0, r#"{"a": true, "b": [null, false]}"#);
        for text in [r#"{"a": "\d"}"#, r#"{"a": "\u1"}"#, "{\"a\": \"\t\"}", r#"[True]"#] {
            assert!(serde_json::from_str::<serde_json::Value>(&track(text).0).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_mark_outside_strings_ends_what_was_not_closed() {
        assert_eq!(track("{\"a\": {\"b\": 1}\n</tool_call>"), ("{\"a\": {\"b\": 1}\n".to_owned(), "</tool_call>"));
    }

    #[test]
    fn text_is_quoted_as_json() {
        for text in ["", "a\"b\\c", "é\n\t\u{7f}\u{0}🌊"] {
            assert_eq!(serde_json::from_str::<String>(&quote(text)).unwrap(), text);
        }
    }
}
