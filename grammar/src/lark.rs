//! Pieces of llguidance's dialect of Lark.

use tidemill_proto::grammar::Grammar;

/// One of these texts, whole.
pub fn choice<S: AsRef<str>>(texts: &[S]) -> Grammar {
    let texts: Vec<String> = texts.iter().map(|text| literal(text.as_ref())).collect();
    Grammar::Lark(format!("start: {}", texts.join(" | ")).into())
}

/// Text that stands for itself.
pub fn literal(text: &str) -> String {
    // JSON leaves this control character as it is.
    serde_json::to_string(text).expect("text is JSON").replace('\u{7f}', "\\u007f")
}

/// A schema as a part of a rule. It is the text of a [`Grammar::JsonSchema`].
pub fn json(schema: &str) -> String {
    format!("%json {schema}")
}
