//! The cluster as the gateway sees it: seven calls, and the events of submitted requests.

mod cached;

pub use cached::{Cache, Caches, Similar, SimilarTo};

use crate::{
    cache::{
        response_cache::{Events, Recording, key, tenant},
        semantic,
    },
    metrics,
};
use cached::Recorder;
use std::{fmt, sync::Arc, time::Instant};
use tidemill_cluster::{ChoiceUsage, ClusterView, Forecast, NewRequest, Origin, Rejection, RequestEvent, class::ClassId};
use tidemill_proto::ids::RequestId;
use tokio::{sync::mpsc, task::coop};

/// The cluster that serves one model. No call blocks.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Submits all requests or none.
    fn submit(&self, requests: Vec<NewRequest>) -> Result<Accepted, Rejection>;
    /// Ends one choice without a further event. Returns its usage so far.
    fn end_choice(&self, request: RequestId, choice: u32) -> ChoiceUsage;
    /// Ends those of these requests that have not ended, without further events.
    fn cancel(&self, requests: &[RequestId]);
    /// The longest sequence that could run now; `None` if none could.
    fn context_tokens(&self) -> Option<u32>;
    /// The identity of the engines, on which answers depend besides the request; `None` without engines.
    fn origin(&self) -> Option<Origin>;
    /// Predicts when a prompt of this many tokens would be served if it was submitted now.
    fn forecast(&self, tokens: u32, class: ClassId) -> Forecast;
    fn view(&self) -> ClusterView;
}

/// Requests that were accepted.
#[derive(Debug)]
pub struct Accepted {
    /// The ids, in the order submitted.
    pub requests: Vec<RequestId>,
    /// The events. Bounded; closes when all requests have ended, or when the reader was too slow and its requests were cancelled.
    pub events: mpsc::Receiver<(RequestId, RequestEvent)>,
}

/// A client's running requests, one per prompt. Dropping it frees all their resources.
#[derive(Debug)]
pub struct Submission {
    source: Source,
    /// The recorder of the only request, if its answer is to be cached.
    recording: Option<Recorder>,
}

#[derive(Debug)]
enum Source {
    Cluster {
        backend: Arc<dyn Backend>,
        accepted: Accepted,
    },
    /// A cached answer, and the number of events read so far.
    Cache {
        events: Events,
        read: usize,
        /// The cached response, if it answered a similar question.
        similar: Option<SimilarTo>,
    },
}

impl Submission {
    pub fn new(backend: Arc<dyn Backend>, requests: Vec<NewRequest>) -> Result<Self, Rejection> {
        let accepted = backend.submit(requests)?;
        Ok(Self { source: Source::Cluster { backend, accepted }, recording: None })
    }

    /// Whether the answer comes from the cache rather than from the cluster.
    pub fn is_cached(&self) -> bool {
        matches!(self.source, Source::Cache { .. })
    }

    /// The cached response of a similar question that this answer repeats, if it does.
    pub fn similar_to(&self) -> Option<&SimilarTo> {
        match &self.source {
            Source::Cache { similar, .. } => similar.as_ref(),
            Source::Cluster { .. } => None,
        }
    }

    /// Returns the next event, with the index of its request among those submitted; `None` if no more can come.
    pub async fn next(&mut self) -> Option<(usize, RequestEvent)> {
        match &mut self.source {
            Source::Cluster { accepted, .. } => {
                let (request, event) = accepted.events.recv().await?;
                let prompt = accepted.requests.iter().position(|id| *id == request).expect("events come for submitted requests only");
                self.recording.take_if(|recording| !recording.hear(&event));
                Some((prompt, event))
            }
            Source::Cache { events, read, .. } => {
                // A long answer gives way to other tasks.
                coop::consume_budget().await;
                let event = events.get(*read)?.clone();
                *read += 1;
                Some((0, event))
            }
        }
    }

    /// Ends one choice for a reason of the gateway's own, such as a stop string.
    pub fn end_choice(&mut self, prompt: usize, choice: u32) -> ChoiceUsage {
        // The tokens that would have followed are unknown.
        self.recording = None;
        match &self.source {
            Source::Cluster { backend, accepted } => backend.end_choice(accepted.requests[prompt], choice),
            Source::Cache { events, .. } => {
                let of_choice = |event: &RequestEvent| match event {
                    RequestEvent::Finished { choice: ended, usage, .. } if *ended == choice => Some(usage.clone()),
                    _ => None,
                };
                events.iter().find_map(of_choice).unwrap_or_default()
            }
        }
    }
}

impl Submission {
    /// Submits a request whose tokens are determined by its key: it is answered from a cache if possible; otherwise its answer is stored
    /// there.
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

impl Drop for Submission {
    fn drop(&mut self) {
        if let Source::Cluster { backend, accepted } = &self.source {
            backend.cancel(&accepted.requests);
        }
    }
}
