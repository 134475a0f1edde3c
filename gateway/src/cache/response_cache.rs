//! Cached answers for equal requests: the tokens that the cluster sent, under everything that determines them.
//!
//! By the exactness contract such a hit *is* the answer: on CPU workers the cluster would send the same tokens again. So only greedy and
//! seeded requests are cached, and as tokens, not text: stop strings, tools and safety checks are applied anew each time.
//!
//! A core: it has no clock. Bounded in bytes, which tenants [share](crate::base::room); the least recently used answer goes first.

use crate::base::room::Shares;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    sync::Arc,
    time::Duration,
};
use tidemill_cluster::{ChoiceUsage, NewRequest, Origin, Outcome, RequestEvent};
use tidemill_proto::message::Provenance;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of all answers together.
    pub bytes: u64,
    /// The time for which an answer is reused.
    pub keep: Duration,
}

/// A digest of all that determines an answer's tokens.
pub type Key = [u8; 32];

/// The tenant that an answer belongs to: the tenant's part of a salt.
pub type Tenant = [u8; 32];

/// Returns the tenant of a request. If no key is needed, all answers belong to one tenant.
pub fn tenant(request: &NewRequest) -> Tenant {
    request.salt.first_chunk().copied().unwrap_or_default()
}

/// The events that the cluster sent, in order.
pub type Events = Arc<[RequestEvent]>;

#[derive(Debug)]
pub struct ResponseCache {
    limits: Limits,
    answers: HashMap<Key, Kept>,
    /// Keys by tenant and last use.
    order: BTreeMap<(Tenant, u64), Key>,
    uses: u64,
    bytes: Shares<Tenant>,
}

#[derive(Debug)]
struct Kept {
    tenant: Tenant,
    events: Events,
    bytes: u64,
    since: Duration,
    used: u64,
}

impl ResponseCache {
    pub fn new(limits: Limits) -> Self {
        Self { limits, answers: HashMap::new(), order: BTreeMap::new(), uses: 0, bytes: Shares::default() }
    }

    pub fn get(&mut self, key: &Key, now: Duration) -> Option<Events> {
        if self.answers.get(key).is_some_and(|kept| now.saturating_sub(kept.since) > self.limits.keep) {
            self.remove(key);
        }
        let kept = self.answers.get_mut(key)?;
        self.uses += 1;
        self.order.remove(&(kept.tenant, kept.used));
        kept.used = self.uses;
        self.order.insert((kept.tenant, self.uses), *key);
        Some(Arc::clone(&kept.events))
    }

    /// Stores an answer, unless it is too large for the cache, or for its tenant's share.
    pub fn put(&mut self, key: Key, tenant: Tenant, events: Events, now: Duration) {
        let bytes = ENTRY_BYTES + events.iter().map(size).sum::<u64>();
        if bytes > self.limits.bytes {
            return;
        }
        self.remove(&key);
        while self.bytes.total() + bytes > self.limits.bytes {
            let losers = self.bytes.losers(self.limits.bytes, &tenant, bytes);
            let oldest = |loser: &Tenant| self.order.range((*loser, 0)..=(*loser, u64::MAX)).next().map(|(_, key)| *key);
            let Some(oldest) = losers.iter().find_map(oldest) else { return };
            self.remove(&oldest);
        }
        self.uses += 1;
        self.bytes.add(&tenant, bytes);
        self.order.insert((tenant, self.uses), key);
        self.answers.insert(key, Kept { tenant, events, bytes, since: now, used: self.uses });
    }

    fn remove(&mut self, key: &Key) {
        if let Some(kept) = self.answers.remove(key) {
            self.bytes.take(&kept.tenant, kept.bytes);
            self.order.remove(&(kept.tenant, kept.used));
        }
    }

    /// Drops all answers of a tenant. Returns their number.
    pub fn forget(&mut self, tenant: Tenant) -> u64 {
        let keys: Vec<_> = self.order.range((tenant, 0)..=(tenant, u64::MAX)).map(|(_, key)| *key).collect();
        keys.iter().for_each(|key| self.remove(key));
        keys.len() as u64
    }

    /// The number of a tenant's answers.
    pub fn held(&self, tenant: Tenant) -> u64 {
        self.order.range((tenant, 0)..=(tenant, u64::MAX)).count() as u64
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.total()
    }

