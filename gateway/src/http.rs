//! OpenAI's API over HTTP.
//!
//! - [`routes`]: which port serves what; [`operator`]: what operators and probes read
//! - [`endpoint`]: what generating endpoints share; [`chat`], [`completions`]: their wire shapes; [`openai`]: bodies
//! - [`parse`]: bodies checked; [`errors`]: OpenAI's error object
//! - [`answer`]: a running request's events as deltas of its choices; [`sse`]: deltas as a stream
//! - [`server`]: clients' connections

pub mod answer;
pub mod chat;
pub mod completions;
pub mod endpoint;
pub mod errors;
pub mod models;
pub mod openai;
pub mod operator;
pub mod parse;
pub mod routes;
pub mod server;
pub mod sse;
