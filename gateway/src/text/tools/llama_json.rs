//! Llama 3.x: a JSON object as the whole answer, or after `<|python_tag|>`; several with semicolons between them.
//!
//! ```text
//! {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
//! ```

use super::json_call::JsonCall;
use crate::text::tools::format::{Call, Script, ToolFormat};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "llama_json",
    signs: &[&["<|python_tag|>"], &["\"parameters\": dictionary"]],
    begins: &["<|python_tag|>"],
    opens: &[],
    bare: Some('{'),
    lists: false,
    ends: &[],
    separators: &[';', ','],
    inner: &[],
    again: |c| c == '{',
    reader: |_, names| Box::new(JsonCall::new(names)),
    script: Script {
        begin: "",
        join: "; ",
        end: "",
        call: Call::Around { before: "{\"name\": \"", between: "\", \"parameters\": ", after: "}" },
    },
};
