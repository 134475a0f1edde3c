//! Mutations of valid inputs.
//!
//! - [`bytes`]: as bytes; [`text`]: as words and brackets; [`json`]: as trees

pub(crate) mod bytes;
pub(crate) mod json;
pub(crate) mod text;
