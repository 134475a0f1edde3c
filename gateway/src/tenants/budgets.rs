//! Budgets: what answers and operators are told, and what is kept of what was spent.

use super::{Caller, Tenants};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use tidemill_tenancy::{
    calendar::{self, Period},
    limits::Limits,
    money,
    quota::{Scope, Spent, Warning},
};

impl Caller {
    /// The value of the header that says which soft budget is used up: the one with the least left, relative to its size.
    pub fn budget_warning(&self) -> Option<String> {
        let used = |warning: &&Warning| warning.spent as f64 / warning.hard.unwrap_or(warning.soft).max(1) as f64;
        let warning = self.standing()?.warnings.iter().max_by(|a, b| used(a).total_cmp(&used(b)))?;
        let Warning { scope, period, soft, hard, spent } = warning;
        let [soft, spent] = [soft, spent].map(|micros| money::written(*micros));
        let hard = hard.map_or("none".into(), money::written);
        Some(format!("{}-{}; soft={soft}; hard={hard}; spent={spent}", scope.kind().name(), period.name()))
    }
}

impl Tenants {
    /// Brings the sums that a next process begins with up to date. Blocks: not for the event loop.
    pub fn keep_spend(&self) {
        let Some(ledger) = &self.ledger else { return };
        let mut ledger = ledger.lock();
        if let Err(error) = ledger.catch_up() {
            tracing::warn!(%error, "could not add up what was spent; it is tried again");
        } else if let Err(error) = ledger.write() {
            tracing::warn!(%error, "could not write what was spent: the next start reads more of the usage log; it is tried again");
        }
    }

    /// The money that tenants, and keys with a budget, have spent by requests to this coordinator, beside their budgets.
    pub fn spend_report(&self) -> Value {
        let now = self.now();
        let spent: HashMap<Scope, Spent> = self.limiter.spent(now).into_iter().collect();
        let row = |scope: &Scope, limits: Limits, fields: Value| {
            let spent = spent.get(scope).copied().unwrap_or_default();
            let mut row = fields.as_object().cloned().unwrap_or_default();
            for (period, micros) in [(Period::Day, spent.day_micros), (Period::Month, spent.month_micros)] {
                let budget = limits.budgets.of(period);
                let written = |micros: Option<u64>| micros.map(money::written);
                let of = json!({"spent": money::written(micros), "spent_micros": micros, "soft": written(budget.soft), "hard": written(budget.hard)});
                row.insert(period.name().into(), of);
            }
            Value::from(row)
        };
        let directory = self.authentication.directory.read();
        let mut tenants: Map<String, Value> = Map::new();
        for tenant in directory.tenants() {
            let limits = self.tiers.get(&tenant.tier).map_or_else(Limits::default, |tier| tier.limits(&tenant.limits));
            let scope = Scope::Tenant(tenant.id.as_str().into());
            tenants.insert(tenant.id.clone(), row(&scope, limits, json!({"tenant": tenant.id})));
        }
        // Tenants of an identity provider's tokens may have no record.
        for scope in spent.keys() {
            if let Scope::Tenant(id) = scope {
                tenants.entry(&**id).or_insert_with(|| row(scope, Limits::default(), json!({"tenant": id})));
            }
        }
        let keys = directory.keys().filter_map(|key| {
            let (scope, limits) = (Scope::Key(key.id.as_str().into()), key.limits.over(Limits::default()));
            let counts = limits.budgets != Default::default() || spent.contains_key(&scope);
            counts.then(|| row(&scope, limits, json!({"tenant": key.tenant, "key": key.id, "user": key.user})))
        });
        let resets = Period::ALL.map(|period| (period.name().to_owned(), calendar::written(period.end(period.number(now))).into()));
        json!({
            "tenants": tenants.into_values().collect::<Vec<_>>(), "keys": keys.collect::<Vec<_>>(),
            "resets": Map::from_iter(resets),
        })
    }
}
