//! The quotas of one coordinator: by itself, as a share of every limit, or exactly, on a server that all coordinators share.
//!
//! While the server decides, this coordinator charges what it lets pass to its own windows, too: when the server fails, the share applies
//! to them at once. What it then lets pass, the server is told when it is back.

use crate::{
    limits::{Limits, Share},
    quota::{Kind, Quota, Refusal, Reservation, Scope, ScopeKind, Spent, Standing, Use},
    shared::{self, Lease, SharedQuota},
};
use parking_lot::Mutex;
use std::{collections::HashMap, time::Duration};

/// The time for which a refusal by the server is repeated to requests that would need as much at least.
const REFUSAL_KEPT: Duration = Duration::from_millis(100);
/// The retry time of a request that is too large for this coordinator's share, and not for the limit.
const SHARE_RETRY: Duration = Duration::from_secs(5);

/// A refusal, and how the request's scopes stood.
type Refused = (Refusal, Standing);

#[derive(Debug)]
pub struct Limiter {
    share: Share,
    local: Mutex<Quota>,
    shared: Option<SharedQuota>,
    /// Scopes whose requests or places are used up, until when, and what was answered.
    used_up: Mutex<HashMap<Scope, (Duration, Refused)>>,
}

/// The quota of a running request, to be settled or cancelled once.
#[derive(Debug)]
pub struct Held {
    local: Reservation,
    lease: Option<Lease>,
}

/// A request, with the whole limits of its scopes.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub tenant: &'a str,
    pub scopes: &'a [(Scope, Limits)],
    /// The most that it uses.
    pub most: Use,
    pub now: Duration,
    /// The time after which it counts as lost.
    pub lasts: Duration,
}

impl Limiter {
    /// Begins with what an earlier process let pass. Without a server, this coordinator has its share of every limit.
    pub fn new(share: Share, restored: Quota, shared: Option<SharedQuota>) -> Self {
        Self { share, local: Mutex::new(restored), shared, used_up: Mutex::default() }
    }

    /// The limits that apply now.
    pub fn applied(&self, limits: Limits) -> Limits {
        if self.asks() { limits } else { self.share.of(limits) }
    }

    /// Whether the server decides now.
    fn asks(&self) -> bool {
        self.shared.as_ref().is_some_and(SharedQuota::is_used)
    }

    fn applied_to(&self, scopes: &[(Scope, Limits)]) -> Vec<(Scope, Limits)> {
        scopes.iter().map(|(scope, limits)| (scope.clone(), self.applied(*limits))).collect()
    }

    /// Reserves what a request uses at most, in all scopes or in none, and returns how they stand after that.
    pub async fn reserve(&self, request: Request<'_>) -> (Result<Held, Refusal>, Standing) {
        let Request { tenant, scopes, most, now, lasts } = request;
        let Some(shared) = self.shared.as_ref().filter(|_| !scopes.is_empty()) else {
            let (reserved, standing) = self.reserve_share(request);
            return (reserved.map(|local| Held { local, lease: None }), standing);
        };
        let request_there = shared::Request { tenant, scopes, most, lasts };
        match shared.reserve(request_there).await {
            Some(Ok((lease, standing))) => {
                let local = self.local.lock().charge(now, scopes, most, now + lasts);
                (Ok(Held { local, lease: Some(lease) }), standing)
            }
            Some(Err(refused)) => {
                self.note_used_up(now, scopes, &refused);
                let (refusal, standing) = refused;
                (Err(refusal), standing)
            }
            None => {
                let (reserved, standing) = self.reserve_share(request);
                let reserved = reserved.map_err(|refusal| until_shared(refusal, scopes));
                (reserved.map(|local| Held { local, lease: Some(shared.charge(request_there)) }), standing)
            }
        }
    }

