//! The coordinator: drives the cluster's core, and puts the gateway in front of it.
//!
//! - [`driver`]: the cluster behind a lock, with its actions carried out
//! - [`links`]: accepts the QUIC links of workers and of other coordinators
//! - [`loops`]: the event loops of clients and of links; [`tasks`]: background tasks that must not end
//! - [`agreed`]: the state that the coordinators agree on, applied to this process, and changed by operators
//! - [`revoked`]: certificates that stay revoked even if that state is lost
//! - [`events`]: the senders of events to Kafka
//! - `restored`: records that came with a backup
//! - [`settings`]: flags and config file; [`run`]: all of it together

pub mod agreed;
pub mod driver;
pub mod events;
pub mod links;
pub mod loops;
mod restored;
pub mod revoked;
pub mod run;
pub mod settings;
pub mod tasks;
