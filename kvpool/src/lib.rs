//! The tiered KV pool: what remembers blocks between the workers that compute them and those that need them.
//!
//! Core (no clock, socket or thread; builds with `--no-default-features`):
//!
//! - [`directory`]: what a pool node holds, who may touch which slot, who waits for what
//! - [`eviction`]: which block leaves when room is needed, one policy per file
//! - [`admission`]: what a client asks for, and what it learns of each block that comes
//! - [`validate`]: the check that every read passes after its copy
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`disk`]: where blocks go that leave memory, and what is known of them after a restart
//! - [`arena`]: equal slots in memory that processes of one host share
//! - [`transport`]: how block bytes move: shared memory, QUIC
//! - [`client`]: a worker's connection to one pool node
//! - [`clients`]: its connections to all of them
//! - [`counters`]: what it moved and missed
//! - [`node`]: the pool node as a process
//! - [`settings`]: its flags and config file

pub mod admission;
pub mod directory;
pub mod eviction;
pub mod validate;

#[cfg(feature = "shell")]
pub mod arena;
#[cfg(feature = "shell")]
pub mod client;
#[cfg(feature = "shell")]
pub mod clients;
#[cfg(feature = "shell")]
pub mod counters;
#[cfg(feature = "shell")]
pub mod disk;
#[cfg(feature = "shell")]
pub mod node;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
mod streaming;
#[cfg(feature = "shell")]
pub mod transport;
