//! The examples with which `auto` compares requests, and the encoder that reads both.

use super::encoder::{Encoder, EncoderSettings};
use crate::{metrics, routing::meaning::Examples};
use parking_lot::Mutex;
use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

/// The time after which examples that could not be read are tried again.
const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExampleSettings {
    pub encoder: EncoderSettings,
    /// Requests that the small model should answer.
    pub small: Vec<String>,
    /// Requests that the large model should answer.
    pub large: Vec<String>,
}

#[derive(Debug)]
pub struct RouteExamples {
    pub encoder: Arc<Encoder>,
    pub small: Vec<String>,
    pub large: Vec<String>,
    /// The examples, once they are read.
    read: OnceLock<Examples>,
    /// The time of the last attempt to read them.
    tried: Mutex<Option<Instant>>,
}

impl RouteExamples {
    pub fn new(ExampleSettings { encoder, small, large }: ExampleSettings) -> Self {
        let encoder = Arc::new(Encoder::new(encoder, metrics::observe_route_read));
        Self { encoder, small, large, read: OnceLock::new(), tried: Mutex::default() }
    }

    pub fn read(&self) -> Option<&Examples> {
        self.read.get()
    }

    /// Takes the examples.
    pub fn take(&self, examples: Examples) {
        // A reader that came first has read the same.
        let _ = self.read.set(examples);
    }

    /// Whether it is time to read the examples (again). Then the caller does so.
    pub fn are_due(&self) -> bool {
        let mut tried = self.tried.lock();
        let is_due = self.read().is_none() && tried.is_none_or(|tried| tried.elapsed() >= TRIED_AGAIN_AFTER);
        if is_due {
            *tried = Some(Instant::now());
        }
        is_due
    }
}
