//! What prefill and decode share: the shell around a scheduler and a model.
//!
//! - [`flags`]: section `[engine]` of a worker's settings
//! - [`load`]: from those to a loaded model with its device memory
//! - [`drive`]: the thread that runs an engine, and its inbox
//! - [`reach`]: what an engine reaches from that thread: coordinators, pool nodes, its inbox

pub mod drive;
pub mod flags;
pub mod load;
pub mod reach;
