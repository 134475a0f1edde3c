//! The response caches between the front door and a cluster: asked before a request is submitted, and told of answers as they come. The
//! one of equal requests is asked first; what it does not have, the one of similar questions may.

use super::{Backend, Source, Submission};
use crate::{
    metrics,
    response_cache::{self, Key, Recording, ResponseCache, Tenant, key, tenant},
    semantic::{self, Bucket, Inquiry, SemanticCache},
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tidemill_cluster::{NewRequest, Rejection, RequestEvent};

/// A cache that all models share.
#[derive(Debug)]
pub struct Shared<C> {
    cache: Mutex<C>,
    /// An answer with more is not kept.
    bytes: u64,
    since: Instant,
}

pub type Cache = Shared<ResponseCache>;
pub type Similar = Shared<SemanticCache>;

impl Cache {
    pub fn new(limits: response_cache::Limits) -> Self {
        Self { cache: Mutex::new(ResponseCache::new(limits)), bytes: limits.bytes, since: Instant::now() }
    }
}

impl Similar {
    pub fn new(limits: semantic::Limits) -> Self {
        Self { cache: Mutex::new(SemanticCache::new(limits)), bytes: limits.bytes, since: Instant::now() }
    }
}

impl<C> Shared<C> {
    fn cache(&self) -> MutexGuard<'_, C> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.since.elapsed()
    }
}

/// Where an answer may be, and is put.
#[derive(Debug, Default)]
pub struct Caches<'a> {
    pub equal: Option<&'a Arc<Cache>>,
    /// If an answer to a similar question would do.
    pub similar: Option<(&'a Arc<Similar>, &'a Inquiry)>,
}

impl Submission {
    /// The same for a request whose tokens nothing but its key determines: from a cache, if its answer is there; else its answer will be.
    pub fn repeatable(backend: Arc<dyn Backend>, caches: &Caches<'_>, request: NewRequest) -> Result<Self, Rejection> {
        let origin = backend.origin().filter(|_| caches.equal.is_some() || caches.similar.is_some());
        let Some(origin) = origin else { return Self::new(backend, vec![request]) };
        let equal = caches.equal.map(|cache| (key(origin, &request), cache));
        if let Some((key, cache)) = &equal {
            let kept = cache.cache().get(key, cache.now());
            metrics::count_response_cache(kept.is_some());
            if let Some(events) = kept {
                return Ok(Self { source: Source::Cache { events, read: 0, similar: None }, recording: None });
            }
        }
        let similar = caches.similar.map(|(cache, inquiry)| (inquiry.bucket(origin, &request), inquiry, cache));
        if let Some((bucket, inquiry, cache)) = &similar {
            let began = Instant::now();
            let hit = cache.cache().get(bucket, &inquiry.question, request.stop.max_tokens, cache.now());
            metrics::count_semantic_cache(hit.is_some(), began.elapsed());
            if let Some(semantic::Hit { events, similarity, response }) = hit {
                let similar = Some(SimilarTo { response, similarity });
                return Ok(Self { source: Source::Cache { events, read: 0, similar }, recording: None });
            }
        }
        let bytes = caches.equal.map(|cache| cache.bytes).max(caches.similar.map(|(cache, _)| cache.bytes));
        let recording = Recording::new(request.choices, bytes.unwrap_or(0));
        let tenant = tenant(&request);
        let equal = equal.map(|(key, cache)| (key, Arc::clone(cache)));
        let similar = similar.map(|(bucket, inquiry, cache)| (bucket, inquiry.clone(), Arc::clone(cache)));
        let mut submission = Self::new(backend, vec![request])?;
        submission.recording = Some(Recorder { recording, tenant, equal, similar });
        Ok(submission)
    }
}

/// Whose answer is given to another question.
#[derive(Clone, Debug, PartialEq)]
pub struct SimilarTo {
    pub response: Arc<str>,
    pub similarity: f32,
}

/// Hears an answer, and puts it into the caches.
#[derive(Debug)]
pub(super) struct Recorder {
    recording: Recording,
    tenant: Tenant,
    equal: Option<(Key, Arc<Cache>)>,
    similar: Option<(Bucket, Inquiry, Arc<Similar>)>,
}

impl Recorder {
    /// Returns whether it goes on listening.
    pub(super) fn hear(&mut self, event: &RequestEvent) -> bool {
        if !self.recording.hear(event) {
            return false;
        }
        let Some(events) = self.recording.whole() else { return true };
        if let Some((bucket, inquiry, shared)) = self.similar.take() {
            let mut cache = shared.cache();
            cache.put(bucket, self.tenant, inquiry, &events, shared.now());
            metrics::show_semantic_cache(cache.bytes(), cache.answers());
        }
        if let Some((key, shared)) = &self.equal {
            let mut cache = shared.cache();
            cache.put(*key, self.tenant, events, shared.now());
            metrics::show_response_cache(cache.bytes(), cache.answers());
        }
        false
    }
}
