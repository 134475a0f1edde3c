//! Timestamps and ids of records and events.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since 1970, UTC.
pub(crate) fn unix() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(crate) fn unix_seconds() -> u64 {
    unix().as_secs()
}

pub(crate) fn unix_ms() -> u64 {
    unix().as_millis() as u64
}

/// Makes a unique id that cannot be guessed: the prefix, and 128 random bits.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}
