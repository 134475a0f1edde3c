//! RDMA: the client's devices write into and read from the node's arena, without the node's CPU.
//!
//! ```text
//!   client                                                    node
//!   staging, engine memory  ◄── READ  block, generation ───  arena
//!                           ───  WRITE block ─────────────►
//!   control stream (QUIC):  reserve, commit, lease, release, open and close rails
//! ```
//!
//! A *rail* is a reliable connection between a device of the client and one of the node; a client has one for each of its devices, and
//! spreads blocks over them. A rail that fails is closed, its work goes over another one, and over QUIC when none is left; the client keeps
//! trying to open it again.
//!
//! - `verbs`: libibverbs, loaded at run time
//! - `devices`: the devices that a process uses
//! - `staging`: registered memory for blocks whose own memory is not registered
//! - `completions`: the thread that waits for a device, and the waiters for its work
//! - `rail`: one rail's client end
//! - `client`: a connection's rails, as `Slots`
//! - `node`: the registered arena, the rails' other ends, and the fencing of writers

pub(crate) mod client;
mod completions;
pub(crate) mod devices;
pub(crate) mod node;
mod rail;
mod staging;
mod verbs;

#[cfg(test)]
mod tests;

pub use client::Nics;
pub use devices::DeviceNames;
