//! The gateway: OpenAI's API on one side, token ids on the other. Text stops here.
//!
//! The rooms, from the lowest up. Which may use which stands in `docs/ARCHITECTURE.md` §7, and a test holds them to it.
//!
//! Core (builds with `--no-default-features`, without tokio; the shell of a room is in the same place):
//!
//! - [`text`]: tokenizer, chat template, incremental detokenizer, stop strings
//! - [`base`]: what every other room may use
//! - [`dialog`]: a conversation by whatever protocol, and its way to a prompt
//! - [`context`]: what of a long dialog a model is given, and what in place of the rest
//! - [`generation`]: a choice's tokens to the parts of its answer, one pure pipeline
//! - [`cache`]: answers that are kept, for requests that are repeated, equal or similar
//! - [`routing`]: which model answers, by the operator's rules
//! - [`rollout`]: users that move from one model to another, step by step, and back
//! - [`batch`]: files of requests, and the order and pace in which they are answered
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`metrics`]: the numbers behind `/metrics`, and what an answer took
//! - [`traces`]: what a request spent its time on, for a collector
//! - [`store`]: responses and conversations that clients may ask for again
//! - [`requests`]: what clients send, checked
//! - [`tenants`]: who asks, how much, and what it came to
//! - [`safety`]: what may be asked and answered here, what identifies people, and what was blocked
//! - [`features`]: feedback, tools that run here, grammars, summaries
//! - [`batches`]: clients' files and batches, on disk and running
//! - [`serving`]: a request's way into the cluster, and its answer's way back
//! - [`http`]: endpoints and their server

pub mod base;
pub mod batch;
pub mod cache;
pub mod context;
pub mod dialog;
pub mod generation;
pub mod rollout;
pub mod routing;
pub mod text;

#[cfg(feature = "shell")]
pub mod batches;
#[cfg(feature = "shell")]
pub mod features;
#[cfg(feature = "shell")]
pub mod http;
#[cfg(feature = "shell")]
pub mod metrics;
#[cfg(feature = "shell")]
pub mod requests;
#[cfg(feature = "shell")]
pub mod safety;
#[cfg(feature = "shell")]
pub mod serving;
#[cfg(feature = "shell")]
pub mod store;
#[cfg(feature = "shell")]
pub mod tenants;
#[cfg(feature = "shell")]
pub mod traces;
