//! The tiered KV pool: it keeps blocks between the workers that compute them and the workers that need them.
//!
//! Core (no clock, socket or thread; builds with `--no-default-features`):
//!
//! - [`core`]: what a pool node decides
//! - [`admission`]: what a client asks for, and what it learns of each block that comes
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`arena`]: equal slots in memory that the processes of one host share
//! - [`transport`]: how block bytes move, one file per transport
//! - [`client`]: what workers use: one connection per pool node, put and get
//! - [`node`]: the pool node as a process
//! - [`settings`]: its flags and config file

pub mod admission;
pub mod core;

#[cfg(feature = "shell")]
pub mod arena;
#[cfg(feature = "shell")]
pub mod client;
#[cfg(feature = "shell")]
pub mod node;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
pub mod transport;

// Until the engines name them by their place.
pub use self::core::eviction;
#[cfg(feature = "shell")]
pub mod clients {
    pub use crate::client::PoolRouter as PoolClients;
}
