//! Things that every other room may use: JSON as clients write it, owners, shares, ids and timestamps.
//!
//! - [`json`]: JSON as clients write it, where that is more than a library reads
//! - [`owner`]: the owner of stored things; [`room`]: fair shares of a room that tenants fill together; [`shares`]: parts of what is in
//!   flight
//! - [`memories`]: facts about users, as chats are given them, and how many are kept
//! - [`registry`]: the coordinators' agreed records, as operators see and change them
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
