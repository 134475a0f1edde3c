//! Quotas: a request reserves its maximum use, and settles its actual use. A pure machine: time is an argument, since any fixed moment, and
//! a time before an earlier one counts as the earlier one.
//!
//! ```text
//!   reserve ──► open ──settle──► used tokens stay in their windows
//!                │ ├──cancel──► as if it had never been
//!                │ └──deadline──► settled in full: its holder is lost
//!                └ counts as running
//! ```
//!
//! A request passes only if every scope that it falls under (its tenant, its key, its tenant with this model) has room for all of it; then
//! all are charged at once. So no window ever holds more than its limit, whatever the order of calls.
//!
//! Money is counted by the calendar's days and months, and a request's price in those in which it was let pass. A request without a price
//! passes whatever was spent.

use crate::{
    calendar::Period,
    limits::Limits,
    window::{SlotNumber, Window},
};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

/// A set of requests that are limited together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    Tenant(Arc<str>),
    Key(Arc<str>),
    /// The requests of a tenant to one model.
    Model(Arc<str>, Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Requests,
    Tokens,
    TokensPerDay,
    Concurrent,
    /// Millionths of the currency, in a day or month of the calendar.
    Spend(Period),
}

/// The tokens and money that a request uses: at most, while it runs, and in fact, when it has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    pub tokens: u64,
    /// The price in millionths of the currency.
    pub cost_micros: u64,
}

/// The kind of thing that a limit bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScopeKind {
    Tenant,
    Key,
    Model,
}

impl Scope {
    pub fn kind(&self) -> ScopeKind {
        match self {
            Self::Tenant(_) => ScopeKind::Tenant,
            Self::Key(_) => ScopeKind::Key,
            Self::Model(..) => ScopeKind::Model,
        }
    }
}

impl ScopeKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Key => "key",
            Self::Model => "model",
        }
    }
}

/// A reservation, to be settled or cancelled once.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Reservation(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is room after `retry`, unless other requests take it.
    Wait { scope: ScopeKind, kind: Kind, limit: u64, used: u64, needed: u64, retry: Duration },
    /// The request needs more than the whole limit.
    Never { scope: ScopeKind, kind: Kind, limit: u64, needed: u64 },
}

/// The level of the scope with the least left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    pub limit: u64,
    pub remaining: u64,
    /// Time until all of it is available again.
    pub reset: Duration,
}

/// The levels per minute, `None` without a limit, and the soft budgets that are used up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub requests: Option<Level>,
    pub tokens: Option<Level>,
    pub warnings: Vec<Warning>,
}

/// A soft budget that is reached, with what running requests may still cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub scope: Scope,
    pub period: Period,
    pub soft: u64,
    pub hard: Option<u64>,
    pub spent: u64,
}

/// The requests and tokens of a scope in the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub requests: u64,
    pub tokens: u64,
    /// Time until none of it counts any more.
    pub reset: Duration,
    pub spent: Spent,
}

/// The money that was spent today and this month, with what running requests cost at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    pub day_micros: u64,
    pub month_micros: u64,
}

#[derive(Debug, Default)]
pub struct Quota {
    now: Duration,
    scopes: HashMap<Scope, State>,
    open: HashMap<u64, Open>,
    next: u64,
}

#[derive(Debug)]
struct State {
    minute: Window,
    day: Window,
    running: u64,
    spent_day: Sum,
    spent_month: Sum,
}

/// The money that was spent in one period of the calendar.
#[derive(Clone, Copy, Debug)]
struct Sum {
    period: Period,
    number: u64,
    micros: u64,
}

#[derive(Debug)]
struct Open {
    charged: Vec<(Scope, SlotNumber, SlotNumber)>,
    used: Use,
    /// The time at which it was let pass, in whose day and month its price counts.
    at: Duration,
    deadline: Duration,
}

/// The retry time of a request that waits only for running ones to end.
const CONCURRENT_RETRY: Duration = Duration::from_secs(1);

impl Default for State {
    fn default() -> Self {
        let [spent_day, spent_month] = Period::ALL.map(|period| Sum { period, number: 0, micros: 0 });
        Self { minute: Window::minute(), day: Window::day(), running: 0, spent_day, spent_month }
    }
}

impl Sum {
    /// Begins the period of `now`, if an earlier one is over.
    fn advance(&mut self, now: Duration) {
        let number = self.period.number(now);
        if number > self.number {
            (self.number, self.micros) = (number, 0);
        }
    }

    /// Corrects what was spent at `at` from `was` to `is`, unless that period is over.
    fn correct(&mut self, at: Duration, was: u64, is: u64) {
        if self.period.number(at) == self.number {
            self.micros = self.micros.saturating_sub(was).saturating_add(is);
        }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.minute.is_empty() && self.day.is_empty() && self.spent_month.micros == 0 && self.spent_day.micros == 0
    }

    fn advance(&mut self, now: Duration) {
        self.minute.advance(now);
        self.day.advance(now);
        self.spent_day.advance(now);
        self.spent_month.advance(now);
    }

