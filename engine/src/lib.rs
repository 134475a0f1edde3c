//! What prefill and decode share: admission of jobs to device blocks, and the engine that drives a scheduler and a model.
//!
//! Core (no clock, socket, thread or model; builds with `--no-default-features`):
//!
//! - [`role`]: what a scheduler is to its engine
//! - [`job`]: jobs, scheduled chunks, and the actions that a scheduler asks for
//! - [`order`]: which job goes first; [`shares`]: fairness between groups; [`pace`]: how long steps take, learnt
//! - [`budget`]: the tokens of a step
//! - [`residency`]: which blocks of which job are on the device
//! - [`device`]: what each device block holds
//! - [`states`]: states of recurrent layers: which block ends have one, and where a job's own is
//! - `fetching`: one fetch under way
//! - [`announcing`]: what the device's prefix cache has, for coordinators
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`worker`]: the process: load, link up, drive, close
//! - [`engine`]: events in, steps computed, actions performed
//! - `drive`: the thread that does so, and its inbox
//! - `io`: what that thread reaches: coordinators, pool nodes, its inbox, the report
//! - `landing`: blocks that the device copies by itself
//! - `masks`: what constrained sequences may draw, computed beside the forward pass; `turns`: whose grammar is compiled next
//! - `publishing`: device blocks into the pool
//! - [`load`]: from settings to a loaded model with its device memory
//! - [`draft`]: the same of a draft model
//! - [`flags`]: section `[engine]` of a worker's settings

pub mod announcing;
pub mod budget;
pub mod device;
mod fetching;
pub mod job;
pub mod order;
pub mod pace;
pub mod residency;
pub mod role;
pub mod shares;
pub mod states;

#[cfg(feature = "shell")]
pub mod draft;
#[cfg(feature = "shell")]
mod drive;
#[cfg(feature = "shell")]
pub mod engine;
#[cfg(feature = "shell")]
pub mod flags;
#[cfg(feature = "shell")]
mod io;
#[cfg(feature = "shell")]
mod landing;
#[cfg(feature = "shell")]
pub mod load;
#[cfg(feature = "shell")]
mod masks;
#[cfg(feature = "shell")]
mod publishing;
#[cfg(feature = "shell")]
mod turns;
#[cfg(feature = "shell")]
pub mod worker;
