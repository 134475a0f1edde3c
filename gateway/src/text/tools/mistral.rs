//! Mistral: after its mark a JSON list of calls (tokenizers up to v7), or name and arguments (v11 and later), with a mark per call. Both
//! are accepted after any mark.
//!
//! ```text
//! [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
//! [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}
//! ```

use super::{json_call::JsonCall, named_call::NamedCall};
use crate::text::tools::format::{Call, Names, Reader, Script, ToolFormat};

pub(super) const LIST: ToolFormat = ToolFormat {
    name: "mistral_list",
    signs: &[&["[TOOL_CALLS]"]],
    begins: &["[TOOL_CALLS]"],
    opens: &[],
    bare: None,
    lists: true,
    ends: &[],
    separators: &[','],
    inner: &["[ARGS]", "[CALL_ID]"],
    again: |c| c == '{',
    reader,
    script: Script {
        begin: "[TOOL_CALLS][",
        join: ", ",
        end: "]",
        call: Call::Around { before: "{\"name\": \"", between: "\", \"arguments\": ", after: "}" },
    },
};

pub(super) const NAMED: ToolFormat = ToolFormat {
    name: "mistral",
    signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
    script: Script { begin: "", join: "", end: "", call: Call::Around { before: "[TOOL_CALLS]", between: "[ARGS]", after: "" } },
    ..LIST
};

fn reader(first: char, names: &Names) -> Box<dyn Reader> {
    match first {
        '{' => Box::new(JsonCall::new(names)),
        _ => Box::new(NamedCall::new(names)),
    }
}