    /// Adds a request, and returns the slots of its tokens.
    fn add(&mut self, now: Duration, used: Use) -> (SlotNumber, SlotNumber) {
        self.advance(now);
        self.spent_day.correct(now, 0, used.cost_micros);
        self.spent_month.correct(now, 0, used.cost_micros);
        (self.minute.add(now, used.tokens), self.day.add(now, used.tokens))
    }

    fn spent(&self) -> Spent {
        Spent { day_micros: self.spent_day.micros, month_micros: self.spent_month.micros }
    }

    /// Checks for room for `requests` more, which use `needed` in all.
    fn check(&self, now: Duration, (scope, limits): &(Scope, Limits), requests: u64, needed: Use) -> Result<(), Refusal> {
        let (scope, Use { tokens, cost_micros }) = (scope.kind(), needed);
        let spend = |period: Period, spent: Sum| (Kind::Spend(period), limits.budgets.of(period).hard, spent.micros, cost_micros);
        let rows = [
            (Kind::Requests, limits.requests_per_minute, self.minute.requests(), requests),
            (Kind::Tokens, limits.tokens_per_minute, self.minute.tokens(), tokens),
            (Kind::TokensPerDay, limits.tokens_per_day, self.day.tokens(), tokens),
            (Kind::Concurrent, limits.concurrent, self.running, requests),
            spend(Period::Day, self.spent_day),
            spend(Period::Month, self.spent_month),
        ];
        let mut worst: Option<Refusal> = None;
        for (kind, limit, used, needed) in rows {
            let Some(limit) = limit else { continue };
            if matches!(kind, Kind::Spend(_)) && needed == 0 {
                continue;
            }
            if needed > limit {
                return Err(Refusal::Never { scope, kind, limit, needed });
            }
            let over = used.saturating_add(needed).saturating_sub(limit);
            if over == 0 {
                continue;
            }
            let retry = match kind {
                Kind::Requests => self.minute.until_freed(now, over, 0),
                Kind::Tokens => self.minute.until_freed(now, 0, over),
                Kind::TokensPerDay => self.day.until_freed(now, 0, over),
                Kind::Concurrent => CONCURRENT_RETRY,
                Kind::Spend(period) => period.left(now),
            };
            let refusal = Refusal::Wait { scope, kind, limit, used, needed, retry };
            if worst.is_none_or(|worst| worst.retry() < retry) {
                worst = Some(refusal);
            }
        }
        worst.map_or(Ok(()), Err)
    }
}

impl Standing {
    /// The levels of the scopes with the least left.
    pub fn of<'a>(scopes: impl Iterator<Item = (&'a (Scope, Limits), Used)>) -> Self {
        let mut standing = Self::default();
        for ((scope, limits), Used { requests, tokens, reset, spent }) in scopes {
            let rows =
                [(&mut standing.requests, limits.requests_per_minute, requests), (&mut standing.tokens, limits.tokens_per_minute, tokens)];
            for (level, limit, used) in rows {
                let Some(limit) = limit else { continue };
                let ours = Level { limit, remaining: limit.saturating_sub(used), reset };
                if level.is_none_or(|level| ours.remaining < level.remaining) {
                    *level = Some(ours);
                }
            }
            for (period, spent) in [(Period::Day, spent.day_micros), (Period::Month, spent.month_micros)] {
                let budget = limits.budgets.of(period);
                if let Some(soft) = budget.soft.filter(|soft| spent >= *soft) {
                    standing.warnings.push(Warning { scope: scope.clone(), period, soft, hard: budget.hard, spent });
                }
            }
        }
        standing
    }
}

impl Refusal {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Wait { kind, .. } | Self::Never { kind, .. } => *kind,
        }
    }

    fn retry(&self) -> Duration {
        match self {
            Self::Wait { retry, .. } => *retry,
            Self::Never { .. } => Duration::MAX,
        }
    }
}

impl Quota {
    /// Reserves room for a request that uses at most `used`, in all scopes or in none. At `deadline` the reservation counts as lost: by
    /// then the request has ended, or its holder has.
    pub fn reserve(&mut self, now: Duration, scopes: &[(Scope, Limits)], used: Use, deadline: Duration) -> Result<Reservation, Refusal> {
        let now = self.advance(now, scopes);
        self.check(now, scopes, 1, used)?;
        Ok(self.charge(now, scopes, used, deadline))
    }

    /// Charges a request that was let pass elsewhere, whatever the limits.
    pub fn charge(&mut self, now: Duration, scopes: &[(Scope, Limits)], used: Use, deadline: Duration) -> Reservation {
        let now = self.advance(now, scopes);
        let charged = scopes.iter().map(|(scope, _)| {
            let state = self.scopes.entry(scope.clone()).or_default();
            state.running += 1;
            let (minute, day) = state.add(now, used);
            (scope.clone(), minute, day)
        });
        let charged = charged.collect();
        self.next += 1;
        self.open.insert(self.next, Open { charged, used, at: now, deadline });
        Reservation(self.next)
    }

