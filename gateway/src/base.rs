//! What every other room may use: JSON as clients write it, owners, shares, and what names and time are made of.
//!
//! - [`json`]: what clients write, where that is more than a library reads
//! - [`owner`]: whose everything is that is stored; [`room`]: who makes room where tenants fill one together; [`shares`]: parts of what is in flight
//! - [`memories`]: facts about users, as chats are given them, and how many are kept
//! - [`registry`]: what coordinators agree on, as operators see and change it
//! - [`origins`]: the origins whose web pages may use the API

pub mod json;
pub mod memories;
#[cfg(feature = "shell")]
pub mod origins;
pub mod owner;
#[cfg(feature = "shell")]
pub mod registry;
pub mod room;
pub mod shares;
#[cfg(feature = "shell")]
pub(crate) mod stamp;
