//! Who may ask, how much, and what it came to.
//!
//! Core (builds with `--no-default-features`: no clock, file, socket or entropy):
//!
//! - [`key`]: API keys, as clients hold them and as they are kept
//! - [`records`]: tenants and keys, and the changes that make them; [`directory`]: all of them, and whose a key is
//! - [`tier`]: what a tenant pays for: its limits, its service classes, its turn when there is too much to do; [`limits`]
//! - [`quota`]: reserve, settle, cancel, over sliding windows ([`window`])
//! - [`shedding`]: when there is too much to do
//! - [`retry`]: how long to wait after a failure
//! - [`usage`]: events, their prices, and reports
//! - [`segment`]: a log as bytes; [`audit`]: one whose records are chained by their digests
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`keeper`]: where tenants and keys are kept
//! - [`jwt`]: tokens that an identity provider has signed
//! - [`web`]: HTTP requests of our own
//! - [`journal`]: a log as files; [`sink`]: usage events on their way to somebody else

pub mod audit;
pub mod directory;
pub mod key;
pub mod limits;
pub mod quota;
pub mod records;
pub mod retry;
pub mod segment;
pub mod shedding;
pub mod tier;
pub mod usage;
pub mod window;

#[cfg(feature = "shell")]
pub mod journal;
#[cfg(feature = "shell")]
pub mod jwt;
#[cfg(feature = "shell")]
pub mod keeper;
#[cfg(feature = "shell")]
pub mod sink;
#[cfg(feature = "shell")]
pub mod web;
