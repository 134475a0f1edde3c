//! What a process that reads and writes blocks uses.
//!
//! - [`connection`]: one pool node, and the calls it answers
//! - [`router`]: all pool nodes, one connection each
//! - [`counters`]: bytes moved and blocks missed

pub mod connection;
pub mod counters;
pub mod router;

pub use connection::{Block, Fetch, FetchedBlock, Miss, PoolClient, PoolError, PutReport, ReservedSlots, TransportChoice};
pub use counters::TransferCounters;
pub use router::PoolRouter;
pub use tidemill_proto::pool::Transport;
