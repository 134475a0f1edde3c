//! Cached answers for similar questions: a question of one turn, worded differently.
//!
//! Unlike a hit of the [response cache](crate::cache::response_cache), such a hit is the answer to a different question, and may be wrong:
//! tenants opt in, and every hit is marked. Everything except the question's words must be *equal*: tenant, model, system prompt, sampling,
//! form, length, and what the question says [exactly](question). Among the rest, the most similar question above the threshold is found by
//! comparing [vectors](crate::vectors::vector) with all: there is no index, as a tenant has a bounded number of answers.
//!
//! A core: it has no clock. Bounded in bytes and answers, which tenants [share](crate::base::room), and in answers of one tenant; the least
//! recently used answer goes first. A hit is not cached again, so that similarity does not drift.

pub mod question;
mod text;
mod words;

use crate::{
    base::room::Shares,
    cache::response_cache::{self, Events, Key, Tenant},
};
use question::Question;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};
use tidemill_cluster::{ChoiceUsage, NewRequest, Origin, Outcome, RequestEvent};
use tidemill_proto::{message::Provenance, sampling::StopRule};

/// The default threshold: with all-MiniLM-L6-v2, the least with a precision of 0.99 on the paraphrase set (`examples/semantic_curve.rs`).
pub const THRESHOLD: f32 = 0.9;

/// The maximum number of questions, the nearest by their vectors, whose words are compared.
const COMPARED_MAX: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The maximum size of all questions and answers together.
    pub bytes: u64,
    pub answers: usize,
    /// The maximum number of one tenant's answers: with so many a question is compared at most.
    pub tenant_answers: usize,
    /// The time for which an answer is reused.
    pub keep: Duration,
    /// The least similarity of a hit.
    pub threshold: f32,
}

/// A cache query: the question, with everything else that must be equal.
#[derive(Clone, Debug)]
pub struct Inquiry {
    pub question: Question,
    pub text: String,
    /// A digest of the model, and of the prompt without the question.
    pub setting: Key,
    /// Whether the client leaves the answer's length open.
    pub is_open: bool,
    /// The id of the new answer, if there is no hit.
    pub response: String,
}

/// A digest of all that must be equal.
pub type Bucket = Key;

impl Inquiry {
    /// Returns the bucket of its answers, for the whole request and the origin of its answer.
    pub fn bucket(&self, origin: Origin, request: &NewRequest) -> Bucket {
        // The length that fits after a prompt depends on its words: if the client names none, it is not part of the query.
        let max_tokens = if self.is_open { 0 } else { request.stop.max_tokens };
        let stop = StopRule { max_tokens, ..request.stop.clone() };
        let rest = response_cache::key(origin, &NewRequest { prompt: Vec::new().into(), stop, ..request.clone() });
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.setting).update(&rest).update(&self.question.exact);
        hasher.finalize().into()
    }
}

/// The answer to a similar question.
#[derive(Clone, Debug, PartialEq)]
pub struct Hit {
    pub events: Events,
    pub similarity: f32,
    /// The response for which it was computed.
    pub response: Arc<str>,
}

#[derive(Debug)]
pub struct SemanticCache {
    limits: Limits,
    buckets: HashMap<Bucket, Vec<Kept>>,
    /// The buckets of kept answers, by tenant and last use.
    order: BTreeMap<(Tenant, u64), Bucket>,
    uses: u64,
    bytes: Shares<Tenant>,
    places: Shares<Tenant>,
}

#[derive(Debug)]
struct Kept {
    tenant: Tenant,
    question: Question,
    events: Events,
    response: Arc<str>,
    tokens: u32,
    bytes: u64,
    since: Duration,
    used: u64,
}

impl SemanticCache {
    pub fn new(limits: Limits) -> Self {
        Self { limits, buckets: HashMap::new(), order: BTreeMap::new(), uses: 0, bytes: Shares::default(), places: Shares::default() }
    }