    fn reserve_share(&self, request: Request<'_>) -> (Result<Reservation, Refusal>, Standing) {
        let Request { tenant: _, scopes, most, now, lasts } = request;
        let scopes: Vec<_> = scopes.iter().map(|(scope, limits)| (scope.clone(), self.share.of(*limits))).collect();
        let mut local = self.local.lock();
        let reserved = local.reserve(now, &scopes, most, now + lasts);
        (reserved, local.standing(now, &scopes))
    }

    /// Checks, without a question to the server, whether a request could pass before its tokens are known. Charges nothing.
    pub fn peek(&self, now: Duration, scopes: &[(Scope, Limits)]) -> Result<(), Box<(Refusal, Standing)>> {
        let applied = self.applied_to(scopes);
        let mut local = self.local.lock();
        let used_up = || {
            let used_up = self.used_up.lock();
            scopes.iter().find_map(|(scope, _)| used_up.get(scope).filter(|(until, _)| now < *until).map(|(_, refused)| refused.clone()))
        };
        match local.peek(now, &applied) {
            Err(refusal) => Err(Box::new((refusal, local.standing(now, &applied)))),
            Ok(()) => match self.asks().then(used_up).flatten() {
                Some(refused) => Err(Box::new(refused)),
                None => Ok(()),
            },
        }
    }

    /// Remembers, for a moment, that no request passes, however few its tokens.
    fn note_used_up(&self, now: Duration, scopes: &[(Scope, Limits)], refused: &Refused) {
        let Refusal::Wait { kind: kind @ (Kind::Requests | Kind::Concurrent), limit, retry, .. } = refused.0 else { return };
        // A request's model is not known when it is peeked at.
        let scope = scopes.iter().find(|(scope, limits)| scope.kind() != ScopeKind::Model && limits.of(kind) == Some(limit));
        if let Some((scope, _)) = scope {
            self.used_up.lock().insert(scope.clone(), (now + retry.min(REFUSAL_KEPT), refused.clone()));
        }
    }

    /// Settles a request that has ended, and what it has used.
    pub fn settle(&self, held: Held, used: Use) {
        self.local.lock().settle(held.local, used);
        if let Some((shared, lease)) = self.shared.as_ref().zip(held.lease) {
            shared.settle(lease, used);
        }
    }

    /// Cancels the reservation of a request that was not accepted after all.
    pub fn cancel(&self, held: Held) {
        self.local.lock().cancel(held.local);
        if let Some((shared, lease)) = self.shared.as_ref().zip(held.lease) {
            shared.cancel(lease);
        }
    }

    /// Reclaims what is lost or no longer counts. To be called periodically.
    pub fn sweep(&self, now: Duration) {
        self.local.lock().sweep(now);
        self.used_up.lock().retain(|_, (until, _)| now < *until);
    }

    /// The money that requests of this coordinator have spent, of each scope that has spent any this month.
    pub fn spent(&self, now: Duration) -> Vec<(Scope, Spent)> {
        self.local.lock().spent(now)
    }

    pub fn has_server(&self) -> bool {
        self.shared.is_some()
    }

    /// The counts of this coordinator's decisions and of the server's failures; `None` without a server.
    pub fn shared_counts(&self) -> Option<shared::Counts> {
        self.shared.as_ref().map(SharedQuota::counts)
    }

    /// Waits until the server has been told everything, or `longest`.
    pub async fn flush(&self, longest: Duration) {
        if let Some(shared) = &self.shared {
            shared.flush(longest).await;
        }
    }
}

/// A request that the whole limits could allow is not too large for ever, only while the share applies.
fn until_shared(refusal: Refusal, scopes: &[(Scope, Limits)]) -> Refusal {
    match refusal {
        Refusal::Never { scope, kind, limit, needed }
            if scopes.iter().all(|(_, limits)| limits.of(kind).is_none_or(|whole| needed <= whole)) =>
        {
            Refusal::Wait { scope, kind, limit, used: 0, needed, retry: SHARE_RETRY }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
