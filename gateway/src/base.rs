//! Foundations that all other rooms may use: JSON as clients write it, owners, shares, ids and timestamps.
//!
//! - [`json`]: JSON as clients write it, beyond what `serde_json` reads
//! - [`owner`]: the owner of stored data; [`room`]: fair shares of a room that tenants fill together; [`shares`]: shares of resources in
//!   flight; [`places`]: those that are waited for
//! - [`mod@line`]: the order of pieces of work that wait, by tiers and their tenants
//! - [`memories`]: facts about users, as chats are given them, and limits on them
//! - [`registry`]: the coordinators' agreed records, as operators see and change them
//! - [`pins`]: tenants that are served in some regions only
//! - [`origins`]: the origins whose web pages may use the API

pub mod json;
#[cfg(feature = "shell")]
pub mod line;
pub mod memories;
#[cfg(feature = "shell")]
pub mod origins;
pub mod owner;
pub mod pins;
#[cfg(feature = "shell")]
pub mod places;
#[cfg(feature = "shell")]
pub mod registry;
pub mod room;
pub mod shares;
#[cfg(feature = "shell")]
pub(crate) mod stamp;
