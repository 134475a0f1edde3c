//! PTX to kernels that the interpreter runs: the subset that our kernels use. Anything else is an error that names it.
//!
//! - [`parse`]: text to statements, with the source lines that they came from
//! - [`decode`]: statements to instructions; [`program`]: the decoded kernels

pub(crate) mod decode;
pub(crate) mod parse;
pub(crate) mod program;
