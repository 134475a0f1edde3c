//! Tenants' sessions with a server: those that were used last.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// The maximum number of sessions with one server.
const SESSIONS_MAX: usize = 256;
/// The time after which a session that is not used ends.
const IDLE_MAX: Duration = Duration::from_secs(600);

/// A tenant's connection, once there is one.
type Session<C> = Arc<tokio::sync::Mutex<Option<C>>>;

/// Connections by tenant, each with the time of its last use. A connection ends when its last user is done.
#[derive(Debug)]
pub(super) struct Sessions<C>(Mutex<HashMap<String, (Instant, Session<C>)>>);

impl<C> Default for Sessions<C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<C> Sessions<C> {
    pub(super) fn of(&self, tenant: String, now: Instant) -> Session<C> {
        let mut sessions = self.0.lock();
        if sessions.len() >= SESSIONS_MAX && !sessions.contains_key(&tenant) {
            let oldest = sessions.iter().min_by_key(|(_, (used, _))| *used).map(|(tenant, _)| tenant.clone());
            oldest.iter().for_each(|tenant| drop(sessions.remove(tenant)));
        }
        let (used, session) = sessions.entry(tenant).or_insert_with(|| (now, Session::default()));
        *used = now;
        Arc::clone(session)
    }

    /// Ends the sessions that were not used for long.
    pub(super) fn expire(&self, now: Instant) {
        self.0.lock().retain(|_, (used, _)| now.saturating_duration_since(*used) < IDLE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_used_stay() {
        let (sessions, now) = (Sessions::<()>::default(), Instant::now());
        let first = sessions.of("0".into(), now);
        (1..=SESSIONS_MAX as u64).for_each(|n| drop(sessions.of(n.to_string(), now + Duration::from_millis(n))));
        assert!(!Arc::ptr_eq(&first, &sessions.of("0".into(), now)), "the one that was used last is gone");
        assert_eq!(sessions.0.lock().len(), SESSIONS_MAX);
        let late = now + IDLE_MAX;
        let used = sessions.of("7".into(), late);
        sessions.expire(late + Duration::from_secs(1));
        assert!(sessions.0.lock().len() == 1 && Arc::ptr_eq(&used, &sessions.of("7".into(), late)));
    }
}
