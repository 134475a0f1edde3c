//! Shadow requests: they take the same routes as clients' requests, in the name of the original's sender, once the original has its answer.

use super::Gateway;
use crate::{
    rollout::shadow::{Heard, Mirror, Tap},
    tenants::Caller,
};
use axum::{
    body::{Body, to_bytes},
    http::{Request, header},
};
use hyper::service::Service;
use std::{sync::Arc, time::Duration};
use tokio::{sync::oneshot, time::timeout};

/// The maximum size of a shadow's answer: more than any answer has that is not streamed.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Extra time after a request's own limit, by which it should have ended.
const OVERDUE: Duration = Duration::from_secs(60);

impl Gateway {
    /// Starts the shadow of a running request, if it has one. The shadow observes the request's answer.
    pub(crate) fn tap(&self, repeatable: bool) -> Option<Tap> {
        let mirror = self.routed.as_ref()?.take_mirror()?;
        let caller = self.caller.clone()?;
        let (tap, heard) = Tap::new(repeatable);
        tokio::spawn(self.clone().shadow(mirror, caller, heard));
        Some(tap)
    }

    /// Answers the request again once `heard` has delivered its own answer.
    async fn shadow(self, mirror: Mirror, caller: Arc<Caller>, heard: oneshot::Receiver<Heard>) {
        let limit = self.request_timeout() + OVERDUE;
        let Ok(Ok(own)) = timeout(limit, heard).await else { return };
        let Some(body) = mirror.request() else { return };
        if self.has_much_to_do(mirror.model()) {
            mirror.drop_it();
            return;
        }
        let (tap, answer) = Tap::new(own.repeatable);
        let caller = Arc::new(Caller::of_shadow(&caller, tap));
        let other = match timeout(limit, ask(self, caller, mirror.path(), body)).await {
            Ok(Some(())) => answer.await.ok(),
            _ => None,
        };
        mirror.compare(&own, other.as_ref());
    }
}

/// Sends the request through the clients' routes. Returns `None` if there is no complete answer.
async fn ask(gateway: Gateway, caller: Arc<Caller>, path: &'static str, body: Vec<u8>) -> Option<()> {
    let gateway = Arc::new(gateway.for_nobody());
    let routes = gateway.generating();
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json").extension(caller).body(Body::from(body));
    let response = match routes.call(request.expect("the path is one of ours")).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let is_success = response.status().is_success();
    to_bytes(response.into_body(), ANSWER_BYTES_MAX).await.ok().filter(|_| is_success).map(drop)
}
