//! The coordinator: gives every prompt its way through the cluster, and speaks OpenAI's API to the outside.
//!
//! Core (no clock, socket or thread; builds with `--no-default-features`):
//!
//! - [`cluster`]: requests, workers and what follows from what they say: events in, actions out
//! - [`schedule`]: where a sequence goes, one pure decision; [`cost`]: how long things take, learnt online
//! - [`registry`]: who is in the cluster; [`prefix_index`]: which blocks the pool nodes say they hold; [`heat`]: which of
//!   them are read over the network often
//! - [`text`]: tokenizer, chat template, incremental detokenizer, stop strings: the only place that knows text
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`driver`]: the cluster behind a lock, its actions carried out
//! - [`workers`]: accepts the workers' QUIC links
//! - [`http`]: the front door
//! - [`metrics`]: what `/metrics` shows
//! - [`settings`]: flags and config file; [`run`]: all of it together

pub mod cluster;
pub mod cost;
pub mod heat;
pub mod prefix_index;
pub mod registry;
pub mod schedule;
pub mod text;

#[cfg(feature = "shell")]
pub mod driver;
#[cfg(feature = "shell")]
pub mod http;
#[cfg(feature = "shell")]
pub mod metrics;
#[cfg(feature = "shell")]
pub mod run;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
pub mod workers;
