//! The state on which all coordinators agree: members and their epochs, and records (aliases, denied certificates and others).
//!
//! Core: events and ticks in, actions out.
//!
//! - [`command`]: changes, and their outcomes
//! - [`state`]: the agreed state; the same commands in the same order lead to the same state everywhere
//! - [`replica`]: one coordinator's copy: consensus by the `raft` crate, which no other module uses
//! - [`disk`]: the state that a replica must find again after a crash
//!
//! Shell, with the feature `shell`:
//!
//! - `sqlite`: the disk, in one file
//! - `registry`: a thread that owns replica and disk
//! - `peers`: links to the other coordinators

pub mod command;
pub mod disk;
mod log;
#[cfg(feature = "shell")]
pub mod peers;
#[cfg(feature = "shell")]
pub mod registry;
pub mod replica;
#[cfg(feature = "shell")]
pub mod sqlite;
pub mod state;
mod wire;
