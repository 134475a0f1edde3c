//! Answers that are kept: for requests that are repeated, for equal ones, and for similar questions.
//!
//! - [`replay`]: answers that are recorded, for requests that are repeated
//! - [`response_cache`]: answers that are kept for equal requests; [`semantic`]: for similar questions

pub mod replay;
pub mod response_cache;
pub mod semantic;
