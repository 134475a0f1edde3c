//! The prefill role: computes the blocks of a prompt that nobody has yet, in chunks, and puts each into the pool as soon as it is final.
//!
//! It never samples: no LM head, no sampling state, no stream to a client.
//!
//! Core (no clock, socket or thread):
//!
//! - [`scheduler`]: which jobs hold device blocks, and what the next chunk computes
//!
//! Shell (feature `shell`):
//!
//! - [`engine`]: the thread that owns model and device memory and runs the scheduler
//! - [`settings`]: flags and config file
//! - [`worker`]: the process: links, fetches, puts, shutdown

pub mod scheduler;

#[cfg(feature = "shell")]
pub mod engine;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
pub mod worker;
