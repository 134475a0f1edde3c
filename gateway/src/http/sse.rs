//! An answer as server-sent events: `data: {chunk}` per delta, an error event if it breaks off, `data: [DONE]` at the end.

use super::endpoint::{Call, Endpoint};
use crate::serving::{
    answer::{News, Waiting},
    replays::KEEP_ALIVE,
    rounds::rounded::Rounded,
};
use axum::response::{
    IntoResponse, Response, Sse,
    sse::{Event, KeepAlive},
};
use futures_util::stream;
use serde::Serialize;
use std::{collections::VecDeque, convert::Infallible};

struct Streaming<E> {
    answer: Rounded,
    call: Call,
    endpoint: E,
    ready: VecDeque<Event>,
    done: bool,
}

pub fn respond<E: Endpoint>(mut answer: Rounded, call: Call, mut endpoint: E) -> Response {
    let opening = (0..answer.running().choices() as u32).filter_map(|index| endpoint.opening(&call, index));
    let ready = opening.map(|chunk| event(&chunk)).collect();
    let state = Streaming { answer, call, endpoint, ready, done: false };
    let events = stream::unfold(state, |mut state| async move {
        let event = state.next().await?;
        Some((Ok::<_, Infallible>(event), state))
    });
    Sse::new(events).keep_alive(keep_alive()).into_response()
}

pub(super) fn keep_alive() -> KeepAlive {
    KeepAlive::new().interval(KEEP_ALIVE)
}

impl<E: Endpoint> Streaming<E> {
    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.done {
            match self.answer.next().await {
                Ok(Some(News::Waiting(waiting))) => self.ready.push_back(Event::default().comment(comment(waiting))),
                Ok(Some(News::Delta(delta))) => {
                    if let Some(turn) = self.endpoint.turn() {
                        turn.hear(&delta, &self.answer.usage()).await;
                    }
                    let usage = self.call.options.continuous_usage.then(|| self.answer.usage());
                    self.ready.push_back(event(&self.endpoint.chunk(&self.call, delta, usage)));
                }
                Ok(None) => {
                    if self.call.options.include_usage {
                        self.ready.push_back(event(&self.endpoint.closing(&self.call, self.answer.usage())));
                    }
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

/// For a client that waits: programs skip comments, and people who look at the stream see them.
fn comment(Waiting { position, estimate_ms }: Waiting) -> String {
    let estimate = estimate_ms.map_or(String::new(), |ms| format!(", about {:.1} s", ms as f64 / 1e3));
    format!("waiting: place {position} in the queue{estimate}")
}

fn event(chunk: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(chunk).expect("chunks have string keys"))
}
