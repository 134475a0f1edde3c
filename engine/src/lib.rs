//! The code that prefill and decode share: admission of jobs to device blocks, and the engine that drives a scheduler and a model.
//!
//! Core (no clock, socket, thread or model; builds with `--no-default-features`):
//!
//! - [`role`]: the interface of a scheduler to its engine
//! - [`job`]: jobs, scheduled chunks, and the actions that a scheduler asks for
//! - [`order`]: the order of jobs; [`shares`]: fairness between groups; [`pace`]: the time of steps, learnt
//! - [`budget`]: the tokens of a step
//! - [`residency`]: the blocks of each job on the device
//! - [`device`]: the contents of each device block
//! - [`states`]: states of recurrent layers: the block ends that have one, and the place of a job's own
//! - `fetching`: one fetch in progress
//! - [`stages::protocol`]: the decisions of both sides of a link between pipeline stages
//! - [`announcing`]: the contents of the device's prefix cache, for coordinators
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`worker`]: the process: load, link up, drive, close
//! - [`engine`]: events in, steps computed, actions performed
//! - `drive`: the thread that does so, and its inbox
//! - `io`: the connections of that thread: coordinators, pool nodes, its inbox, the report
//! - `landing`: blocks that the device copies by itself
//! - `masks`: the allowed tokens of constrained sequences, computed beside the forward pass; `turns`: the order in which grammars are
//!   compiled and followed
//! - `publishing`: device blocks into the pool
//! - `stages`: a worker whose layers are in several processes: the head's links to the others, and the process of one of them
//! - [`load`]: from settings to a loaded model with its device memory
//! - [`draft`]: the loading of a draft model
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
pub mod stages;
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
