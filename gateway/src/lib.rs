//! The gateway: OpenAI's API on one side, token ids on the other. Text stops here.
//!
//! Core (builds with `--no-default-features`, without tokio):
//!
//! - [`text`]: tokenizer, chat template, incremental detokenizer, stop strings
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`backend`]: the cluster as the gateway sees it
//! - [`http`]: endpoints, and what serves them
//! - [`metrics`]: what `/metrics` shows

pub mod text;

#[cfg(feature = "shell")]
pub mod backend;
#[cfg(feature = "shell")]
pub mod http;
#[cfg(feature = "shell")]
pub mod metrics;
