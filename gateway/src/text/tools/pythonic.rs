//! Llama 4, and Llama 3.2 if asked to: a list of calls in Python's notation, as the whole answer or between marks.
//!
//! ```text
//! [f(a=1, b="x"), g()]
//! ```

use super::python_call::PythonCall;
use crate::text::tools::format::{Call, Script, ToolFormat};

pub(super) const FORMAT: ToolFormat = ToolFormat {
    name: "pythonic",
    signs: &[&["<|python_start|>"], &["[func_name1("], &["[func_name("]],
    begins: &["<|python_start|>"],
    opens: &[],
    bare: Some('['),
    lists: true,
    ends: &["<|python_end|>"],
    separators: &[','],
    inner: &[],
    again: |c| c.is_alphabetic() || c == '_',
    reader: |_, names| Box::new(PythonCall::new(names)),
    script: Script { begin: "[", join: ", ", end: "]", call: Call::Python },
};
