//! Valid requests to start from. A name in braces stands for the last id with this prefix.

use anyhow::Context;
use serde_json::Value;

pub(super) struct Template {
    pub(super) method: String,
    pub(super) path: String,
    /// Whether the body is sent as a form.
    pub(super) form: bool,
    pub(super) body: Value,
}

/// Reads requests, one per line: method, path, and a body if there is one.
pub(super) fn read(text: &str) -> anyhow::Result<Vec<Template>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let mut parts = line.splitn(3, ' ');
            let (method, path) = (parts.next().unwrap_or_default(), parts.next().with_context(|| line.to_owned())?);
            let body = parts.next().map_or(Ok(Value::Null), serde_json::from_str).with_context(|| line.to_owned())?;
            let (method, form) = method.strip_suffix("-FORM").map_or((method, false), |method| (method, true));
            Ok(Template { method: method.into(), path: path.into(), form, body })
        })
        .collect()
}

pub(super) const CLIENTS: &str = include_str!("clients.txt");
pub(super) const OPERATORS: &str = include_str!("operators.txt");
