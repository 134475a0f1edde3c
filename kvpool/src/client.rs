//! The client of the pool, for processes that read and write blocks.
//!
//! - [`request`]: the parameters of a get, and the outcome for each block (core)
//! - [`connection`]: one pool node, and the calls it answers
//! - [`router`]: all pool nodes, one connection each
//! - [`counters`]: bytes moved and blocks missed

#[cfg(feature = "shell")]
pub mod connection;
#[cfg(feature = "shell")]
pub mod counters;
pub mod request;
#[cfg(feature = "shell")]
pub mod router;

pub use request::{Arrival, FetchId, Part, Source};

#[cfg(feature = "shell")]
pub use {
    crate::arena::pin::{Pin, Pinned},
    crate::transport::rdma::{DeviceNames, Nics, client::Registration},
    connection::{Block, Fetch, FetchedBlock, Miss, PoolClient, PoolError, PutReport, ReservedSlots, TransportChoice, Ways},
    counters::TransferCounters,
    router::PoolRouter,
    tidemill_proto::pool::Transport,
};
