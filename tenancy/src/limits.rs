//! Limits, and overrides of some of them.

use crate::{
    calendar::Period,
    money::{Amount, written},
    quota::Kind,
};
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
    pub budgets: Budgets,
}

/// The money that a scope may spend in a day and in a month of the calendar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    pub day: Budget,
    pub month: Budget,
}

/// A budget in millionths of the currency of the prices; `None` where there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// From here on, answers say so.
    pub soft: Option<u64>,
    /// No more than this is spent.
    pub hard: Option<u64>,
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
    /// Money that may be spent in a day (UTC): a sum, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_day: Option<Amount>,
    /// Money from which answers say that the day's budget runs out: a sum, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_day_soft: Option<Amount>,
    /// Money that may be spent in a month (UTC): a sum, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_month: Option<Amount>,
    /// Money from which answers say that the month's budget runs out: a sum, or `"none"` [default: the tier's]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_month_soft: Option<Amount>,
}

impl Budgets {
    pub fn of(&self, period: Period) -> Budget {
        match period {
            Period::Day => self.day,
            Period::Month => self.month,
        }
    }

    fn each(self, change: impl Fn(u64) -> u64) -> Self {
        let budget = |budget: Budget| Budget { soft: budget.soft.map(&change), hard: budget.hard.map(&change) };
        Self { day: budget(self.day), month: budget(self.month) }
    }
}

impl Limits {
    pub fn of(&self, kind: Kind) -> Option<u64> {
        match kind {
            Kind::Requests => self.requests_per_minute,
            Kind::Tokens => self.tokens_per_minute,
            Kind::TokensPerDay => self.tokens_per_day,
            Kind::Concurrent => self.concurrent,
            Kind::Spend(period) => self.budgets.of(period).hard,
        }
    }
}

impl Overrides {
    pub fn over(&self, limits: Limits) -> Limits {
        let pick = |ours: Option<Limit>, theirs| ours.map_or(theirs, |limit| limit.0);
        let sum = |ours: Option<Amount>, theirs| ours.map_or(theirs, |amount| amount.0);
        let Budgets { day, month } = limits.budgets;
        Limits {
            requests_per_minute: pick(self.requests_per_minute, limits.requests_per_minute),
            tokens_per_minute: pick(self.tokens_per_minute, limits.tokens_per_minute),
            tokens_per_day: pick(self.tokens_per_day, limits.tokens_per_day),
            concurrent: pick(self.concurrent, limits.concurrent),
            budgets: Budgets {
                day: Budget { soft: sum(self.budget_day_soft, day.soft), hard: sum(self.budget_day, day.hard) },
                month: Budget { soft: sum(self.budget_month_soft, month.soft), hard: sum(self.budget_month, month.hard) },
            },
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
            budget_day: self.budget_day.or(earlier.budget_day),
            budget_day_soft: self.budget_day_soft.or(earlier.budget_day_soft),
            budget_month: self.budget_month.or(earlier.budget_month),
            budget_month_soft: self.budget_month_soft.or(earlier.budget_month_soft),
        }
    }

    /// Checks that no soft budget is above the hard one beside it, where nothing would ever be said.
    pub fn check(&self) -> Result<(), String> {
        let given = |amount: Option<Amount>| amount.and_then(|amount| amount.0);
        for (name, soft, hard) in
            [("budget_day_soft", self.budget_day_soft, self.budget_day), ("budget_month_soft", self.budget_month_soft, self.budget_month)]
        {
            if let (Some(soft), Some(hard)) = (given(soft), given(hard))
                && soft > hard
            {
                let [soft, hard] = [soft, hard].map(written);
                return Err(format!("`{name}` is {soft}, and the hard budget is {hard}: the soft one must not be the larger"));
            }
        }
        Ok(())
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
            // Money is divided finely enough that a part of it need not be raised.
            budgets: limits.budgets.each(|sum| sum / self.count + u64::from(self.index < sum % self.count)),
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
    fn budgets_are_overridden_shared_and_checked() {
        let overrides: Overrides = serde_json::from_str(r#"{"budget_day": "2.50", "budget_month_soft": "none"}"#).unwrap();
        let of_tier = Budgets { day: Budget { soft: Some(7), hard: Some(9) }, month: Budget { soft: Some(5), hard: None } };
        let limits = overrides.over(Limits { budgets: of_tier, ..Limits::default() });
        assert_eq!(limits.budgets.day, Budget { soft: Some(7), hard: Some(2_500_000) });
        assert_eq!(limits.budgets.month, Budget::default());
        let parts = [0, 1, 2].map(|index| Share { index, count: 3 }.of(limits).budgets.day.hard.unwrap());
        assert_eq!(parts, [833_334, 833_333, 833_333]);
        assert_eq!(overrides.check(), Ok(()));
        let wrong: Overrides = serde_json::from_str(r#"{"budget_day": 2, "budget_day_soft": 2.5}"#).unwrap();
        assert!(wrong.check().unwrap_err().starts_with("`budget_day_soft` is 2.5, and the hard budget is 2:"));
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
