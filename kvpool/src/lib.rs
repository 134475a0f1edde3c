//! The tiered KV pool: it keeps blocks between the workers that compute them and the workers that need them.
//!
//! Core (no clock, socket or thread; builds with `--no-default-features`):
//!
//! - [`core`]: the decisions of a pool node
//! - [`client::request`]: the parameters of a get, and the outcome for each block
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`arena`]: equal slots in memory that the processes of one host share
//! - [`transport`]: how block bytes move, one file per transport
//! - [`client`]: the workers' side: one connection per pool node, put and get
//! - [`node`]: the pool node as a process
//! - [`settings`]: the node's flags and config file

pub mod client;
pub mod core;

#[cfg(feature = "shell")]
pub mod arena;
#[cfg(feature = "shell")]
pub mod node;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
pub mod transport;