    /// Returns the answer to the most similar question above the threshold, if it has at most `tokens_max` tokens.
    pub fn get(&mut self, bucket: &Bucket, question: &Question, tokens_max: u32, now: Duration) -> Option<Hit> {
        self.expire(bucket, now);
        let kept = self.buckets.get_mut(bucket)?;
        let threshold = self.limits.threshold;
        let fitting = kept.iter().enumerate().filter(|(_, kept)| kept.tokens <= tokens_max);
        let near = fitting.filter_map(|(place, kept)| Some((place, question.cosine(&kept.question)?)));
        let mut near: Vec<(usize, f32)> = near.filter(|(_, cosine)| *cosine >= threshold).collect();
        near.sort_by(|a, b| b.1.total_cmp(&a.1));
        near.truncate(COMPARED_MAX);
        let similar = near.into_iter().filter_map(|(place, cosine)| Some((place, question.similarity(&kept[place].question, cosine)?)));
        let (place, similarity) = similar.filter(|(_, found)| *found >= threshold).max_by(|a, b| a.1.total_cmp(&b.1))?;
        self.uses += 1;
        let kept = &mut kept[place];
        self.order.remove(&(kept.tenant, kept.used));
        self.order.insert((kept.tenant, self.uses), *bucket);
        kept.used = self.uses;
        Some(Hit { events: Arc::clone(&kept.events), similarity, response: Arc::clone(&kept.response) })
    }

    /// Stores an answer, unless it is too large for the cache or its tenant's share, or was cut although the client left its length open.
    pub fn put(&mut self, bucket: Bucket, tenant: Tenant, inquiry: Inquiry, events: &[RequestEvent], now: Duration) {
        let is_cut = |event: &RequestEvent| matches!(event, RequestEvent::Finished { outcome: Outcome::Length, .. });
        if inquiry.is_open && events.iter().any(is_cut) {
            return;
        }
        let tokens = events.iter().filter(|event| matches!(event, RequestEvent::Token { .. })).count() as u32;
        let events: Events = events.iter().filter_map(for_another).collect();
        let Inquiry { question, response, .. } = inquiry;
        let bytes = question.bytes() + ENTRY_BYTES + events.iter().map(response_cache::size).sum::<u64>();
        if bytes > self.limits.bytes {
            return;
        }
        self.expire(&bucket, now);
        while self.places.held(&tenant) >= self.limits.tenant_answers as u64 {
            let oldest = self.oldest(&[tenant]).expect("the tenant has answers");
            self.remove(oldest);
        }
        while self.bytes.total() + bytes > self.limits.bytes {
            let losers = self.bytes.losers(self.limits.bytes, &tenant, bytes);
            let Some(oldest) = self.oldest(&losers) else { return };
            self.remove(oldest);
        }
        while self.order.len() >= self.limits.answers {
            let losers = self.places.losers(self.limits.answers as u64, &tenant, 1);
            let Some(oldest) = self.oldest(&losers) else { return };
            self.remove(oldest);
        }
        self.uses += 1;
        self.bytes.add(&tenant, bytes);
        self.places.add(&tenant, 1);
        self.order.insert((tenant, self.uses), bucket);
        let kept = Kept { tenant, question, events, response: response.into(), tokens, bytes, since: now, used: self.uses };
        self.buckets.entry(bucket).or_default().push(kept);
    }

    fn expire(&mut self, bucket: &Bucket, now: Duration) {
        let old = |kept: &&Kept| now.saturating_sub(kept.since) > self.limits.keep;
        let old: Vec<_> = self.buckets.get(bucket).into_iter().flatten().filter(old).map(|kept| (kept.tenant, kept.used)).collect();
        old.into_iter().for_each(|place| self.remove(place));
    }

    /// The least recently used entry of the first of these tenants that has any.
    fn oldest(&self, losers: &[Tenant]) -> Option<(Tenant, u64)> {
        losers.iter().find_map(|loser| self.order.range((*loser, 0)..=(*loser, u64::MAX)).next().map(|(place, _)| *place))
    }