    pub fn answers(&self) -> usize {
        self.answers.len()
    }
}

/// The approximate size of an answer besides its events.
const ENTRY_BYTES: u64 = 256;

/// The approximate size of an event in memory.
pub(crate) fn size(event: &RequestEvent) -> u64 {
    let of_list = |entries: usize, bytes: usize| entries * bytes;
    let top =
        |logprob: &Option<tidemill_proto::sampling::TokenLogprob>| logprob.as_ref().map_or(0, |logprob| of_list(logprob.top.len(), 8));
    let more = match event {
        RequestEvent::Token { logprob, .. } => top(logprob),
        RequestEvent::PromptLogprobs(logprobs) => logprobs.iter().map(|logprob| 40 + top(logprob)).sum(),
        RequestEvent::Embedding(numbers) => of_list(numbers.len(), 4),
        RequestEvent::Waiting { .. } | RequestEvent::Sources(_) | RequestEvent::Finished { .. } => 0,
    };
    (mem::size_of::<RequestEvent>() + more) as u64
}

/// The key of a request whose answer has this origin. It covers everything that can change a token, a log-probability or who may see them;
/// the class and the time limit cannot.
pub fn key(origin: Origin, request: &NewRequest) -> Key {
    let NewRequest { prompt, salt, class: _, sampling, stop, constraint, thought, choices, prompt_logprobs, embeds, timeout: _ } = request;
    let mut sampling = sampling.clone();
    if sampling.temperature == 0.0 {
        // Greedy requests use no seed.
        sampling.seed = 0;
    }
    let rest = (origin, salt, sampling, stop, constraint, thought, choices, prompt_logprobs, embeds);
    let rest = serde_json::to_vec(&rest).expect("plain data with finite numbers");
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(rest.len() as u64).to_le_bytes()).update(&rest);
    for token in prompt.iter() {
        hasher.update(&token.to_le_bytes());
    }
    hasher.finalize().into()
}

/// Collects an answer as it arrives.
#[derive(Debug)]
pub struct Recording {
    events: Vec<RequestEvent>,
    /// Choices that have not ended.
    open: BTreeSet<u32>,
    bytes_left: u64,
}

impl Recording {
    /// Starts to collect, up to this many bytes.
    pub fn new(choices: u32, bytes: u64) -> Self {
        Self { events: Vec::new(), open: (0..choices).collect(), bytes_left: bytes }
    }

    /// Adds an event. Returns whether the answer may still be cached.
    pub fn hear(&mut self, event: &RequestEvent) -> bool {
        let event = match event {
            RequestEvent::Waiting { .. } => return true,
            RequestEvent::Finished { outcome: Outcome::Failed(_), .. } => return false,
            RequestEvent::Finished { choice, outcome, usage } => {
                self.open.remove(choice);
                RequestEvent::Finished { choice: *choice, outcome: outcome.clone(), usage: of_hit(usage) }
            }
            other => other.clone(),
        };
        let size = size(&event);
        self.events.push(event);
        self.bytes_left.checked_sub(size).inspect(|left| self.bytes_left = *left).is_some()
    }

    /// The answer, once all choices have ended by themselves.
    pub fn whole(&mut self) -> Option<Events> {
        self.open.is_empty().then(|| mem::take(&mut self.events).into())
    }
}