    /// Checks whether a request could pass before its tokens are known. Charges nothing.
    pub fn peek(&mut self, now: Duration, scopes: &[(Scope, Limits)]) -> Result<(), Refusal> {
        let now = self.advance(now, scopes);
        self.check(now, scopes, 1, Use::default())
    }

    /// Settles a request that has ended, and what it has used.
    pub fn settle(&mut self, reservation: Reservation, used: Use) {
        self.end(reservation.0, used, false);
    }

    /// Cancels the reservation of a request that was not accepted after all.
    pub fn cancel(&mut self, reservation: Reservation) {
        self.end(reservation.0, Use::default(), true);
    }

    /// Restores a request that an earlier process let pass. To be called in order of time, before any other call.
    pub fn restore(&mut self, at: Duration, scopes: &[(Scope, Limits)], used: Use) {
        let at = self.advance(at, scopes);
        for (scope, _) in scopes {
            self.scopes.entry(scope.clone()).or_default().add(at, used);
        }
    }

    /// Restores the money that an earlier process let a scope spend in the day and the month of `now`.
    pub fn restore_spend(&mut self, now: Duration, scope: Scope, spent: Spent) {
        self.now = self.now.max(now);
        let state = self.scopes.entry(scope).or_default();
        state.advance(self.now);
        state.spent_day.correct(now, 0, spent.day_micros);
        state.spent_month.correct(now, 0, spent.month_micros);
    }

    /// The money that was spent, of each scope that has spent any this month.
    pub fn spent(&mut self, now: Duration) -> Vec<(Scope, Spent)> {
        self.now = self.now.max(now);
        let now = self.now;
        self.scopes.values_mut().for_each(|state| state.advance(now));
        let spent = self.scopes.iter().map(|(scope, state)| (scope.clone(), state.spent()));
        spent.filter(|(_, spent)| *spent != Spent::default()).collect()
    }

    pub fn standing(&mut self, now: Duration, scopes: &[(Scope, Limits)]) -> Standing {
        let now = self.advance(now, scopes);
        Standing::of(scopes.iter().map(|scope| {
            let used = self.scopes.get(&scope.0).map_or_else(Used::default, |state| Used {
                requests: state.minute.requests(),
                tokens: state.minute.tokens(),
                reset: state.minute.until_empty(now),
                spent: state.spent(),
            });
            (scope, used)
        }))
    }

    /// Settles lost reservations, and drops scopes with nothing left to count. To be called periodically.
    pub fn sweep(&mut self, now: Duration) {
        self.now = self.now.max(now);
        let lost: Vec<_> = self.open.iter().filter(|(_, open)| open.deadline <= self.now).map(|(id, open)| (*id, open.used)).collect();
        for (id, used) in lost {
            self.end(id, used, false);
        }
        let now = self.now;
        self.scopes.retain(|_, state| {
            state.advance(now);
            !state.is_idle()
        });
    }

    /// The number of running requests.
    pub fn running(&self) -> usize {
        self.open.len()
    }

    fn advance(&mut self, now: Duration, scopes: &[(Scope, Limits)]) -> Duration {
        self.now = self.now.max(now);
        for (scope, _) in scopes {
            if let Some(state) = self.scopes.get_mut(scope) {
                state.advance(self.now);
            }
        }
        self.now
    }

    fn check(&self, now: Duration, scopes: &[(Scope, Limits)], requests: u64, needed: Use) -> Result<(), Refusal> {
        let fresh = State::default();
        let refusals = scopes.iter().filter_map(|scope| {
            let state = self.scopes.get(&scope.0).unwrap_or(&fresh);
            state.check(now, scope, requests, needed).err()
        });
        refusals.max_by_key(Refusal::retry).map_or(Ok(()), Err)
    }

    fn end(&mut self, id: u64, used: Use, gone: bool) {
        // A reservation that was lost at its deadline is already settled.
        let Some(open) = self.open.remove(&id) else { return };
        for (scope, minute, day) in open.charged {
            let Some(state) = self.scopes.get_mut(&scope) else { continue };
            state.running -= 1;
            state.minute.correct(minute, open.used.tokens, used.tokens, gone);
            state.day.correct(day, open.used.tokens, used.tokens, gone);
            state.spent_day.correct(open.at, open.used.cost_micros, used.cost_micros);
            state.spent_month.correct(open.at, open.used.cost_micros, used.cost_micros);
        }
    }

    /// Panics if the state is inconsistent.
    pub fn check_integrity(&self) {
        let mut running: HashMap<&Scope, u64> = HashMap::new();
        for open in self.open.values() {
            let distinct: HashSet<_> = open.charged.iter().map(|(scope, ..)| scope).collect();
            assert_eq!(distinct.len(), open.charged.len(), "a request is charged once to each of its scopes");
            distinct.into_iter().for_each(|scope| *running.entry(scope).or_default() += 1);
        }
        for (scope, state) in &self.scopes {
            assert_eq!(state.running, running.remove(scope).unwrap_or(0), "{scope:?}");
            state.minute.check_integrity();
            state.day.check_integrity();
        }
        assert!(running.is_empty(), "a running request's scopes are remembered");
    }
}

#[cfg(test)]
mod tests;
