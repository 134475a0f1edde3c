//! Sums of money, in millionths of the currency of the prices. No floating point: what is added up stays exact.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::{fmt, str::FromStr};

/// The digits after the point.
const DECIMALS: usize = 6;
const MICROS: u64 = 1_000_000;
/// The largest sum: scripts of the quota server count with numbers up to 2^53.
pub const MICROS_MAX: u64 = 9_000_000_000 * MICROS;

/// `none`, or a sum in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(pub Option<u64>);

/// Writes a sum as people do: `12.5`.
pub fn written(micros: u64) -> String {
    let text = format!("{}.{:06}", micros / MICROS, micros % MICROS);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Reads a sum such as `12.5`.
fn parsed(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !are_digits(whole) || !are_digits(part) || part.len() > DECIMALS {
        return None;
    }
    let micros: u64 = format!("{part:0<DECIMALS$}").parse().ok()?;
    let sum = whole.parse::<u64>().ok()?.checked_mul(MICROS)?.checked_add(micros)?;
    (sum <= MICROS_MAX).then_some(sum)
}

const EXPECTED: &str = "must be `none`, or a sum of money from 0 to 9000000000 with at most 6 decimals, such as 12.50";

impl FromStr for Amount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            _ => parsed(text).map(|micros| Self(Some(micros))).ok_or(EXPECTED),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.map_or_else(|| "none".into(), written))
    }
}

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_string())
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected `none`, or a sum of money such as 12.50")]
        enum Written {
            Whole(u64),
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Whole(number) => number.to_string().parse(),
            // The shortest text of a number is the one that was written.
            Written::Number(number) => number.to_string().parse(),
            Written::Text(text) => text.parse(),
        }
        .map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_read_and_written_exactly() {
        for (text, micros, again) in [
            ("0", 0, "0"),
            ("12.50", 12_500_000, "12.5"),
            ("0.000001", 1, "0.000001"),
            ("100", 100_000_000, "100"),
            ("9000000000", MICROS_MAX, "9000000000"),
        ] {
            let amount: Amount = text.parse().unwrap();
            assert_eq!((amount.0, amount.to_string().as_str()), (Some(micros), again));
        }
        for (json, micros) in [("0.1", Some(100_000)), ("5", Some(5_000_000)), ("\"7.25\"", Some(7_250_000)), ("\"none\"", None)] {
            let amount: Amount = serde_json::from_str(json).unwrap();
            assert_eq!(amount.0, micros, "{json}");
            assert_eq!(serde_json::from_str::<Amount>(&serde_json::to_string(&amount).unwrap()).unwrap(), amount);
        }
    }

    #[test]
    fn what_is_no_sum_is_refused() {
        for wrong in ["", ".", ".5", "-1", "1e3", "1.0000001", "+1", "1,5", "9000000000.1", "99999999999999999999", "NaN", "None"] {
            assert!(wrong.parse::<Amount>().is_err(), "{wrong}");
        }
        for wrong in ["-1", "1e30", "0.00000001", "null", "true", "[]", "\"\""] {
            assert!(serde_json::from_str::<Amount>(wrong).is_err(), "{wrong}");
        }
    }
}
