//! Hermes, Qwen 2.5, Qwen 3, and many after them: a JSON object between tags, one pair of tags per call.
//!
//! ```text
//! <tool_call>
//! {"name": "f", "arguments": {"a": 1}}
//! </tool_call>
//! ```

use super::json_call::JsonCall;
use crate::text::tools::format::{Call, Script, ToolFormat};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "hermes",
    signs: &[&["<tool_call>", "</tool_call>"]],
    begins: &["<tool_call>"],
    opens: &[],
    bare: None,
    lists: false,
    ends: &["</tool_call>"],
    separators: &[],
    inner: &[],
    again: |c| c == '{',
    reader: |_, names| Box::new(JsonCall::new(names)),
    script: Script {
        begin: "",
        join: "\n",
        end: "",
        call: Call::Around { before: "<tool_call>\n{\"name\": \"", between: "\", \"arguments\": ", after: "}\n</tool_call>" },
    },
};
