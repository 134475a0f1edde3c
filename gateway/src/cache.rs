//! Cached answers: for repeated requests, for equal ones, and for similar questions.
//!
//! - [`replay`]: recorded answers, for repeated requests
//! - [`response_cache`]: answers for equal requests; [`semantic`]: answers for similar questions

pub mod replay;
pub mod response_cache;
pub mod semantic;
