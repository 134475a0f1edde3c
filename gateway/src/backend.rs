//! The cluster as the gateway sees it: five calls, and the events of what was submitted.

use std::{fmt, sync::Arc};
use tidemill_cluster::{ChoiceUsage, ClusterView, NewRequest, Rejection, RequestEvent};
use tidemill_proto::ids::RequestId;
use tokio::sync::mpsc;

/// Where requests are served. No call waits.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Takes all requests or none.
    fn submit(&self, requests: Vec<NewRequest>) -> Result<Accepted, Rejection>;
    /// Ends one choice without another event. Returns its usage so far.
    fn end_choice(&self, request: RequestId, choice: u32) -> ChoiceUsage;
    /// Ends whatever has not ended, without another event.
    fn cancel(&self, requests: &[RequestId]);
    /// Longest sequence that could run now; `None` if none could.
    fn context_tokens(&self) -> Option<u32>;
    fn view(&self) -> ClusterView;
}

/// Requests that run.
#[derive(Debug)]
pub struct Accepted {
    /// In the order submitted.
    pub requests: Vec<RequestId>,
    /// Bounded. Closes when everything has ended, or when the reader was too slow and its requests were cancelled.
    pub events: mpsc::Receiver<(RequestId, RequestEvent)>,
}

/// A client's running requests, one per prompt. Dropping it frees everything they hold.
#[derive(Debug)]
pub struct Submission {
    backend: Arc<dyn Backend>,
    accepted: Accepted,
}

impl Submission {
    pub fn new(backend: Arc<dyn Backend>, requests: Vec<NewRequest>) -> Result<Self, Rejection> {
        let accepted = backend.submit(requests)?;
        Ok(Self { backend, accepted })
    }

    /// The next event, with the place of its request among those submitted. `None`: nothing more can come.
    pub async fn next(&mut self) -> Option<(usize, RequestEvent)> {
        let (request, event) = self.accepted.events.recv().await?;
        let prompt = self.accepted.requests.iter().position(|id| *id == request).expect("events come for submitted requests only");
        Some((prompt, event))
    }

    /// Ends one choice for a reason of the gateway's own, such as a stop string.
    pub fn end_choice(&self, prompt: usize, choice: u32) -> ChoiceUsage {
        self.backend.end_choice(self.accepted.requests[prompt], choice)
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.backend.cancel(&self.accepted.requests);
    }
}
