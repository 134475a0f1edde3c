//! Soft budgets that are used up: each request is counted, and the first of a day or a month logged.

use crate::metrics;
use parking_lot::Mutex;
use std::{collections::HashMap, time::Duration};
use tidemill_tenancy::{
    calendar::Period,
    money,
    quota::{Scope, Warning},
};

/// The soft budgets whose use was logged, each with the number of the day or the month: once is enough.
#[derive(Debug, Default)]
pub(super) struct Crossings(Mutex<HashMap<(Scope, Period), u64>>);

impl Crossings {
    /// Counts the warnings of a request, and logs those of budgets that were not used up before.
    pub(super) fn note(&self, now: Duration, tenant: &str, warnings: &[Warning]) {
        for Warning { scope, period, soft, hard, spent } in warnings {
            metrics::count_budget_warning(scope.kind().name(), period.name());
            let number = period.number(now);
            if self.0.lock().insert((scope.clone(), *period), number) == Some(number) {
                continue;
            }
            let (soft, spent, hard) = (money::written(*soft), money::written(*spent), hard.map(money::written));
            let of = scope_name(scope);
            tracing::warn!(tenant, scope = of, period = period.name(), soft, spent, hard, "a soft budget is used up");
        }
    }

    /// Forgets days and months that are over.
    pub(super) fn sweep(&self, now: Duration) {
        self.0.lock().retain(|(_, period), number| *number == period.number(now));
    }
}

fn scope_name(scope: &Scope) -> String {
    match scope {
        Scope::Tenant(tenant) => format!("tenant {tenant}"),
        Scope::Key(key) => format!("key {key}"),
        Scope::Model(tenant, model) => format!("model {model} of {tenant}"),
    }
}
