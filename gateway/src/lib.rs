//! The gateway: OpenAI's API on one side, token ids on the other. Text stops here.
//!
//! The rooms, from the lowest up. `docs/ARCHITECTURE.md` §7 states which may use which, and a test enforces it.
//!
//! Core (builds with `--no-default-features`, without tokio; the shell of a room is in the same place):
//!
//! - [`text`]: tokenizer, chat template, incremental detokenizer, stop strings
//! - [`base`]: foundations that every other room may use
//! - [`vectors`]: texts as vectors of an encoder, kept and waited for
//! - [`dialog`]: a conversation in any protocol, and its way to a prompt
//! - [`context`]: the part of a long dialog that a model is given, and the replacement of the rest
//! - [`generation`]: a choice's tokens to the parts of its answer, one pure pipeline
//! - [`cache`]: cached answers, for repeated, equal or similar requests
//! - [`routing`]: the choice of a model, by the operator's rules
//! - [`rollout`]: users that move from one model to another, step by step, and back
//! - [`batch`]: files of requests, and the order and pace in which they are answered
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`metrics`]: the numbers behind `/metrics`, and usage of answers
//! - [`traces`]: traces of requests, for a collector
//! - [`store`]: stored responses and conversations
//! - [`requests`]: clients' requests, checked
//! - [`tenants`]: authentication, quotas and usage
//! - [`operators`]: who may use the operators' port
//! - [`safety`]: safety checks, personal data, and the audit log of blocks
//! - [`features`]: feedback, tools that run on the server, grammars, summaries
//! - [`batches`]: clients' files and batches, on disk and running
//! - [`serving`]: the path of a request into the cluster, and of its answer back
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
pub mod vectors;

#[cfg(feature = "shell")]
pub mod batches;
#[cfg(feature = "shell")]
pub mod features;
#[cfg(feature = "shell")]
pub mod http;
#[cfg(feature = "shell")]
pub mod metrics;
#[cfg(feature = "shell")]
pub mod operators;
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
