//! Qwen3-Coder: tags for the function and each parameter; values are plain text. The outer tags are often left out.
//!
//! ```text
//! <tool_call>
//! <function=f>
//! <parameter=a>
//! 1
//! </parameter>
//! </function>
//! </tool_call>
//! ```

use super::xml_call::XmlCall;
use crate::text::tools::format::{Call, Script, ToolFormat};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "qwen_coder",
    signs: &[&["<function=", "<parameter="]],
    begins: &["<tool_call>"],
    opens: &["<function="],
    bare: None,
    lists: false,
    ends: &["</tool_call>"],
    separators: &[],
    inner: &[],
    again: |_| false,
    reader: |_, names| Box::new(XmlCall::new(names)),
    script: Script { begin: "", join: "\n", end: "", call: Call::Tags { before: "<tool_call>\n", after: "\n</tool_call>" } },
};
