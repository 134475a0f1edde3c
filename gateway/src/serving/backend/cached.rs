//! The response caches between the gateway and a cluster: they are searched before a request is submitted, and store answers as they
//! arrive. The cache of equal requests comes first, then the one of similar questions.

use crate::{
    cache::{
        response_cache::{self, Key, Recording, ResponseCache, Tenant},
        semantic::{self, Bucket, Inquiry, SemanticCache},
    },
    metrics,
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::RequestEvent;

/// A cache that all models share.
#[derive(Debug)]
pub struct Shared<C> {
    cache: Mutex<C>,
    /// The maximum size of a cached answer.
    pub(crate) bytes: u64,
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
    pub(crate) fn cache(&self) -> MutexGuard<'_, C> {
        self.cache.lock()
    }

    pub(crate) fn now(&self) -> Duration {
        self.since.elapsed()
    }
}

/// The caches that are searched for an answer, and that store it.
#[derive(Debug, Default)]
pub struct Caches<'a> {
    pub equal: Option<&'a Arc<Cache>>,
    /// The cache of similar questions, with the query, if the answer to one is acceptable.
    pub similar: Option<(&'a Arc<Similar>, &'a Inquiry)>,
}

/// The cached response that answers a similar question.
#[derive(Clone, Debug, PartialEq)]
pub struct SimilarTo {
    pub response: Arc<str>,
    pub similarity: f32,
}

/// Records an answer's events, and puts it into the caches.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) recording: Recording,
    pub(crate) tenant: Tenant,
    pub(crate) equal: Option<(Key, Arc<Cache>)>,
    pub(crate) similar: Option<(Bucket, Inquiry, Arc<Similar>)>,
}

impl Recorder {
    /// Takes an event. Returns whether more are needed.
    pub(crate) fn hear(&mut self, event: &RequestEvent) -> bool {
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
