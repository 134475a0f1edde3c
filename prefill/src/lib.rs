//! The prefill role: computes the blocks of a prompt that are not available anywhere, in chunks, and puts each into the pool as soon as it
//! is full.
//!
//! It never samples: no LM head, no sampling state, no stream to a client.
//!
//! Core (no clock, socket, thread or model; builds with `--no-default-features`):
//!
//! - [`scheduler`]: the jobs that hold device blocks, and the work of the next chunk
//! - `job`: one job, from its prompt to its last put
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`settings`]: flags and config file

mod job;
pub mod scheduler;

#[cfg(feature = "shell")]
pub mod settings;
