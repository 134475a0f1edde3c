//! The features' part of `/metrics`; `crate::metrics` describes it.

use metrics::{counter, gauge, histogram};
use std::time::Duration;

pub(super) fn count_feedback(model: &str, rating: &'static str) {
    counter!("tidemill_feedback_total", "model" => model.to_owned(), "rating" => rating).increment(1);
}

pub(super) fn note_tool_call(tool: &str, outcome: &'static str, time: Duration) {
    counter!("tidemill_server_tool_calls_total", "tool" => tool.to_owned(), "outcome" => outcome).increment(1);
    histogram!("tidemill_server_tool_seconds").record(time);
}

pub(super) fn show_mcp_server(name: &str, is_up: bool) {
    gauge!("tidemill_mcp_server_up", "server" => name.to_owned()).set(if is_up { 1.0 } else { 0.0 });
}
