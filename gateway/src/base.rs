//! Foundations that all other rooms may use: JSON as clients write it, owners, shares, ids and timestamps.
//!
//! - [`json`]: JSON as clients write it, beyond what `serde_json` reads
//! - [`owner`]: the owner of stored data; [`room`]: fair shares of a room that tenants fill together; [`shares`]: shares of resources in
//!   flight
//! - [`memories`]: facts about users, as chats are given them, and limits on them
//! - [`registry`]: the coordinators' agreed records, as operators see and change them
//! - [`pins`]: tenants that are served in some regions only
//! - [`origins`]: the origins whose web pages may use the API

pub mod json;
pub mod memories;
#[cfg(feature = "shell")]
pub mod origins;
pub mod owner;
pub mod pins;
#[cfg(feature = "shell")]
pub mod registry;
pub mod room;
pub mod shares;
#[cfg(feature = "shell")]
pub(crate) mod stamp;
