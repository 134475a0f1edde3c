//! The decode role: admits sequences, steps them in one continuous batch, streams their tokens, publishes the blocks they fill.
//!
//! Core (no clock, socket, thread or model; builds with `--no-default-features`):
//!
//! - [`scheduler`]: which sequences hold device blocks, and what the next step computes
//! - `sequence`: one sequence, from job to last token
//! - [`speculation`]: tokens that are guessed, and verified several in one step
//! - [`limits`]: bounds of a worker, and the jobs that they rule out
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`settings`]: flags and config file

pub mod limits;
pub mod scheduler;
mod sequence;
pub mod speculation;

#[cfg(feature = "shell")]
pub mod settings;
