//! The decode role: admits sequences, steps them in one continuous batch, streams their tokens, publishes the blocks they fill.
//!
//! Core (no clock, socket or thread):
//!
//! - [`sequence`]: one sequence, from job to last token
//! - [`scheduler`]: which sequences hold device blocks, and what the next step computes
//!
//! Shell (feature `shell`):
//!
//! - [`engine`]: the thread that owns model and device memory and runs the scheduler
//! - [`settings`]: flags and config file
//! - [`worker`]: the process: links, fetches, publishing, shutdown

pub mod scheduler;
pub mod sequence;

#[cfg(feature = "shell")]
pub mod engine;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
pub mod worker;
