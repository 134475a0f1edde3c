//! The coordinator: drives the cluster's core, and puts the gateway in front of it.
//!
//! - [`driver`]: the cluster behind a lock, its actions carried out
//! - [`links`]: accepts the workers' QUIC links
//! - [`settings`]: flags and config file; [`run`]: all of it together

pub mod driver;
pub mod links;
pub mod run;
pub mod settings;
