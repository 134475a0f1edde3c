//! Pieces of llguidance's dialect of Lark.

use crate::compiler::whole;
use llguidance::regex_to_lark;
use tidemill_proto::grammar::Grammar;

/// A grammar for one of these texts as a whole.
pub fn choice<S: AsRef<str>>(texts: &[S]) -> Grammar {
    let texts: Vec<String> = texts.iter().map(|text| literal(text.as_ref())).collect();
    Grammar::Lark(format!("start: {}", texts.join(" | ")).into())
}

/// Text that matches itself.
pub fn literal(text: &str) -> String {
    // JSON does not escape this control character.
    serde_json::to_string(text).expect("text is JSON").replace('\u{7f}', "\\u007f")
}

/// Any grammar as a part of a rule, such as the answer after a thought: `start: thought %json {…}`.
pub fn part(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => format!("%json {schema}"),
        Grammar::Regex(expression) => format!("/{}/", regex_to_lark(whole(expression), "")),
        Grammar::Lark(grammar) => format!("%lark {{\n{grammar}\n}}"),
    }
}
