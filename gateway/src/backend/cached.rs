//! The response cache between the front door and a cluster: asked before a request is submitted, and told of answers as they come.

use super::{Backend, Source, Submission};
use crate::{
    metrics,
    response_cache::{Limits, Recording, ResponseCache, key},
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tidemill_cluster::{NewRequest, Rejection, RequestEvent};

/// Shared by all models.
#[derive(Debug)]
pub struct Cache {
    limits: Limits,
    answers: Mutex<ResponseCache>,
    since: Instant,
}

impl Cache {
    pub fn new(limits: Limits) -> Self {
        Self { limits, answers: Mutex::new(ResponseCache::new(limits)), since: Instant::now() }
    }

    fn answers(&self) -> MutexGuard<'_, ResponseCache> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Submission {
    /// The same for a request whose tokens nothing but its key determines: from the cache, if its answer is there; else its answer will be.
    pub fn repeatable(backend: Arc<dyn Backend>, cache: &Arc<Cache>, request: NewRequest) -> Result<Self, Rejection> {
        let Some(layout) = backend.layout() else { return Self::new(backend, vec![request]) };
        let key = key(layout, &request);
        let kept = cache.answers().get(&key, cache.now());
        metrics::count_response_cache(kept.is_some());
        if let Some(events) = kept {
            return Ok(Self { source: Source::Cache { events, read: 0 }, recording: None });
        }
        let recording = Recording::new(key, request.choices, cache.limits);
        let mut submission = Self::new(backend, vec![request])?;
        submission.recording = Some(Recorder { recording, cache: Arc::clone(cache) });
        Ok(submission)
    }
}

/// Hears an answer, and puts it into the cache.
#[derive(Debug)]
pub(super) struct Recorder {
    recording: Recording,
    cache: Arc<Cache>,
}

impl Recorder {
    /// Returns whether it goes on listening.
    pub(super) fn hear(&mut self, event: &RequestEvent) -> bool {
        if !self.recording.hear(event) {
            return false;
        }
        let Some(events) = self.recording.whole() else { return true };
        let mut answers = self.cache.answers();
        answers.put(self.recording.key, events, self.cache.now());
        metrics::show_response_cache(answers.bytes(), answers.answers());
        false
    }
}
