//! Shadows: requests that a rollout's new model answers as well, after the old one has. The answer is not shown, no tenant pays for it, and
//! it comes last: at batch class, a few at a time, and not at all under high load.

use super::{
    record::Rollout,
    running::{Live, Rollouts},
};
use crate::{generation::piece::Piece, metrics};
use serde_json::{Map, Value};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// The maximum size of an answer's text that is kept: a longer one is compared by its beginning.
const TEXT_BYTES_MAX: usize = 1 << 20;

/// A request that is to have a shadow, while its answer is being made.
#[derive(Debug)]
pub struct Mirror {
    path: &'static str,
    /// The body as the client sent it.
    body: Map<String, Value>,
    live: Arc<Live>,
    _permit: OwnedSemaphorePermit,
}

/// An answer to compare.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    text: String,
    chars: u64,
    /// Whether the same answer would come out again.
    pub(crate) repeatable: bool,
}

/// Observes an answer's first choice, and sends it once it has ended well.
#[derive(Debug)]
pub struct Tap {
    heard: Heard,
    to: oneshot::Sender<Heard>,
}

impl Tap {
    pub fn new(repeatable: bool) -> (Self, oneshot::Receiver<Heard>) {
        let (to, heard) = oneshot::channel();
        (Self { heard: Heard { repeatable, ..Heard::default() }, to }, heard)
    }

    pub fn hear(&mut self, piece: &Piece) {
        let calls = piece.calls.iter().flat_map(|call| call.name.as_deref().into_iter().chain([call.arguments.as_str()]));
        for text in [piece.reasoning.as_str(), piece.text.as_str()].into_iter().chain(calls) {
            self.heard.chars += text.chars().count() as u64;
            let room = TEXT_BYTES_MAX.saturating_sub(self.heard.text.len());
            self.heard.text.push_str(&text[..text.floor_char_boundary(room)]);
        }
    }

    pub fn end(self) {
        // The receiver may be gone.
        let _ = self.to.send(self.heard);
    }
}

impl Mirror {
    /// Draws whether a request is mirrored, with the rollout's probability; `None` if not.
    pub fn of(rollouts: &Rollouts, live: &Arc<Live>, path: &'static str, body: &Map<String, Value>) -> Option<Self> {
        if !live.record.state.is_open() || rand::random::<f64>() >= live.record.shadow {
            return None;
        }
        let Some(permit) = rollouts.admit_shadow() else {
            dropped(live);
            return None;
        };
        Some(Self { path, body: body.clone(), live: Arc::clone(live), _permit: permit })
    }

    /// The model that the shadow is for.
    pub(crate) fn model(&self) -> &str {
        &self.live.record.to
    }

    /// Counts a shadow that is dropped because of high load.
    pub(crate) fn drop_it(&self) {
        dropped(&self.live);
    }

    /// Compares the answers of both models; `other` is `None` if the new one gave none.
    pub(crate) fn compare(&self, own: &Heard, other: Option<&Heard>) {
        let outcome = match other {
            None => "failed",
            Some(_) if !own.repeatable => "drawn",
            Some(other) if other.text == own.text && other.chars == own.chars => "same",
            Some(_) => "differs",
        };
        count(&self.live, outcome);
        self.live.note_shadow(|shadows| {
            match outcome {
                "failed" => shadows.failed += 1,
                "drawn" => shadows.drawn += 1,
                "same" => shadows.same += 1,
                _ => shadows.differs += 1,
            }
            if let Some(other) = other {
                shadows.from_chars += own.chars;
                shadows.to_chars += other.chars;
            }
        });
    }

    pub(crate) fn path(&self) -> &'static str {
        self.path
    }

    /// Returns the request for the other model: not streamed, and not stored. `None` if it continues stored data, which a shadow must not
    /// touch.
    pub(crate) fn request(&self) -> Option<Vec<u8>> {
        rewritten(self.body.clone(), &self.live.record)
    }
}

fn count(live: &Live, outcome: &'static str) {
    metrics::count_shadow(&live.record.to, outcome);
}

fn dropped(live: &Live) {
    count(live, "dropped");
    live.note_shadow(|shadows| shadows.dropped += 1);
}

fn rewritten(mut body: Map<String, Value>, record: &Rollout) -> Option<Vec<u8>> {
    if ["conversation", "previous_response_id"].iter().any(|name| body.get(*name).is_some_and(|value| !value.is_null())) {
        return None;
    }
    for field in ["stream", "stream_options", "service_tier"] {
        body.remove(field);
    }
    body.insert("model".into(), record.to.as_str().into());
    body.insert("store".into(), false.into());
    serde_json::to_vec(&body).ok()
}

#[cfg(test)]
mod tests {
    use super::{super::record::tests::rollout, *};
    use serde_json::json;

    #[test]
    fn a_shadow_is_whole_not_stored_and_of_the_other_model() {
        let rewritten = |body: Value| {
            let body = rewritten(body.as_object().unwrap().clone(), &rollout())?;
            Some(serde_json::from_slice::<Value>(&body).unwrap())
        };
        let body =
            json!({"model": "a", "stream": true, "stream_options": {"include_usage": true}, "store": true, "messages": [], "seed": 3});
        assert_eq!(rewritten(body), Some(json!({"model": "b", "store": false, "messages": [], "seed": 3})));
        assert_eq!(rewritten(json!({"conversation": "conv_1"})), None);
        assert_eq!(rewritten(json!({"previous_response_id": "resp_1"})), None);
        assert!(rewritten(json!({"previous_response_id": null})).is_some());
    }

    #[test]
    fn long_answers_are_kept_in_part_and_counted_whole() {
        let (mut tap, mut heard) = Tap::new(true);
        (0..3).for_each(|_| tap.hear(&Piece { text: "é".repeat(TEXT_BYTES_MAX / 2 - 1), ..Piece::default() }));
        tap.end();
        let Heard { text, chars, repeatable } = heard.try_recv().unwrap();
        assert!(text.len() <= TEXT_BYTES_MAX && repeatable);
        assert_eq!(chars, 3 * (TEXT_BYTES_MAX as u64 / 2 - 1));
    }
}