    fn remove(&mut self, (tenant, used): (Tenant, u64)) {
        let bucket = self.order.remove(&(tenant, used)).expect("what is kept is in order");
        let kept = self.buckets.get_mut(&bucket).expect("what is in order is kept");
        let place = kept.iter().position(|kept| kept.used == used).expect("what is in order is kept");
        self.bytes.take(&tenant, kept.swap_remove(place).bytes);
        self.places.take(&tenant, 1);
        if kept.is_empty() {
            self.buckets.remove(&bucket);
        }
    }

    /// Drops all answers of a tenant. Returns their number.
    pub fn forget(&mut self, tenant: Tenant) -> u64 {
        let held = self.held(tenant);
        while let Some(oldest) = self.oldest(&[tenant]) {
            self.remove(oldest);
        }
        held
    }

    /// The number of a tenant's answers.
    pub fn held(&self, tenant: Tenant) -> u64 {
        self.places.held(&tenant)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.total()
    }

    pub fn answers(&self) -> usize {
        self.order.len()
    }
}

/// The approximate size of an answer besides its question and its events.
const ENTRY_BYTES: u64 = 256;

/// The event as part of an answer to a different question: without the sources and times of the original prompt.
fn for_another(event: &RequestEvent) -> Option<RequestEvent> {
    match event {
        RequestEvent::Sources(_) | RequestEvent::Waiting { .. } => None,
        RequestEvent::Finished { choice, outcome, usage } => {
            let usage = ChoiceUsage { provenance: Provenance::default(), ..usage.clone() };
            Some(RequestEvent::Finished { choice: *choice, outcome: outcome.clone(), usage })
        }
        other => Some(other.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::vector::Vector;
    use proptest::prelude::*;
    use tidemill_cluster::class::ClassId;
    use tidemill_proto::{
        block::{Era, LayoutFingerprint},
        ids::Epoch,
        sampling::Sampling,
    };

    const ORIGIN: Origin = Origin { layout: LayoutFingerprint([7; 16]), era: Era::FIRST };
    const LIMITS: Limits = Limits { bytes: 100_000, answers: 20, tenant_answers: 20, keep: Duration::from_secs(60), threshold: THRESHOLD };

    fn inquiry(text: &str) -> Inquiry {
        // To this model all questions are alike: their words decide.
        Inquiry {
            question: Question::read(text).unwrap().with_vector(Vector::new(&[1.0, 2.0]).unwrap()),
            text: text.to_owned(),
            setting: [1; 32],
            is_open: true,
            response: text.to_owned(),
        }
    }

    fn request() -> NewRequest {
        NewRequest {
            prompt: vec![1, 2, 3].into(),
            salt: b"tenant".to_vec(),
            class: ClassId::default(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: StopRule { max_tokens: 9, min_tokens: 0, stop_tokens: vec![2] },
            constraint: None,
            thought: None,
            choices: 1,
            prompt_logprobs: None,
            embeds: None,
            timeout: Duration::from_secs(1),
        }
    }

    fn answer(tokens: u32, outcome: Outcome) -> Vec<RequestEvent> {
        let token = |token| RequestEvent::Token { choice: 0, token, logprob: None };
        let finished = RequestEvent::Finished { choice: 0, outcome, usage: ChoiceUsage::default() };
        (0..tokens).map(token).chain([finished]).collect()
    }

    const ME: Tenant = [0; 32];

    fn put(cache: &mut SemanticCache, text: &str, now: u64) {
        put_for(cache, ME, text, now);
    }

    fn put_for(cache: &mut SemanticCache, tenant: Tenant, text: &str, now: u64) {
        let inquiry = inquiry(text);
        let of = NewRequest { salt: tenant.to_vec(), ..request() };
        let bucket = inquiry.bucket(ORIGIN, &if tenant == ME { request() } else { of });
        cache.put(bucket, tenant, inquiry, &answer(4, Outcome::Stop(2)), Duration::from_secs(now));
    }

    fn get(cache: &mut SemanticCache, text: &str, now: u64) -> Option<String> {
        let inquiry = inquiry(text);
        let hit = cache.get(&inquiry.bucket(ORIGIN, &request()), &inquiry.question, 9, Duration::from_secs(now));
        hit.map(|hit| hit.response.to_string())
    }

    #[test]
    fn the_likeliest_question_answers() {
        let mut cache = SemanticCache::new(LIMITS);
        put(&mut cache, "How do I reset my password?", 0);
        put(&mut cache, "How do I reset the router?", 0);
        assert_eq!(get(&mut cache, "What is the way to reset a password?", 1).as_deref(), Some("How do I reset my password?"));
        assert_eq!(get(&mut cache, "How do I reset my phone?", 1), None);
        assert_eq!(get(&mut cache, "What is the way to reset a password?", 61), None, "its minute is over");
        assert_eq!(cache.answers(), 0, "what is over goes when it is looked at");
    }

    #[test]
    fn the_nearest_vector_answers() {
        let mut cache = SemanticCache::new(LIMITS);
        let turned = |inquiry: Inquiry, degrees: f32| {
            let (sine, cosine) = degrees.to_radians().sin_cos();
            Inquiry { question: inquiry.question.with_vector(Vector::new(&[cosine, sine]).unwrap()), ..inquiry }
        };
        let bucket = inquiry("Is it raining?").bucket(ORIGIN, &request());
        for (response, degrees) in [("far", 40.0), ("nearer", 20.0), ("nearest", 10.0)] {
            let inquiry = turned(Inquiry { response: response.into(), ..inquiry("Is it raining?") }, degrees);
            cache.put(bucket, ME, inquiry, &answer(1, Outcome::Stop(2)), Duration::ZERO);
        }
        let mut get = |degrees| {
            let inquiry = turned(inquiry("Is it raining?"), degrees);
            cache.get(&bucket, &inquiry.question, 9, Duration::ZERO).map(|hit| hit.response.to_string())
        };
        assert_eq!(get(0.0).as_deref(), Some("nearest"));
        assert_eq!(get(70.0), None, "nothing is above the threshold");
        let unread = Question::read("Is it raining?").unwrap();
        assert_eq!(cache.get(&bucket, &unread, 9, Duration::ZERO), None);
    }

    #[test]
    fn a_tenant_has_a_bounded_number_of_answers() {
        let mut cache = SemanticCache::new(Limits { tenant_answers: 3, ..LIMITS });
        for n in 0..5 {
            put(&mut cache, &format!("What is the meaning of number {n}?"), 0);
            put_for(&mut cache, [7; 32], &format!("What is the meaning of number {n}?"), 0);
        }
        assert_eq!(cache.answers(), 6);
        assert!(get(&mut cache, "What is the meaning of number 1?", 0).is_none(), "the oldest went first");
        assert!(get(&mut cache, "What is the meaning of number 4?", 0).is_some());
    }

    #[test]
    fn a_flood_drives_out_nothing_but_itself() {
        for limits in [Limits { answers: 4, ..LIMITS }, Limits { bytes: 5000, ..LIMITS }] {
            let mut cache = SemanticCache::new(limits);
            put(&mut cache, "How do I reset my password?", 0);
            for n in 0..100 {
                put_for(&mut cache, [7; 32], &format!("What is the meaning of number {n}?"), 0);
            }
            assert!(get(&mut cache, "How do I reset my password?", 0).is_some());
            assert!(cache.answers() > 1, "there is room for two tenants");
        }
    }

    #[test]
    fn an_open_answer_must_have_ended_by_itself_and_fit() {
        let mut cache = SemanticCache::new(LIMITS);
        let (open, given) = (inquiry("What is inflation?"), Inquiry { is_open: false, ..inquiry("What is inflation?") });
        for inquiry in [&open, &given] {
            cache.put(inquiry.bucket(ORIGIN, &request()), ME, inquiry.clone(), &answer(9, Outcome::Length), Duration::ZERO);
        }
        let mut get =
            |inquiry: &Inquiry, tokens| cache.get(&inquiry.bucket(ORIGIN, &request()), &inquiry.question, tokens, Duration::ZERO).is_some();
        assert!(!get(&open, 9), "it was cut at a length that nobody wanted");
        assert!(get(&given, 9) && !get(&given, 8));
    }

    #[test]
    fn nothing_is_told_of_a_prompt_that_was_not_computed() {
        let tokens = tidemill_proto::message::TokensBySource { hbm: 5, ..Default::default() };
        let usage = ChoiceUsage { provenance: Provenance { tokens, ..Provenance::default() }, ..ChoiceUsage::default() };
        let finished = RequestEvent::Finished { choice: 0, outcome: Outcome::Stop(2), usage };
        let (mut cache, inquiry) = (SemanticCache::new(LIMITS), inquiry("What is inflation?"));
        let bucket = inquiry.bucket(ORIGIN, &request());
        cache.put(bucket, ME, inquiry.clone(), &[RequestEvent::Sources(tokens), finished], Duration::ZERO);
        let hit = cache.get(&bucket, &inquiry.question, 9, Duration::ZERO).unwrap();
        assert_eq!(*hit.events, answer(0, Outcome::Stop(2)));
    }

    proptest! {
        /// A request that differs in anything but the question gets no hit, even with the same question.
        #[test]
        fn never_across_tenants_or_settings(salt: Vec<u8>, setting: [u8; 32], temperature in 0.0f32..2.0, seed: u64, max_tokens in 1u32..50, top_k in 0u32..9) {
            let mut cache = SemanticCache::new(LIMITS);
            let mine = Inquiry { is_open: false, ..inquiry("What is inflation?") };
            let bucket = mine.bucket(ORIGIN, &request());
            cache.put(bucket, ME, mine.clone(), &answer(1, Outcome::Stop(2)), Duration::ZERO);
            let other = |change: &dyn Fn(&mut NewRequest)| {
                let mut request = request();
                change(&mut request);
                mine.bucket(ORIGIN, &request)
            };
            let sampled = Sampling { temperature, seed, top_k, ..Sampling::default() };
            let buckets = [
                (salt != request().salt, other(&|request| request.salt.clone_from(&salt))),
                (sampled != request().sampling && temperature > 0.0, other(&|request| request.sampling = sampled.clone())),
                (max_tokens != 9, other(&|request| request.stop.max_tokens = max_tokens)),
                (true, other(&|request| request.choices = 2)),
                (setting != mine.setting, Inquiry { setting, ..mine.clone() }.bucket(ORIGIN, &request())),
                (true, Inquiry { is_open: true, ..mine.clone() }.bucket(ORIGIN, &request())),
                (true, mine.bucket(Origin { layout: LayoutFingerprint([8; 16]), ..ORIGIN }, &request())),
                (true, mine.bucket(Origin { era: Era::after([Epoch(1)]), ..ORIGIN }, &request())),
            ];
            for (differs, other) in buckets {
                prop_assert_eq!(cache.get(&other, &mine.question, 99, Duration::ZERO).is_none(), differs);
            }
            prop_assert!(cache.get(&bucket, &mine.question, 99, Duration::ZERO).is_some());
        }

        /// Size and number are those of the stored answers, and never above their limits.
        #[test]
        fn it_keeps_within_its_limits(steps in prop::collection::vec((0usize..40, prop::bool::ANY), 1..120), bytes in 1000u64..40_000) {
            let mut cache = SemanticCache::new(Limits { bytes, ..LIMITS });
            for (now, (number, puts)) in steps.into_iter().enumerate() {
                let text = format!("What is the meaning of number {number}?");
                if puts { put(&mut cache, &text, 3 * now as u64) } else { drop(get(&mut cache, &text, 3 * now as u64)) }
                let kept: Vec<_> = cache.buckets.iter().flat_map(|(bucket, kept)| kept.iter().map(move |kept| (bucket, kept))).collect();
                prop_assert!(cache.bytes() <= bytes && cache.answers() <= LIMITS.answers);
                prop_assert_eq!(cache.bytes(), kept.iter().map(|(_, kept)| kept.bytes).sum::<u64>());
                prop_assert_eq!(kept.len(), cache.answers());
                prop_assert!(kept.iter().all(|(bucket, kept)| cache.order.get(&(kept.tenant, kept.used)) == Some(bucket)));
            }
        }
    }
}