/// The usage that a hit reports: the source of the prompt's KV when the answer was computed, and no times, so that the scheduler learns
/// nothing from it.
fn of_hit(usage: &ChoiceUsage) -> ChoiceUsage {
    ChoiceUsage {
        provenance: Provenance { tokens: usage.provenance.tokens, ..Provenance::default() },
        decode_worker: usage.decode_worker.clone(),
        prefill_worker: usage.prefill_worker.clone(),
        ..ChoiceUsage::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidemill_cluster::{Failure, class::ClassId};
    use tidemill_proto::{
        block::{Era, LayoutFingerprint},
        grammar::{Constraint, Grammar},
        ids::Epoch,
        message::Embeds,
        sampling::{Sampling, StopRule},
    };

    const LIMITS: Limits = Limits { bytes: 10_000, keep: Duration::from_secs(60) };
    const ORIGIN: Origin = Origin { layout: LayoutFingerprint([7; 16]), era: Era::FIRST };

    fn request() -> NewRequest {
        NewRequest {
            prompt: vec![1, 2, 3].into(),
            salt: b"tenant".to_vec(),
            class: ClassId::default(),
            sampling: Sampling { temperature: 0.7, seed: 5, ..Sampling::default() },
            stop: StopRule { max_tokens: 9, min_tokens: 0, stop_tokens: vec![2] },
            constraint: None,
            thought: None,
            choices: 1,
            prompt_logprobs: None,
            embeds: None,
            timeout: Duration::from_secs(1),
        }
    }

    fn token(token: u32) -> RequestEvent {
        RequestEvent::Token { choice: 0, token, logprob: None }
    }

    fn events(tokens: u32) -> Events {
        (0..tokens).map(token).collect()
    }

    #[test]
    fn whatever_can_change_a_token_changes_the_key() {
        let same = key(ORIGIN, &request());
        assert_eq!(key(ORIGIN, &NewRequest { class: ClassId(1), timeout: Duration::from_secs(9), ..request() }), same);
        let sampling = |change: fn(&mut Sampling)| {
            let mut request = request();
            change(&mut request.sampling);
            request
        };
        let stop = |change: fn(&mut StopRule)| {
            let mut request = request();
            change(&mut request.stop);
            request
        };
        let constraint = Constraint { grammar: Grammar::Regex("a".into()), end_tokens: vec![2], ends_late: false };
        let others = [
            NewRequest { prompt: vec![1, 2].into(), ..request() },
            NewRequest { prompt: vec![1, 2, 3, 0].into(), ..request() },
            NewRequest { salt: b"other".to_vec(), ..request() },
            NewRequest { salt: Vec::new(), ..request() },
            NewRequest { constraint: Some(constraint), ..request() },
            NewRequest { choices: 2, ..request() },
            NewRequest { prompt_logprobs: Some(0), ..request() },
            NewRequest { embeds: Some(Embeds { second_text: 3 }), ..request() },
            sampling(|sampling| sampling.temperature = 0.0),
            sampling(|sampling| sampling.top_p = 0.5),
            sampling(|sampling| sampling.top_k = 4),
            sampling(|sampling| sampling.min_p = 0.1),
            sampling(|sampling| sampling.seed = 6),
            sampling(|sampling| sampling.presence_penalty = 1.0),
            sampling(|sampling| sampling.frequency_penalty = 1.0),
            sampling(|sampling| sampling.repetition_penalty = 1.5),
            sampling(|sampling| sampling.logit_bias = vec![(3, 1.0)]),
            sampling(|sampling| sampling.logprobs = Some(0)),
            stop(|stop| stop.max_tokens = 8),
            stop(|stop| stop.min_tokens = 1),
            stop(|stop| stop.stop_tokens = Vec::new()),
        ];
        let mut keys: BTreeSet<Key> = others.iter().map(|other| key(ORIGIN, other)).collect();
        let layout = Origin { layout: LayoutFingerprint([8; 16]), ..ORIGIN };
        let era = Origin { era: Era::after([Epoch(1)]), ..ORIGIN };
        keys.extend([same, key(layout, &request()), key(era, &request())]);
        assert_eq!(keys.len(), others.len() + 3);
    }

    #[test]
    fn a_greedy_request_draws_nothing_so_its_seed_does_not_count() {
        let greedy = |seed| NewRequest { sampling: Sampling { temperature: 0.0, seed, ..Sampling::default() }, ..request() };
        assert_eq!(key(ORIGIN, &greedy(1)), key(ORIGIN, &greedy(2)));
    }

    proptest! {
        /// Two tenants, with arbitrary requests.
        #[test]
        fn nobody_gets_another_tenants_answer(mine: Vec<u8>, theirs: Vec<u8>, prompt in prop::collection::vec(0u32..50, 1..20), seed: u64) {
            prop_assume!(mine != theirs);
            let of = |salt: &[u8]| NewRequest {
                salt: salt.to_vec(),
                prompt: prompt.clone().into(),
                sampling: Sampling { seed, ..Sampling::default() },
                ..request()
            };
            let mut cache = ResponseCache::new(LIMITS);
            cache.put(key(ORIGIN, &of(&mine)), tenant(&of(&mine)), events(3), Duration::ZERO);
            prop_assert!(cache.get(&key(ORIGIN, &of(&theirs)), Duration::ZERO).is_none());
            prop_assert!(cache.get(&key(ORIGIN, &of(&mine)), Duration::ZERO).is_some());
        }

        /// The size is that of the stored answers, and never above the limit.
        #[test]
        fn it_keeps_within_its_bytes(steps in prop::collection::vec((0u8..12, 0u32..120, prop::bool::ANY), 1..80)) {
            let mut cache = ResponseCache::new(LIMITS);
            for (now, (name, tokens, puts)) in steps.into_iter().enumerate() {
                let (key, now) = ([name; 32], Duration::from_secs(7 * now as u64));
                if puts {
                    cache.put(key, [name % 3; 32], events(tokens), now);
                } else {
                    cache.get(&key, now);
                }
                prop_assert!(cache.bytes() <= LIMITS.bytes);
                prop_assert_eq!(cache.bytes(), cache.answers.values().map(|kept| kept.bytes).sum::<u64>());
                prop_assert_eq!(cache.order.len(), cache.answers());
                cache.bytes.check_integrity();
            }
        }
    }

    #[test]
    fn the_one_not_asked_for_goes_first_and_old_ones_are_not_given() {
        let size = ENTRY_BYTES + 10 * size(&token(0));
        let mut cache = ResponseCache::new(Limits { bytes: 2 * size, ..LIMITS });
        let at = Duration::from_secs;
        const ME: Tenant = [0; 32];
        cache.put([1; 32], ME, events(10), at(0));
        cache.put([2; 32], ME, events(10), at(1));
        assert!(cache.get(&[1; 32], at(2)).is_some());
        cache.put([3; 32], ME, events(10), at(3));
        assert!(cache.get(&[2; 32], at(3)).is_none());
        assert!(cache.get(&[1; 32], at(60)).is_some());
        assert!(cache.get(&[1; 32], at(61)).is_none(), "its minute is over, however often it was used");
        cache.put([4; 32], ME, events(100), at(61));
        assert_eq!(cache.answers(), 1, "larger than all room");
    }

    #[test]
    fn a_flood_drives_out_nothing_but_itself() {
        let size = ENTRY_BYTES + 10 * size(&token(0));
        let mut cache = ResponseCache::new(Limits { bytes: 4 * size, ..LIMITS });
        cache.put([1; 32], [1; 32], events(10), Duration::ZERO);
        cache.put([2; 32], [1; 32], events(10), Duration::ZERO);
        for n in 10..100 {
            cache.put([n; 32], [2; 32], events(10), Duration::ZERO);
        }
        assert!(cache.get(&[1; 32], Duration::ZERO).is_some() && cache.get(&[2; 32], Duration::ZERO).is_some());
        assert!(cache.get(&[99; 32], Duration::ZERO).is_some() && cache.get(&[97; 32], Duration::ZERO).is_none());
    }

    #[test]
    fn an_answer_is_whole_when_every_choice_ended_well() {
        let finished = |choice, outcome| RequestEvent::Finished {
            choice,
            outcome,
            usage: ChoiceUsage { queue_ms: 5.0, decode_worker: "d".into(), ..ChoiceUsage::default() },
        };
        let mut recording = Recording::new(2, LIMITS.bytes);
        assert!(recording.hear(&RequestEvent::Waiting { choice: 0, position: 1, estimate_ms: None }));
        assert!(recording.hear(&token(4)) && recording.hear(&finished(0, Outcome::Length)));
        assert_eq!(recording.whole(), None);
        assert!(recording.hear(&finished(1, Outcome::Stop(2))));
        let events = recording.whole().unwrap();
        assert_eq!(events.len(), 3, "waiting is not part of an answer");
        let RequestEvent::Finished { usage, .. } = &events[2] else { panic!("{events:?}") };
        assert_eq!((usage.queue_ms, &*usage.decode_worker), (0.0, "d"));

        let mut failing = Recording::new(1, LIMITS.bytes);
        assert!(!failing.hear(&finished(0, Outcome::Failed(Failure::Timeout(1)))));
        let mut long = Recording::new(1, 3 * size(&token(0)));
        assert!((0..3).all(|n| long.hear(&token(n))) && !long.hear(&token(3)));
    }
}
