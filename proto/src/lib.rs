//! What all roles of a Tidemill cluster agree on.
//!
//! Core (no clock, socket or thread; builds with `--no-default-features`):
//!
//! - [`ids`]: requests, sequences, epochs
//! - [`block`]: the 16-token block, its chained [`BlockKey`](block::BlockKey), the layout that its bytes commit to
//! - [`sampling`]: how a client wants its tokens drawn
//! - [`message`]: what coordinator and workers tell each other
//! - [`pool`]: what a KV pool node and its clients tell each other
//! - [`frame`]: messages to bytes and back, bounded and versioned
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`identity`]: the cluster CA, and the certificate of one process
//! - [`link`]: QUIC endpoints with mTLS that carry frames
//! - [`uplink`]: a worker's registered, heartbeating link to each coordinator
//! - [`config`]: a TOML file and command-line flags, resolved once
//! - [`cores`]: lists of cores, and keeping a process on some
//! - [`worker`]: flags that every worker process has
//! - [`engine`]: flags that every worker with a model has
//! - [`process`]: logging and signals, the same for every role
//! - `model_dir` (feature `hub`): `--model` (a directory or a hub id) to a directory

pub mod block;
pub mod frame;
pub mod ids;
pub mod message;
pub mod pool;
pub mod sampling;

#[cfg(feature = "shell")]
pub mod config;
#[cfg(feature = "shell")]
pub mod cores;
#[cfg(feature = "shell")]
pub mod engine;
#[cfg(feature = "shell")]
pub mod identity;
#[cfg(feature = "shell")]
pub mod link;
#[cfg(feature = "hub")]
pub mod model_dir;
#[cfg(feature = "shell")]
pub mod process;
#[cfg(feature = "shell")]
pub mod uplink;
#[cfg(feature = "shell")]
pub mod worker;
