//! Limits, and overrides of some of them.

use crate::quota::Kind;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::{fmt, str::FromStr};

/// The limits of a scope; `None` where there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub requests_per_minute: Option<u64>,
    /// Tokens of prompts and answers together.
    pub tokens_per_minute: Option<u64>,
    pub tokens_per_day: Option<u64>,
    /// Concurrent requests, streamed or not.
    pub concurrent: Option<u64>,
}

/// `none`, or a number from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit(pub Option<u64>);

/// Limits that replace the tier's; `None` keeps that of the tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overrides {
    /// Requests a minute: a number, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<Limit>,
    /// Tokens a minute: a number, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<Limit>,
    /// Tokens a day: a number, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_day: Option<Limit>,
    /// Requests at a time: a number, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrent: Option<Limit>,
}

impl Limits {
    pub fn of(&self, kind: Kind) -> Option<u64> {
        match kind {
            Kind::Requests => self.requests_per_minute,
            Kind::Tokens => self.tokens_per_minute,
            Kind::TokensPerDay => self.tokens_per_day,
            Kind::Concurrent => self.concurrent,
        }
    }
}

impl Overrides {
    pub fn over(&self, limits: Limits) -> Limits {
        let pick = |ours: Option<Limit>, theirs| ours.map_or(theirs, |limit| limit.0);
        Limits {
            requests_per_minute: pick(self.requests_per_minute, limits.requests_per_minute),
            tokens_per_minute: pick(self.tokens_per_minute, limits.tokens_per_minute),
            tokens_per_day: pick(self.tokens_per_day, limits.tokens_per_day),
            concurrent: pick(self.concurrent, limits.concurrent),
        }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Combines overrides: those of `self` first, then `earlier`.
    pub fn or(self, earlier: Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(earlier.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(earlier.tokens_per_minute),
            tokens_per_day: self.tokens_per_day.or(earlier.tokens_per_day),
            concurrent: self.concurrent.or(earlier.concurrent),
        }
    }
}

/// The share of one of several coordinators in every limit: the `index`th of `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub index: u64,
    pub count: u64,
}

impl Share {
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// This coordinator's part. The parts add up to the limit, unless it is smaller than the number of coordinators: each part is at least
    /// 1, since a client cannot switch to a different coordinator.
    pub fn of(self, limits: Limits) -> Limits {
        let part = |limit: Option<u64>| limit.map(|limit| (limit / self.count + u64::from(self.index < limit % self.count)).max(1));
        Limits {
            requests_per_minute: part(limits.requests_per_minute),
            tokens_per_minute: part(limits.tokens_per_minute),
            tokens_per_day: part(limits.tokens_per_day),
            concurrent: part(limits.concurrent),
        }
    }
}

impl FromStr for Share {
    type Err = &'static str;

    /// `0/2` is the first of two.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once('/').and_then(|(index, count)| Some(Self { index: index.parse().ok()?, count: count.parse().ok()? }));
        parsed.filter(|share| share.index < share.count).ok_or("must be I/N with I from 0 to N - 1, such as 0/2")
    }
}

impl FromStr for Limit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            _ => text.parse().ok().filter(|&limit| limit > 0).map(|limit| Self(Some(limit))).ok_or("must be `none` or a number from 1 on"),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(limit) => limit.fmt(f),
            None => f.pad("none"),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(limit) => serializer.serialize_u64(limit),
            None => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected `none` or a number from 1 on")]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
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
    fn an_override_counts_where_it_says_something() {
        let overrides: Overrides = serde_json::from_str(r#"{"requests_per_minute": 5, "concurrent": "none"}"#).unwrap();
        let tier = Limits { requests_per_minute: Some(20), tokens_per_day: Some(7), concurrent: Some(1), ..Limits::default() };
        let limits = overrides.over(tier);
        assert_eq!(limits, Limits { requests_per_minute: Some(5), tokens_per_day: Some(7), ..Limits::default() });
        assert_eq!(serde_json::to_string(&overrides).unwrap(), r#"{"requests_per_minute":5,"concurrent":"none"}"#);
        for wrong in [r#"{"concurrent": 0}"#, r#"{"concurrent": "0"}"#, r#"{"concurrent": -1}"#, r#"{"requests": 1}"#] {
            assert!(serde_json::from_str::<Overrides>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn shares_add_up_to_the_limit() {
        for (limit, count) in [(20, 3), (7, 7), (100_000, 6)] {
            let limits = Limits { requests_per_minute: Some(limit), ..Limits::default() };
            let parts = (0..count).filter_map(|index| Share { index, count }.of(limits).requests_per_minute);
            assert_eq!(parts.sum::<u64>(), limit);
        }
        let two = Limits { concurrent: Some(2), ..Limits::default() };
        assert_eq!(Share { index: 2, count: 3 }.of(two).concurrent, Some(1), "nobody is shut out");
        for wrong in ["", "1", "2/2", "0/0", "a/2"] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }
}
