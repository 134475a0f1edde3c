//! Fair order of tenants: a virtual counter of served tokens per tenant (Sheng et al., "Fairness in Serving Large Language Models",
//! OSDI'24). The tenant that was served least goes first, so one tenant's flood waits behind itself.
//!
//! A tenant that returns after a pause starts no lower than the least counter of those that stayed: a pause earns no credit.

use std::collections::HashMap;

/// Weights of served tokens by kind: a generated token takes a step of its own.
const PROMPT_WEIGHT: f64 = 1.0;
const DRAWN_WEIGHT: f64 = 2.0;
/// The number of idle tenants that are remembered. A forgotten tenant starts again at the floor.
const IDLE_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Fairness {
    tenants: HashMap<u64, Tenant>,
    /// A lower bound of the counters of all tenants with requests. It never falls.
    floor: f64,
    idle: usize,
}

#[derive(Debug, Default)]
struct Tenant {
    served: f64,
    requests: u32,
}

impl Fairness {
    /// Counts a new request of a tenant.
    pub(crate) fn begin(&mut self, tenant: u64) {
        let floor = self.floor;
        let state = self.tenants.entry(tenant).or_insert_with(|| {
            self.idle += 1;
            Tenant { served: floor, requests: 0 }
        });
        if state.requests == 0 {
            self.idle -= 1;
            state.served = state.served.max(floor);
        }
        state.requests += 1;
    }

    /// Counts the end of one of a tenant's requests.
    pub(crate) fn end(&mut self, tenant: u64) {
        let Some(state) = self.tenants.get_mut(&tenant) else { return };
        state.requests = state.requests.saturating_sub(1);
        if state.requests == 0 {
            self.idle += 1;
            self.raise_floor();
            if self.idle > IDLE_MAX {
                self.tenants.retain(|_, tenant| tenant.requests > 0);
                self.idle = 0;
            }
        }
    }

    pub(crate) fn charge_prompt(&mut self, tenant: u64, tokens: u32) {
        self.charge(tenant, PROMPT_WEIGHT * f64::from(tokens));
    }

    pub(crate) fn charge_drawn(&mut self, tenant: u64) {
        self.charge(tenant, DRAWN_WEIGHT);
    }

    fn charge(&mut self, tenant: u64, tokens: f64) {
        if let Some(state) = self.tenants.get_mut(&tenant) {
            state.served += tokens;
        }
    }

    /// The weighted number of tokens served to a tenant, counted from the floor at which it started. The least goes first.
    pub(crate) fn served(&self, tenant: u64) -> f64 {
        self.tenants.get(&tenant).map_or(self.floor, |tenant| tenant.served)
    }

    fn raise_floor(&mut self) {
        let active = self.tenants.values().filter(|tenant| tenant.requests > 0).map(|tenant| tenant.served);
        let least = active.min_by(f64::total_cmp);
        // If no tenant is left, all start alike.
        let last = || self.tenants.values().map(|tenant| tenant.served).fold(self.floor, f64::max);
        self.floor = self.floor.max(least.unwrap_or_else(last));
    }

    /// Panics if the state is inconsistent. `requests` lists the tenant of each request that has not ended.
    pub(crate) fn check_integrity(&self, requests: impl Iterator<Item = u64>) {
        let mut counted: HashMap<u64, u32> = HashMap::new();
        requests.for_each(|tenant| *counted.entry(tenant).or_default() += 1);
        for (tenant, state) in &self.tenants {
            assert_eq!(state.requests, counted.remove(tenant).unwrap_or(0), "requests of tenant {tenant}");
            assert!(state.served.is_finite() && (state.requests == 0 || state.served >= 0.0));
        }
        assert!(counted.is_empty(), "tenants are unknown: {counted:?}");
        assert_eq!(self.idle, self.tenants.values().filter(|tenant| tenant.requests == 0).count(), "idle tenants");
        assert!(self.idle <= IDLE_MAX + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_served_least_goes_first_and_a_pause_earns_nothing() {
        let mut fairness = Fairness::default();
        let (flood, quiet, late) = (1, 2, 3);
        (0..50).for_each(|_| fairness.begin(flood));
        fairness.begin(quiet);
        (0..10).for_each(|_| fairness.charge_prompt(flood, 1000));
        fairness.charge_prompt(quiet, 500);
        fairness.charge_drawn(quiet);
        assert!(fairness.served(quiet) < fairness.served(flood));
        fairness.end(quiet);
        fairness.check_integrity([flood; 50].into_iter());
        // The flood continues alone; a tenant that arrives now, new or returning, is level with it.
        (0..10).for_each(|_| fairness.charge_prompt(flood, 1000));
        fairness.end(flood);
        fairness.begin(late);
        fairness.end(late);
        fairness.begin(quiet);
        assert!(fairness.served(quiet) >= 10_000.0, "{fairness:?}");
        for tenant in 10..10 + 2 * IDLE_MAX as u64 {
            fairness.begin(tenant);
            fairness.end(tenant);
        }
        fairness.check_integrity([flood; 49].into_iter().chain([quiet]));
    }
}
