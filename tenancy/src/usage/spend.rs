//! Money that was spent today and this month, as sums of events: what remains of a month's log when a coordinator starts again.
//!
//! The sums are a function of the log's beginning up to an entry, and are kept with that entry's number: so the rest of the log brings them
//! up to date, whenever they were written.

use super::Event;
use crate::{
    calendar::Period,
    quota::{Scope, Spent},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spend {
    /// The number of the last event that is in the sums.
    pub number: u64,
    day: Sums,
    month: Sums,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sums {
    /// The number of the day or the month.
    period: u64,
    tenants: BTreeMap<String, OfTenant>,
}

/// Sums of one tenant, in millionths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfTenant {
    all: u64,
    #[serde(default)]
    keys: BTreeMap<String, u64>,
    #[serde(default)]
    models: BTreeMap<String, u64>,
}

impl Spend {
    /// Nothing yet, of the events after this number.
    pub fn after(number: u64) -> Self {
        Self { number, ..Self::default() }
    }

    /// Adds the event of this number, if it is the next.
    pub fn add(&mut self, number: u64, event: &Event) {
        if number <= self.number {
            return;
        }
        self.number = number;
        if event.cost_micros == 0 || event.tenant.is_empty() {
            return;
        }
        let at = Duration::from_millis(event.at_ms);
        for (period, sums) in [(Period::Day, &mut self.day), (Period::Month, &mut self.month)] {
            sums.add(period.number(at), event);
        }
    }

    /// The sums of each scope in the day and the month of `now`.
    pub fn scopes(&self, now: Duration) -> Vec<(Scope, Spent)> {
        let empty = BTreeMap::new();
        let of = |period: Period, sums: &'_ Sums| period.number(now) == sums.period;
        // A day's tenants are among those of its month.
        let days = if of(Period::Day, &self.day) { &self.day.tenants } else { &empty };
        let months = if of(Period::Month, &self.month) { &self.month.tenants } else { &empty };
        let mut scopes = Vec::new();
        for (tenant, month) in months {
            let none = OfTenant::default();
            let day = days.get(tenant).unwrap_or(&none);
            let spent = |day: Option<u64>, month| Spent { day_micros: day.unwrap_or(0), month_micros: month };
            scopes.push((Scope::Tenant(tenant.as_str().into()), spent(Some(day.all), month.all)));
            for (key, micros) in &month.keys {
                scopes.push((Scope::Key(key.as_str().into()), spent(day.keys.get(key).copied(), *micros)));
            }
            for (model, micros) in &month.models {
                let scope = Scope::Model(tenant.as_str().into(), model.as_str().into());
                scopes.push((scope, spent(day.models.get(model).copied(), *micros)));
            }
        }
        scopes
    }
}

impl Sums {
    fn add(&mut self, period: u64, event: &Event) {
        if period < self.period {
            return;
        }
        if period > self.period {
            *self = Self { period, tenants: BTreeMap::new() };
        }
        let micros = event.cost_micros;
        let tenant = self.tenants.entry(event.tenant.clone()).or_default();
        let of_key = event.key.as_ref().map(|key| tenant.keys.entry(key.clone()).or_default());
        let of_model = tenant.models.entry(event.model.clone()).or_default();
        for sum in [Some(&mut tenant.all), of_key, Some(of_model)].into_iter().flatten() {
            *sum = sum.saturating_add(micros);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_MS: u64 = 86_400_000;

    fn event(day: u64, tenant: &str, key: Option<&str>, cost_micros: u64) -> Event {
        Event {
            at_ms: day * DAY_MS + 5,
            tenant: tenant.into(),
            key: key.map(str::to_owned),
            model: "m".into(),
            cost_micros,
            ..Event::default()
        }
    }

    fn spent(spend: &Spend, day: u64, scope: &Scope) -> Option<(u64, u64)> {
        let scopes = spend.scopes(Duration::from_millis(day * DAY_MS + 9));
        scopes.into_iter().find(|(of, _)| of == scope).map(|(_, spent)| (spent.day_micros, spent.month_micros))
    }

    #[test]
    fn sums_are_those_of_this_day_and_this_month() {
        let mut spend = Spend::default();
        // The 30th and the 31st of January 1970, and the 1st of February.
        let events = [event(29, "a", Some("k"), 5), event(30, "a", Some("k"), 7), event(30, "a", None, 1), event(30, "b", None, 2)];
        for (number, event) in (1..).zip(&events) {
            spend.add(number, event);
            spend.add(number, event);
        }
        let (tenant, key) = (Scope::Tenant("a".into()), Scope::Key("k".into()));
        assert_eq!(spent(&spend, 30, &tenant), Some((8, 13)));
        assert_eq!(spent(&spend, 30, &key), Some((7, 12)));
        assert_eq!(spent(&spend, 30, &Scope::Model("b".into(), "m".into())), Some((2, 2)));
        assert_eq!(spent(&spend, 31, &tenant), None, "a new month has begun");
        // An event of a request that began on the day before counts there, and no more.
        spend.add(5, &event(31, "a", None, 4));
        spend.add(6, &event(30, "a", None, 100));
        assert_eq!(spent(&spend, 31, &tenant), Some((4, 4)));
        assert_eq!(spent(&spend, 31, &key), None);
        let kept = serde_json::to_string(&spend).unwrap();
        assert_eq!(serde_json::from_str::<Spend>(&kept).unwrap(), spend);
    }
}
