//! Sessions of browsers that have signed in: bounded, in all and per operator, each with an end. They end with the process.

use std::{collections::HashMap, sync::Arc};
use tidemill_tenancy::operators::Operator;

/// The maximum number of sessions.
const SESSIONS_MAX: usize = 256;
/// The maximum number of one operator's sessions.
const OF_ONE_MAX: usize = 8;

/// Sessions by the digest of their secret, which is nowhere but in its browser. Times are in Unix seconds.
#[derive(Debug, Default)]
pub struct Sessions {
    all: HashMap<blake3::Hash, Session>,
    /// The number of sessions that have begun.
    begun: u64,
}

#[derive(Debug)]
struct Session {
    operator: Arc<Operator>,
    number: u64,
}

impl Sessions {
    /// Begins a session, which lasts until the operator's claims expire. If there is no room, the oldest of the operator's own ends, or else
    /// the oldest of all.
    pub fn begin(&mut self, now: u64, digest: blake3::Hash, operator: Operator) {
        self.all.retain(|_, session| now < session.operator.until);
        let of_one = self.all.values().filter(|session| session.operator.subject == operator.subject).count();
        if of_one >= OF_ONE_MAX {
            self.end_oldest(|session| session.operator.subject == operator.subject);
        } else if self.all.len() >= SESSIONS_MAX {
            self.end_oldest(|_| true);
        }
        self.begun += 1;
        self.all.insert(digest, Session { operator: Arc::new(operator), number: self.begun });
    }

    pub fn find(&self, now: u64, digest: &blake3::Hash) -> Option<Arc<Operator>> {
        let session = self.all.get(digest).filter(|session| now < session.operator.until)?;
        Some(Arc::clone(&session.operator))
    }

    /// Ends a session. Returns its operator, if it had not ended before.
    pub fn end(&mut self, now: u64, digest: &blake3::Hash) -> Option<Arc<Operator>> {
        self.all.remove(digest).map(|session| session.operator).filter(|operator| now < operator.until)
    }

    fn end_oldest(&mut self, of: impl Fn(&Session) -> bool) {
        let oldest = self.all.iter().filter(|(_, session)| of(session)).min_by_key(|(_, session)| session.number);
        if let Some(digest) = oldest.map(|(digest, _)| *digest) {
            self.all.remove(&digest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operator(subject: &str, until: u64) -> Operator {
        Operator { subject: subject.into(), name: None, email: None, role: None, until }
    }

    fn digest(n: usize) -> blake3::Hash {
        blake3::hash(&n.to_le_bytes())
    }

    #[test]
    fn a_session_has_an_end() {
        let mut sessions = Sessions::default();
        sessions.begin(0, digest(1), operator("ann", 10));
        assert!(sessions.find(9, &digest(1)).is_some() && sessions.find(10, &digest(1)).is_none());
        assert!(sessions.find(9, &digest(2)).is_none());
        assert!(sessions.end(9, &digest(1)).is_some() && sessions.find(9, &digest(1)).is_none());
    }

    #[test]
    fn nobody_has_too_many_and_all_together_neither() {
        let mut sessions = Sessions::default();
        sessions.begin(0, digest(0), operator("bob", 10));
        for n in 1..=OF_ONE_MAX + 2 {
            sessions.begin(0, digest(n), operator("ann", 10));
        }
        let are_there: Vec<bool> = (0..=OF_ONE_MAX + 2).map(|n| sessions.find(1, &digest(n)).is_some()).collect();
        assert_eq!((are_there[0], are_there[1], are_there[2], are_there[3]), (true, false, false, true), "her own oldest went");
        for n in 100..100 + SESSIONS_MAX {
            sessions.begin(1, digest(n), operator(&n.to_string(), 10));
        }
        assert_eq!(sessions.all.len(), SESSIONS_MAX);
        assert!(sessions.find(1, &digest(0)).is_none() && sessions.find(1, &digest(100 + SESSIONS_MAX - 1)).is_some());
        sessions.begin(10, digest(7), operator("ann", 20));
        assert_eq!(sessions.all.len(), 1, "those that are over make room");
    }
}
