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

use crate::{
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
}

/// A reservation, to be settled or cancelled once.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Reservation(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is room after `retry`, unless other requests take it.
    Wait { kind: Kind, limit: u64, used: u64, needed: u64, retry: Duration },
    /// The request needs more than the whole limit.
    Never { kind: Kind, limit: u64, needed: u64 },
}

/// The level of the scope with the least left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    pub limit: u64,
    pub remaining: u64,
    /// Time until all of it is available again.
    pub reset: Duration,
}

/// The levels per minute; `None` without a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub requests: Option<Level>,
    pub tokens: Option<Level>,
}

/// The requests and tokens of a scope in the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub requests: u64,
    pub tokens: u64,
    /// Time until none of it counts any more.
    pub reset: Duration,
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
}

#[derive(Debug)]
struct Open {
    charged: Vec<(Scope, SlotNumber, SlotNumber)>,
    tokens: u64,
    deadline: Duration,
}

/// The retry time of a request that waits only for running ones to end.
const CONCURRENT_RETRY: Duration = Duration::from_secs(1);

impl Default for State {
    fn default() -> Self {
        Self { minute: Window::minute(), day: Window::day(), running: 0 }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.minute.is_empty() && self.day.is_empty()
    }

    /// Checks for room for `requests` more, with `tokens` in all.
    fn check(&self, now: Duration, limits: &Limits, requests: u64, tokens: u64) -> Result<(), Refusal> {
        let rows = [
            (Kind::Requests, limits.requests_per_minute, self.minute.requests(), requests),
            (Kind::Tokens, limits.tokens_per_minute, self.minute.tokens(), tokens),
            (Kind::TokensPerDay, limits.tokens_per_day, self.day.tokens(), tokens),
            (Kind::Concurrent, limits.concurrent, self.running, requests),
        ];
        let mut worst: Option<Refusal> = None;
        for (kind, limit, used, needed) in rows {
            let Some(limit) = limit else { continue };
            if needed > limit {
                return Err(Refusal::Never { kind, limit, needed });
            }
            let over = (used + needed).saturating_sub(limit);
            if over == 0 {
                continue;
            }
            let retry = match kind {
                Kind::Requests => self.minute.until_freed(now, over, 0),
                Kind::Tokens => self.minute.until_freed(now, 0, over),
                Kind::TokensPerDay => self.day.until_freed(now, 0, over),
                Kind::Concurrent => CONCURRENT_RETRY,
            };
            let refusal = Refusal::Wait { kind, limit, used, needed, retry };
            if worst.is_none_or(|worst| worst.retry() < retry) {
                worst = Some(refusal);
            }
        }
        worst.map_or(Ok(()), Err)
    }
}

impl Standing {
    /// The levels of the scopes with the least left.
    pub fn of(scopes: impl Iterator<Item = (Limits, Used)>) -> Self {
        let mut standing = Self::default();
        for (limits, Used { requests, tokens, reset }) in scopes {
            let rows =
                [(&mut standing.requests, limits.requests_per_minute, requests), (&mut standing.tokens, limits.tokens_per_minute, tokens)];
            for (level, limit, used) in rows {
                let Some(limit) = limit else { continue };
                let ours = Level { limit, remaining: limit.saturating_sub(used), reset };
                if level.is_none_or(|level| ours.remaining < level.remaining) {
                    *level = Some(ours);
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
    /// Reserves room for a request that uses at most `tokens`, in all scopes or in none. At `deadline` the reservation counts as lost: by
    /// then the request has ended, or its holder has.
    pub fn reserve(&mut self, now: Duration, scopes: &[(Scope, Limits)], tokens: u64, deadline: Duration) -> Result<Reservation, Refusal> {
        let now = self.advance(now, scopes);
        self.check(now, scopes, 1, tokens)?;
        Ok(self.charge(now, scopes, tokens, deadline))
    }

    /// Charges a request that was let pass elsewhere, whatever the limits.
    pub fn charge(&mut self, now: Duration, scopes: &[(Scope, Limits)], tokens: u64, deadline: Duration) -> Reservation {
        let now = self.advance(now, scopes);
        let charged = scopes.iter().map(|(scope, _)| {
            let state = self.scopes.entry(scope.clone()).or_default();
            state.running += 1;
            (scope.clone(), state.minute.add(now, tokens), state.day.add(now, tokens))
        });
        let charged = charged.collect();
        self.next += 1;
        self.open.insert(self.next, Open { charged, tokens, deadline });
        Reservation(self.next)
    }

    /// Checks whether a request could pass before its tokens are known. Charges nothing.
    pub fn peek(&mut self, now: Duration, scopes: &[(Scope, Limits)]) -> Result<(), Refusal> {
        let now = self.advance(now, scopes);
        self.check(now, scopes, 1, 0)
    }

    /// Settles a request that has ended and has used `used` tokens.
    pub fn settle(&mut self, reservation: Reservation, used: u64) {
        self.end(reservation.0, used, false);
    }

    /// Cancels the reservation of a request that was not accepted after all.
    pub fn cancel(&mut self, reservation: Reservation) {
        self.end(reservation.0, 0, true);
    }

    /// Restores a request that an earlier process let pass. To be called in order of time, before any other call.
    pub fn restore(&mut self, at: Duration, scopes: &[(Scope, Limits)], tokens: u64) {
        let at = self.advance(at, scopes);
        for (scope, _) in scopes {
            let state = self.scopes.entry(scope.clone()).or_default();
            state.minute.add(at, tokens);
            state.day.add(at, tokens);
        }
    }

    pub fn standing(&mut self, now: Duration, scopes: &[(Scope, Limits)]) -> Standing {
        let now = self.advance(now, scopes);
        Standing::of(scopes.iter().map(|(scope, limits)| {
            let used = self.scopes.get(scope).map_or_else(Used::default, |state| Used {
                requests: state.minute.requests(),
                tokens: state.minute.tokens(),
                reset: state.minute.until_empty(now),
            });
            (*limits, used)
        }))
    }

    /// Settles lost reservations, and drops scopes with nothing left to count. To be called periodically.
    pub fn sweep(&mut self, now: Duration) {
        self.now = self.now.max(now);
        let lost: Vec<_> = self.open.iter().filter(|(_, open)| open.deadline <= self.now).map(|(id, open)| (*id, open.tokens)).collect();
        for (id, tokens) in lost {
            self.end(id, tokens, false);
        }
        let now = self.now;
        self.scopes.retain(|_, state| {
            state.minute.advance(now);
            state.day.advance(now);
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
                state.minute.advance(self.now);
                state.day.advance(self.now);
            }
        }
        self.now
    }

    fn check(&self, now: Duration, scopes: &[(Scope, Limits)], requests: u64, tokens: u64) -> Result<(), Refusal> {
        let fresh = State::default();
        let refusals = scopes.iter().filter_map(|(scope, limits)| {
            let state = self.scopes.get(scope).unwrap_or(&fresh);
            state.check(now, limits, requests, tokens).err()
        });
        refusals.max_by_key(Refusal::retry).map_or(Ok(()), Err)
    }

    fn end(&mut self, id: u64, used: u64, gone: bool) {
        // A reservation that was lost at its deadline is already settled.
        let Some(open) = self.open.remove(&id) else { return };
        for (scope, minute, day) in open.charged {
            let Some(state) = self.scopes.get_mut(&scope) else { continue };
            state.running -= 1;
            state.minute.correct(minute, open.tokens, used, gone);
            state.day.correct(day, open.tokens, used, gone);
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
