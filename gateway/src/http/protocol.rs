//! The path of an answer to its client, whole or as server-sent events, in any protocol: one driver, and a trait for the protocols' output.

use crate::{
    metrics,
    requests::error::ApiError,
    serving::{
        answer::{Delta, News, Waiting},
        backend::SimilarTo,
        replays::KEEP_ALIVE,
        rounds::rounded::{Rounded, Spent},
    },
};
use axum::{
    http::{HeaderMap, HeaderName, HeaderValue},
    response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
};
use futures_util::stream;
use serde_json::Value;
use std::{collections::VecDeque, convert::Infallible, future};

/// A protocol's form of one answer.
pub trait Protocol: Sized + Send + 'static {
    /// Returns a stream's first events, before any part of the answer is known.
    fn opening(&mut self) -> Vec<Event> {
        Vec::new()
    }
    /// Takes a part of an answer that is sent whole.
    fn take(&mut self, delta: Delta, spent: &Spent) -> impl Future<Output = ()> + Send;
    /// Writes the answer, once all of its parts were taken.
    fn whole(self, spent: Spent) -> impl Future<Output = Result<Response, ApiError>> + Send;
    /// Takes a part of an answer that is streamed, and returns its events.
    fn events(&mut self, delta: Delta, spent: &Spent) -> impl Future<Output = Vec<Event>> + Send;
    /// Returns a stream's last events.
    fn closing(&mut self, ending: Ending, spent: &Spent) -> impl Future<Output = Vec<Event>> + Send;
    /// Resolves once the client has requested elsewhere that the stream end.
    fn cancelled(&self) -> impl Future<Output = ()> + Send {
        future::pending()
    }
    /// Returns the reason why the answer is not stored in its conversation, as far as known.
    fn not_stored(&mut self) -> Option<HeaderValue> {
        None
    }
}

/// The end of a stream.
#[derive(Debug)]
pub enum Ending {
    Complete,
    Cancelled,
    Failed(ApiError),
}

/// An answer that has started.
#[derive(Debug)]
pub struct Begun<P> {
    pub answer: Rounded,
    pub protocol: P,
    pub streams: bool,
}

/// Sends an answer, once it has started.
pub async fn respond<P: Protocol>(begun: impl Future<Output = Result<Begun<P>, ApiError>>) -> Result<Response, ApiError> {
    // A running request is counted by its answer.
    let begun = begun.await.inspect_err(|error| metrics::count_request(error.outcome()))?;
    let Begun { mut answer, mut protocol, streams } = begun;
    if streams {
        answer.running().settle().await?;
        let headers = headers(&mut answer, &mut protocol);
        let streaming = Streaming { ready: protocol.opening().into(), answer, protocol, over: false };
        let events = stream::unfold(streaming, |mut streaming| async move {
            let event = streaming.next().await?;
            Some((Ok::<_, Infallible>(event), streaming))
        });
        return Ok((headers, Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))).into_response());
    }
    while let Some(news) = answer.next().await? {
        if let News::Delta(delta) = news {
            protocol.take(delta, &answer.spent()).await;
        }
    }
    let headers = headers(&mut answer, &mut protocol);
    Ok((headers, protocol.whole(answer.spent()).await?).into_response())
}

/// An event that is named after its `type`.
pub fn named(event: &Value) -> Event {
    Event::default().event(event["type"].as_str().unwrap_or_default()).data(event.to_string())
}

struct Streaming<P> {
    answer: Rounded,
    protocol: P,
    ready: VecDeque<Event>,
    over: bool,
}

impl<P: Protocol> Streaming<P> {
    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.over {
            let news = tokio::select! {
                news = self.answer.next() => Some(news),
                () = self.protocol.cancelled() => None,
            };
            match news {
                Some(Ok(Some(News::Waiting(waiting)))) => self.ready.push_back(Event::default().comment(comment(waiting))),
                Some(Ok(Some(News::Delta(delta)))) => self.ready.extend(self.protocol.events(delta, &self.answer.spent()).await),
                Some(Ok(None)) => self.close(Ending::Complete).await,
                Some(Err(error)) => self.close(Ending::Failed(error)).await,
                None => self.close(Ending::Cancelled).await,
            }
        }
        self.ready.pop_front()
    }

    async fn close(&mut self, ending: Ending) {
        self.over = true;
        // Only a cancelled answer is not settled yet.
        self.answer.running().settle_usage().await;
        self.ready.extend(self.protocol.closing(ending, &self.answer.spent()).await);
    }
}

/// The place of a waiting request, as a comment, which programs skip and people see.
fn comment(Waiting { position, estimate_ms }: Waiting) -> String {
    let estimate = estimate_ms.map_or(String::new(), |ms| format!(", about {:.1} s", ms as f64 / 1e3));
    format!("waiting: place {position} in the queue{estimate}")
}

/// Headers for an answer to a similar question, for one that is not stored, and for one that had to wait: its first place in the queue, and
/// the estimate at that time.
fn headers(answer: &mut Rounded, protocol: &mut impl Protocol) -> HeaderMap {
    let similar = answer.running().similar_to().map(|SimilarTo { response, similarity }| {
        let told = format!("semantic; similarity={similarity:.3}; response={response}");
        HeaderValue::from_str(&told).expect("ids are plain")
    });
    let waited = answer.running().waited();
    let headers = [
        ("x-tidemill-response-cache", similar),
        ("x-tidemill-not-stored", protocol.not_stored()),
        ("x-queue-position", waited.map(|waited| waited.position.into())),
        ("x-queue-estimate-ms", waited.and_then(|waited| waited.estimate_ms).map(HeaderValue::from)),
    ];
    headers.into_iter().filter_map(|(name, value)| Some((HeaderName::from_static(name), value?))).collect()
}
