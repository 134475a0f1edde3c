//! What prefill and decode share: a worker's device blocks, and the shell around a scheduler and a model.
//!
//! Core (no clock, socket, thread or model; builds with `--no-default-features`):
//!
//! - [`device`]: what each device block holds
//! - [`fetching`]: fetches under way
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`flags`]: section `[engine]` of a worker's settings
//! - [`load`]: from those to a loaded model with its device memory
//! - [`drive`]: the thread that runs an engine, and its inbox
//! - [`reach`]: what an engine reaches from that thread: coordinators, pool nodes, its inbox

pub mod device;
pub mod fetching;

#[cfg(feature = "shell")]
pub mod drive;
#[cfg(feature = "shell")]
pub mod flags;
#[cfg(feature = "shell")]
pub mod load;
#[cfg(feature = "shell")]
pub mod reach;
