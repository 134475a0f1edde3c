//! Not a model's own format: the form of an answer that must be a call if the chat template teaches no format.
//!
//! ```text
//! {"name": "f", "arguments": {"a": 1}}
//! ```

use super::json_call::JsonCall;
use crate::text::tools::format::{Call, Script, ToolFormat};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "plain",
    signs: &[],
    begins: &[],
    opens: &[],
    bare: Some('{'),
    lists: false,
    ends: &[],
    separators: &[],
    inner: &[],
    again: |c| c == '{',
    reader: |_, names| Box::new(JsonCall::new(names)),
    script: Script {
        begin: "",
        join: "\n",
        end: "",
        call: Call::Around { before: "{\"name\": \"", between: "\", \"arguments\": ", after: "}" },
    },
};
