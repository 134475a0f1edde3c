//! Cached verdicts: they depend only on the question. A tenant that exceeds its share loses its own.

use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tidemill_grammar::{GrammarError, helper::Question};

/// The maximum size of all verdicts.
const BYTES_MAX: usize = 8 << 20;
/// The maximum size of one tenant's verdicts.
const SHARE_BYTES_MAX: usize = BYTES_MAX / 4;
/// The size of a verdict besides its text.
const EMPTY_BYTES: usize = 1024;

pub(crate) type Verdict = Result<String, GrammarError>;

/// A question's digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key([u8; 32]);

impl Key {
    pub(crate) fn of(question: &Question) -> Self {
        let text = serde_json::to_vec(question).expect("a question is text and numbers");
        Self(*blake3::hash(&text).as_bytes())
    }
}

#[derive(Debug, Default)]
pub(crate) struct Verdicts(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    verdicts: HashMap<Key, One>,
    bytes: usize,
    /// The size of each tenant's verdicts.
    shares: HashMap<Arc<str>, usize>,
    /// A counter of uses.
    clock: u64,
}

#[derive(Debug)]
struct One {
    verdict: Verdict,
    bytes: usize,
    tenant: Arc<str>,
    used: u64,
}

impl Verdicts {
    pub(crate) fn get(&self, key: &Key) -> Option<Verdict> {
        let mut kept = self.0.lock();
        kept.clock += 1;
        let now = kept.clock;
        let one = kept.verdicts.get_mut(key)?;
        one.used = now;
        Some(one.verdict.clone())
    }

    pub(crate) fn keep(&self, tenant: &str, key: Key, verdict: Verdict) {
        let mut kept = self.0.lock();
        if kept.verdicts.contains_key(&key) {
            return;
        }
        let bytes = EMPTY_BYTES + verdict.as_ref().map_or(0, String::len);
        let tenant = kept.shares.get_key_value(tenant).map_or_else(|| tenant.into(), |(tenant, _)| Arc::clone(tenant));
        while kept.shares.get(&tenant).copied().unwrap_or(0) + bytes > SHARE_BYTES_MAX && kept.forget_oldest(&tenant) {}
        while kept.bytes + bytes > BYTES_MAX {
            let Some(largest) = kept.shares.iter().max_by_key(|(_, bytes)| **bytes).map(|(tenant, _)| Arc::clone(tenant)) else { break };
            kept.forget_oldest(&largest);
        }
        kept.clock += 1;
        kept.bytes += bytes;
        *kept.shares.entry(Arc::clone(&tenant)).or_default() += bytes;
        let used = kept.clock;
        kept.verdicts.insert(key, One { verdict, bytes, tenant, used });
    }
}

impl Kept {
    /// Drops this tenant's least recently used verdict. Returns `false` if it has none.
    fn forget_oldest(&mut self, tenant: &Arc<str>) -> bool {
        let own = self.verdicts.iter().filter(|(_, one)| one.tenant == *tenant);
        let Some(oldest) = own.min_by_key(|(_, one)| one.used).map(|(key, _)| *key) else { return false };
        let Some(one) = self.verdicts.remove(&oldest) else { return false };
        self.bytes -= one.bytes;
        if let Some(share) = self.shares.get_mut(tenant) {
            *share -= one.bytes;
            if *share == 0 {
                self.shares.remove(tenant);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, number: usize) -> Key {
        Key(*blake3::hash(format!("{name} {number}").as_bytes()).as_bytes())
    }

    #[test]
    fn a_tenant_that_asks_for_much_loses_its_own_verdicts() {
        let verdicts = Verdicts::default();
        verdicts.keep("quiet", key("quiet", 0), Err(GrammarError::TooMuchWork));
        let text = "x".repeat(100_000);
        for number in 0..100 {
            verdicts.keep("flood", key("flood", number), Ok(text.clone()));
            assert_eq!(verdicts.get(&key("flood", 0)), Some(Ok(text.clone())), "what is asked for again stays");
        }
        assert_eq!(verdicts.get(&key("quiet", 0)), Some(Err(GrammarError::TooMuchWork)));
        assert_eq!(verdicts.get(&key("flood", 1)), None);
        let kept = verdicts.0.lock();
        assert!(kept.shares["flood"] <= SHARE_BYTES_MAX && kept.bytes == kept.shares.values().sum::<usize>());
    }

    #[test]
    fn many_tenants_together_stay_within_bounds() {
        let verdicts = Verdicts::default();
        for tenant in 0..20 {
            for number in 0..10 {
                verdicts.keep(&tenant.to_string(), key(&tenant.to_string(), number), Ok("x".repeat(100_000)));
            }
        }
        let kept = verdicts.0.lock();
        assert!(kept.bytes <= BYTES_MAX && kept.bytes == kept.verdicts.values().map(|one| one.bytes).sum::<usize>());
        assert_eq!(kept.shares.len(), 20, "none lost everything");
    }

    #[test]
    fn questions_differ_in_all_that_they_ask() {
        let schema = |model| Question::Schema { schema: "{}".into(), terms: Default::default(), model };
        let parts = |parts: &[&str]| Question::Parts {
            schema: "{}".into(),
            parts: parts.iter().map(|part| vec![(*part).to_owned()]).collect(),
            terms: Default::default(),
        };
        let grammar = |model| Question::Grammar { grammar: tidemill_proto::grammar::Grammar::Regex("{}".into()), model };
        let questions = [schema(0), schema(1), parts(&[]), parts(&[""]), parts(&["/a"]), grammar(0), grammar(1)];
        let keys: std::collections::HashSet<_> = questions.iter().map(Key::of).collect();
        assert_eq!(keys.len(), questions.len());
    }
}
