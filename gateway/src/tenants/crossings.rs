//! Soft budgets that are used up: each request is counted, and the first of a day or a month logged, and kept for the audit log.

use crate::metrics;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};
use tidemill_tenancy::{
    calendar::Period,
    money,
    quota::{Scope, Warning},
};

/// The maximum number of crossings that wait for the audit log.
const WAITING_MAX: usize = 4096;

/// The soft budgets whose use was logged: once is enough.
#[derive(Debug, Default)]
pub struct Crossings(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of the day or the month, and the budget: one that is raised can be crossed again.
    seen: HashMap<(Scope, Period), (u64, u64)>,
    waiting: VecDeque<Crossing>,
}

/// A soft budget that was crossed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crossing {
    tenant: String,
    scope: String,
    period: Period,
    /// The number of the day or the month.
    number: u64,
    soft: u64,
    hard: Option<u64>,
    spent: u64,
}

impl Crossings {
    /// Counts the warnings of a request, and logs those of budgets that were not used up before.
    pub(super) fn note(&self, now: Duration, tenant: &str, warnings: &[Warning]) {
        for Warning { scope, period, soft, hard, spent } in warnings {
            metrics::count_budget_warning(scope.kind().name(), period.name());
            let number = period.number(now);
            let mut state = self.0.lock();
            if state.seen.insert((scope.clone(), *period), (number, *soft)) == Some((number, *soft)) {
                continue;
            }
            let of = scope_name(scope);
            if state.waiting.len() < WAITING_MAX {
                let (tenant, scope) = (tenant.to_owned(), of.clone());
                state.waiting.push_back(Crossing { tenant, scope, period: *period, number, soft: *soft, hard: *hard, spent: *spent });
            }
            drop(state);
            let (soft, spent, hard) = (money::written(*soft), money::written(*spent), hard.map(money::written));
            tracing::warn!(tenant, scope = of, period = period.name(), soft, spent, hard, "a soft budget is used up");
        }
    }

    /// The crossing that has waited longest for the audit log.
    pub fn next(&self) -> Option<Crossing> {
        self.0.lock().waiting.front().cloned()
    }

    /// Removes a crossing that is in the audit log.
    pub fn noted(&self, crossing: &Crossing) {
        let mut state = self.0.lock();
        if state.waiting.front() == Some(crossing) {
            state.waiting.pop_front();
        }
    }

    /// Drops all that wait: there is no audit log.
    pub fn forget(&self) {
        self.0.lock().waiting.clear();
    }

    /// Forgets days and months that are over.
    pub(super) fn sweep(&self, now: Duration) {
        self.0.lock().seen.retain(|(_, period), (number, _)| *number == period.number(now));
    }
}

impl Crossing {
    /// The name by which the audit log knows that it has the crossing already, also after a restart.
    pub fn name(&self) -> String {
        format!("soft-budget {} {} {} {}", self.scope, self.period.name(), self.number, self.soft)
    }

    /// Writes the crossing for the audit log.
    pub fn event(&self) -> Value {
        json!({
            "kind": "soft-budget", "tenant": self.tenant, "scope": self.scope, "period": self.period.name(), "soft": money::written(self.soft),
            "hard": self.hard.map(money::written), "spent": money::written(self.spent),
        })
    }
}

fn scope_name(scope: &Scope) -> String {
    match scope {
        Scope::Tenant(tenant) => format!("tenant {tenant}"),
        Scope::Key(key) => format!("key {key}"),
        Scope::Model(tenant, model) => format!("model {model} of {tenant}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_budget_of_a_day_is_crossed_once() {
        let day = Duration::from_secs(24 * 3600);
        let crossings = Crossings::default();
        let warning = |soft, spent| Warning { scope: Scope::Tenant("acme".into()), period: Period::Day, soft, hard: None, spent };
        let note = |now, soft, spent| crossings.note(now, "acme", &[warning(soft, spent)]);
        note(day, 80, 85);
        note(day, 80, 90);
        let first = crossings.next().unwrap();
        assert_eq!((first.spent, first.name().as_str()), (85, "soft-budget tenant acme day 1 80"));
        crossings.noted(&first);
        assert_eq!(crossings.next(), None);
        // The budget is raised, and crossed again; and a day later, too.
        note(day, 100, 101);
        note(day * 2, 100, 102);
        let names =
            std::iter::from_fn(|| crossings.next().inspect(|next| crossings.noted(next)).map(|next| next.number)).collect::<Vec<_>>();
        assert_eq!(names, [1, 2]);
        crossings.sweep(day * 3);
        assert!(crossings.0.lock().seen.is_empty());
    }
}
