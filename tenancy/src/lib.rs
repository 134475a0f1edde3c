//! Tenants: authentication, quotas and usage.
//!
//! Core (builds with `--no-default-features`: no clock, file, socket or entropy):
//!
//! - [`key`]: API keys, as clients hold them and as they are kept
//! - [`records`]: tenants and keys, and the changes that make them; [`directory`]: all of them, to look up a key's owner
//! - [`tier`]: the service that a tenant pays for: its limits, its service classes, its order in load shedding; [`limits`]
//! - [`quota`]: reserve, settle, cancel, over sliding windows ([`window`]), and of money in days and months ([`calendar`], [`money`])
//! - [`shedding`]: load shedding by tier
//! - [`breaker`]: whether a server is asked that may not answer
//! - [`retry`]: the delay after a failure
//! - [`operators`]: what operators may do, and the claims that say so
//! - [`usage`]: events, their prices, and reports
//! - [`audit`]: a log whose records are chained by their digests
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`keeper`]: storage of tenants and keys
//! - [`limiter`]: quotas of one coordinator, by itself or with the others; [`shared`]: those on a Redis or Valkey server
//! - [`assertion`]: what one region tells another of a relayed request's sender
//! - [`jwt`]: tokens signed by an identity provider; [`sign_in`]: people who sign in there with a browser
//! - [`web`]: outgoing HTTP requests
//! - [`archive`]: the file of a coordinator's backup
//! - [`journal`]: a log in SQLite; [`ledger`]: what was spent, kept beside it; [`sink`]: its entries sent to an external collector

pub mod audit;
pub mod breaker;
pub mod calendar;
pub mod directory;
pub mod key;
pub mod limits;
pub mod money;
pub mod operators;
pub mod quota;
pub mod records;
pub mod retry;
pub mod shedding;
pub mod tier;
pub mod usage;
pub mod window;

#[cfg(feature = "shell")]
pub mod archive;
#[cfg(feature = "shell")]
pub mod assertion;
#[cfg(feature = "shell")]
pub mod journal;
#[cfg(feature = "shell")]
pub mod jwt;
#[cfg(feature = "shell")]
pub mod keeper;
#[cfg(feature = "shell")]
pub mod ledger;
#[cfg(feature = "shell")]
pub mod limiter;
#[cfg(feature = "shell")]
pub mod shared;
#[cfg(feature = "shell")]
pub mod sign_in;
#[cfg(feature = "shell")]
pub mod sink;
#[cfg(feature = "shell")]
pub mod web;
