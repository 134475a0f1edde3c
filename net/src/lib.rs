//! The shell of every process: configuration, identity, and connections to other processes.
//!
//! - [`config`]: a TOML file and command-line flags, resolved once
//! - [`identity`]: the cluster CA, and the certificate of one process: its role and name
//! - [`link`]: QUIC endpoints with mTLS that carry frames
//! - [`uplink`]: a worker's registered, heartbeating link to each coordinator
//! - [`worker`]: flags that every worker process has
//! - [`process`]: logging and signals
//! - [`cores`]: lists of cores, and pinning a process to them
//! - `model_dir` (feature `hub`): resolves `--model` (a directory or a hub id) to a directory

pub mod config;
pub mod cores;
pub mod identity;
pub mod link;
#[cfg(feature = "hub")]
pub mod model_dir;
pub mod process;
pub mod supervised;
pub mod uplink;
pub mod worker;
