//! An answer as server-sent events: `data: {chunk}` per delta, an error event if it breaks off, `data: [DONE]` at the end.

use super::answer::{Answer, Delta};
use super::openai::Usage;
use axum::response::{
    IntoResponse, Response, Sse,
    sse::{Event, KeepAlive},
};
use futures_util::stream;
use serde::Serialize;
use std::{collections::VecDeque, convert::Infallible, time::Duration};

/// A comment goes out after this much silence, so that a dead client is noticed while nothing is generated.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// How an endpoint writes its chunks.
pub trait Format: Send + 'static {
    type Chunk: Serialize;

    /// Before the first delta of each choice.
    fn opening(&mut self, choices: usize) -> Vec<Self::Chunk>;
    /// `usage`: running totals, if the client asked for them.
    fn delta(&mut self, delta: Delta, usage: Option<Usage>) -> Option<Self::Chunk>;
    /// The totals, if the client asked for them.
    fn closing(&mut self, usage: Usage) -> Option<Self::Chunk>;
}

struct Streaming<F> {
    answer: Answer,
    format: F,
    continuous_usage: bool,
    ready: VecDeque<Event>,
    done: bool,
}

pub fn respond<F: Format>(answer: Answer, mut format: F, continuous_usage: bool) -> Response {
    let ready = format.opening(answer.choices()).iter().map(event).collect();
    let state = Streaming { answer, format, continuous_usage, ready, done: false };
    let events = stream::unfold(state, |mut state| async move {
        let event = state.next().await?;
        Some((Ok::<_, Infallible>(event), state))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

impl<F: Format> Streaming<F> {
    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.done {
            match self.answer.next().await {
                Ok(Some(delta)) => {
                    let usage = self.continuous_usage.then(|| self.answer.usage().clone());
                    self.ready.extend(self.format.delta(delta, usage).as_ref().map(event));
                }
                Ok(None) => {
                    let closing = self.format.closing(self.answer.usage().clone());
                    self.ready.extend(closing.as_ref().map(event));
                    self.end();
                }
                Err(error) => {
                    self.ready.push_back(event(&error.body()));
                    self.end();
                }
            }
        }
        self.ready.pop_front()
    }

    fn end(&mut self) {
        self.ready.push_back(Event::default().data("[DONE]"));
        self.done = true;
    }
}

fn event(chunk: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(chunk).expect("chunks have string keys"))
}
