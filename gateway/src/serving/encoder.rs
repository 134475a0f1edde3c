//! A model that reads texts for the gateway itself, and how long requests wait for it.

use crate::vectors::patience::{Patience, Reading};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The maximum number of questions that are being read.
const QUESTIONS_MAX: usize = 64;

#[derive(Debug)]
pub struct Encoder {
    /// The name of the served model.
    pub model: String,
    /// The longest time that a request waits for its question to be read.
    pub wait: Duration,
    /// Records the time in which a question was read, or given up.
    pub observe: fn(Duration),
    patience: Mutex<Patience>,
    turns: Arc<Semaphore>,
    since: Instant,
}

impl Encoder {
    pub fn new(EncoderSettings { model, wait }: EncoderSettings, observe: fn(Duration)) -> Self {
        let turns = Arc::new(Semaphore::new(QUESTIONS_MAX));
        Self { model, wait, observe, patience: Mutex::default(), turns, since: Instant::now() }
    }

    /// A turn for one question; `None` if too many are being read.
    pub fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.turns).try_acquire_owned().ok()
    }

    pub fn ask(&self) -> Reading {
        self.patience.lock().ask(self.since.elapsed())
    }

    pub fn settle(&self, reading: Reading, in_time: bool) {
        self.patience.lock().settle(reading, in_time, self.since.elapsed());
    }

    /// Whether the last questions that requests waited for were read in time.
    pub fn is_in_time(&self) -> bool {
        self.patience.lock().is_in_time()
    }
}

/// The encoder of one purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderSettings {
    /// The served model whose embeddings are compared.
    pub model: String,
    /// The longest time that a request waits for its question's embedding.
    pub wait: Duration,
}
