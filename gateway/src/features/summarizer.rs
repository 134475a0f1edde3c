//! Makes running summaries of long conversations, in the background. Each is requested from a model in the name of its conversation's
//! sender, in the lowest class: it uses that tenant's quota, counts in its usage, has its salt, and passes the same safety checks as any
//! text. It is stored with the conversation; one that is lost in a crash or to a full queue is requested again by the next turn.

use crate::{batch::life::Sender, context::summing::Summing, metrics, store::Owner};
use futures_util::FutureExt;
use parking_lot::Mutex;
use std::{
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};
use tokio::{sync::Notify, task::JoinSet, time};

#[derive(Clone, Debug)]
pub struct Settings {
    /// The model that summarizes; `None` for each conversation's own.
    pub model: Option<String>,
    /// The longest time of one summary.
    pub deadline: Duration,
    /// The maximum number of conversations that wait. One without room is requested again at its next turn.
    pub waiting_max: usize,
    pub at_once: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { model: None, deadline: Duration::from_secs(120), waiting_max: 256, at_once: 2 }
    }
}

#[derive(Debug)]
pub struct Summarizer {
    settings: Settings,
    began: Instant,
    summing: Mutex<Summing<Key, SummaryRequest>>,
    come: Notify,
}

/// A conversation, by its owner and id.
pub(crate) type Key = (Owner, String);

#[derive(Debug)]
pub(crate) struct SummaryRequest {
    /// The sender in whose name it is made.
    pub(crate) sender: Sender,
    /// The model of the conversation.
    pub(crate) model: String,
    /// The number of first items to summarize.
    pub(crate) items: usize,
}

/// The reason why there is no summary.
#[derive(Debug)]
pub(crate) enum Unmade {
    /// The summary is no longer needed: the conversation was deleted, or changed.
    Gone,
    Failed(String),
}

impl Summarizer {
    pub fn new(settings: Settings) -> Self {
        let summing = Mutex::new(Summing::new(settings.waiting_max));
        Self { settings, began: Instant::now(), summing, come: Notify::new() }
    }

    /// Requests a summary of a conversation, unless one has just failed.
    pub(crate) fn wish(&self, key: Key, wish: SummaryRequest) {
        let mut summing = self.summing.lock();
        if summing.has_failed(self.began.elapsed(), &key, wish.items) {
            return;
        }
        if summing.push(key, wish) {
            self.come.notify_one();
        } else {
            metrics::count_summary("dropped");
        }
    }

    /// Whether summarizing this many items of a conversation failed a short while ago.
    pub(crate) fn has_failed(&self, key: &Key, items: usize) -> bool {
        self.summing.lock().has_failed(self.began.elapsed(), key, items)
    }

    /// Makes summaries with `make`, a few at a time. Never returns.
    pub(crate) async fn run<F>(&self, make: impl Fn(Settings, Key, SummaryRequest) -> F)
    where
        F: Future<Output = Result<(), Unmade>> + Send + 'static,
    {
        let mut running = JoinSet::new();
        loop {
            while running.len() < self.settings.at_once
                && let Some((key, wish)) = self.take()
            {
                let (deadline, items) = (self.settings.deadline, wish.items);
                let making = make(self.settings.clone(), key.clone(), wish);
                running.spawn(async move {
                    let made = AssertUnwindSafe(time::timeout(deadline, making)).catch_unwind().await;
                    let made = match made {
                        Ok(Ok(made)) => made,
                        Ok(Err(_)) => Err(Unmade::Failed(format!("it took longer than {deadline:?}"))),
                        Err(_) => Err(Unmade::Failed("it panicked: please report this as a bug".into())),
                    };
                    (key, items, made)
                });
            }
            metrics::show_summaries_waiting(self.summing.lock().waiting());
            tokio::select! {
                () = self.come.notified() => {}
                Some(ended) = running.join_next() => {
                    let (key, items, made) = ended.expect("a panic was caught");
                    self.ended(&key, items, made);
                }
            }
        }
    }

    fn ended(&self, key: &Key, items: usize, made: Result<(), Unmade>) {
        let failed = match made {
            Ok(()) => {
                metrics::count_summary("made");
                None
            }
            Err(Unmade::Gone) => {
                metrics::count_summary("gone");
                None
            }
            Err(Unmade::Failed(reason)) => {
                tracing::warn!(conversation = key.1, reason, "could not summarize a conversation; it continues without a summary");
                metrics::count_summary("failed");
                Some(items)
            }
        };
        self.summing.lock().ended(self.began.elapsed(), key, failed);
    }

    fn take(&self) -> Option<(Key, SummaryRequest)> {
        self.summing.lock().take()
    }
}
