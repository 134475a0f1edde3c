//! The decode role: admits sequences, steps them in one continuous batch, streams their tokens, publishes the blocks that they fill.
//!
//! Core (no clock, socket, thread or model; builds with `--no-default-features`):
//!
//! - [`scheduler`]: the sequences that hold device blocks, and the work of the next step
//! - `sequence`: one sequence, from job to last token; `thinking`: its thought under a limit
//! - [`speculation`]: guessed tokens, several of which are verified in one step
//! - [`limits`]: bounds of a worker, and the jobs that they rule out
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`settings`]: flags and config file

pub mod limits;
pub mod scheduler;
mod sequence;
pub mod speculation;
mod thinking;

#[cfg(feature = "shell")]
pub mod settings;
