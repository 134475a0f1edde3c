//! Checks of bounds, shared by all settings.

use std::{fmt::Display, ops::RangeInclusive};
use tidemill_net::config::{ConfigError, invalid, parse_bytes};

pub(super) fn within<T: PartialOrd + Display>(key: &'static str, value: T, bounds: RangeInclusive<T>) -> Result<T, ConfigError> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    Err(invalid(key, value, format!("must be from {} to {}", bounds.start(), bounds.end())))
}

pub(super) fn positive<T: PartialOrd + From<u8> + Display>(key: &'static str, value: T) -> Result<T, ConfigError> {
    if value < T::from(1) { Err(invalid(key, value, "must be at least 1")) } else { Ok(value) }
}

/// Parses a size. `default` and `least` are written as in the file.
pub(super) fn bytes(key: &'static str, given: Option<String>, default: &str, least: &str) -> Result<u64, ConfigError> {
    let given = given.unwrap_or_else(|| default.into());
    let bytes = parse_bytes(&given).map_err(|reason| invalid(key, &given, reason))?;
    if bytes < parse_bytes(least).expect("the least is written here") {
        return Err(invalid(key, given, format!("must be at least {least}")));
    }
    Ok(bytes)
}
