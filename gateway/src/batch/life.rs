//! A batch's life, as it is kept on disk and as clients see it:
//!
//! ```text
//! validating ──► in_progress ──► finalizing ──► completed, or expired
//!     │               │
//!     ├──► failed     └──► cancelling ──► cancelled
//!     └──► cancelling
//! ```
//!
//! Times are Unix seconds, and arguments. Which requests were answered is not kept here, but follows from the files of answers.

use super::input::Problem;
use crate::base::owner::Owner;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The only `completion_window`, as clients name it.
pub const WINDOW: &str = "24h";
/// The same in seconds.
const WINDOW_S: u64 = 24 * 3600;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

/// The end of a batch whose file was valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Completed,
    Expired,
    Cancelled,
}

/// The sender of a batch and its requests. It is looked up again at each request, since keys are revoked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    /// The tenant; `None` if no key was needed.
    pub tenant: Option<String>,
    /// The tier of a sender with a signed token.
    pub tier: Option<String>,
    pub user: Option<String>,
    pub key: Option<String>,
    /// The expiry of the signed token, in Unix seconds.
    #[serde(default)]
    pub until: Option<u64>,
}

impl Sender {
    /// The name of the owner of the sender's data: the same as for its other requests.
    pub fn owner(&self) -> String {
        Owner::of(self.tenant.as_deref(), self.user.as_deref()).0
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    pub id: String,
    pub sender: Sender,
    pub endpoint: String,
    pub input_file: String,
    pub metadata: BTreeMap<String, String>,
    /// The age at which the files of answers are deleted; `None` if only the server's limit applies.
    pub output_age_s: Option<u64>,
    pub status: Status,
    /// Set once no more requests will run. The files of answers then have their names, but may not be in place yet.
    pub ending: Option<Ending>,
    pub output_file: Option<String>,
    pub error_file: Option<String>,
    pub counts: Counts,
    pub problems: Vec<Problem>,
    /// Determines the order of lists.
    pub created_ms: u64,
    pub times: Times,
}

/// The times at which a batch reached each status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    pub in_progress: Option<u64>,
    pub finalizing: Option<u64>,
    pub completed: Option<u64>,
    pub failed: Option<u64>,
    pub expired: Option<u64>,
    pub cancelling: Option<u64>,
    pub cancelled: Option<u64>,
}

/// A client's request for a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewBatch {
    pub endpoint: String,
    pub input_file: String,
    pub metadata: BTreeMap<String, String>,
    pub output_age_s: Option<u64>,
}

impl Batch {
    pub fn new(id: String, sender: Sender, wanted: NewBatch, created_ms: u64) -> Self {
        let NewBatch { endpoint, input_file, metadata, output_age_s } = wanted;
        Self {
            id,
            sender,
            endpoint,
            input_file,
            metadata,
            output_age_s,
            status: Status::Validating,
            ending: None,
            output_file: None,
            error_file: None,
            counts: Counts::default(),
            problems: Vec::new(),
            created_ms,
            times: Times::default(),
        }
    }

    pub fn expires_at(&self) -> u64 {
        self.created_ms / 1000 + WINDOW_S
    }

    /// Accepts a valid file, or one that was accepted earlier: the batch resumes where it was.
    pub fn accept(&mut self, now: u64, counts: Counts) {
        if self.is_over() || self.ending.is_some() {
            return;
        }
        self.counts = counts;
        self.times.in_progress.get_or_insert(now);
        if self.status == Status::Validating {
            self.status = Status::InProgress;
        }
    }

    /// Fails the batch: its file is invalid, or gone.
    pub fn refuse(&mut self, now: u64, problems: Vec<Problem>) {
        if self.is_over() {
            return;
        }
        self.status = Status::Failed;
        self.times.failed = Some(now);
        self.problems = problems;
    }

    /// Counts the answer to a request, good or bad.
    pub fn answered(&mut self, good: bool) {
        if good { self.counts.completed += 1 } else { self.counts.failed += 1 }
    }

    /// Cancels the batch: no more of its requests start. Returns `false` if it is too late for that.
    pub fn cancel(&mut self, now: u64) -> bool {
        match self.status {
            Status::Validating | Status::InProgress => {
                self.status = Status::Cancelling;
                self.times.cancelling = Some(now);
                true
            }
            Status::Cancelling | Status::Cancelled => true,
            Status::Failed | Status::Finalizing | Status::Completed | Status::Expired => false,
        }
    }

    /// Stops the batch, because its sender lost access.
    pub fn stop(&mut self, now: u64, problem: Problem) {
        if self.cancel(now) && self.problems.is_empty() {
            self.problems.push(problem);
        }
    }

    /// Returns the ending of the batch, if no more requests are to run.
    pub fn ends(&self, now: u64) -> Option<Ending> {
        match self.status {
            Status::Cancelling => Some(Ending::Cancelled),
            Status::InProgress if self.counts.completed + self.counts.failed >= self.counts.total => Some(Ending::Completed),
            Status::InProgress if now >= self.expires_at() => Some(Ending::Expired),
            _ => None,
        }
    }

    /// Notes that all answers are in. The files get their names now, so that a process that finishes the batch later uses the same names.
    pub fn finalize(&mut self, now: u64, ending: Ending, output_file: Option<String>, error_file: Option<String>) {
        self.ending = Some(ending);
        (self.output_file, self.error_file) = (output_file, error_file);
        self.times.finalizing = Some(now);
        if self.status == Status::InProgress {
            self.status = Status::Finalizing;
        }
    }

    /// Notes that the files are in place.
    pub fn close(&mut self, now: u64) {
        let (status, time) = match self.ending {
            Some(Ending::Completed) => (Status::Completed, &mut self.times.completed),
            Some(Ending::Expired) => (Status::Expired, &mut self.times.expired),
            Some(Ending::Cancelled) => (Status::Cancelled, &mut self.times.cancelled),
            None => return,
        };
        self.status = status;
        time.get_or_insert(now);
    }

    pub fn is_over(&self) -> bool {
        self.ended_at().is_some()
    }

    pub fn ended_at(&self) -> Option<u64> {
        let Times { completed, failed, expired, cancelled, .. } = self.times;
        completed.or(failed).or(expired).or(cancelled)
    }

    /// Returns the batch as clients see it.
    pub fn view(&self) -> Value {
        let Times { in_progress, finalizing, completed, failed, expired, cancelling, cancelled } = self.times;
        let problems = (!self.problems.is_empty()).then(|| json!({"object": "list", "data": self.problems}));
        // Its files can be read only once they are in place.
        let shown = |file: &Option<String>| file.clone().filter(|_| self.is_over());
        json!({
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "errors": problems,
            "input_file_id": self.input_file, "completion_window": WINDOW, "status": self.status,
            "output_file_id": shown(&self.output_file), "error_file_id": shown(&self.error_file),
            "created_at": self.created_ms / 1000, "in_progress_at": in_progress, "expires_at": self.expires_at(),
            "finalizing_at": finalizing, "completed_at": completed, "failed_at": failed, "expired_at": expired,
            "cancelling_at": cancelling, "cancelled_at": cancelled,
            "request_counts": self.counts, "metadata": self.metadata,
        })
    }

    /// Panics if its parts contradict each other.
    pub fn check_integrity(&self) {
        let Counts { total, completed, failed } = self.counts;
        assert!(completed + failed <= total, "no request is answered twice");
        let Times { completed, failed, expired, cancelled, .. } = self.times;
        assert!([completed, failed, expired, cancelled].iter().flatten().count() <= 1, "a batch ends once");
        assert_eq!(self.is_over(), matches!(self.status, Status::Completed | Status::Failed | Status::Expired | Status::Cancelled));
        assert_eq!(self.status == Status::Failed, self.is_over() && self.ending.is_none());
        assert!(self.status != Status::Finalizing || self.ending.is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn batch() -> Batch {
        let wanted = NewBatch { endpoint: "/v1/embeddings".into(), input_file: "file-1".into(), ..NewBatch::default() };
        Batch::new("batch_1".into(), Sender::default(), wanted, 1_000_500)
    }

    fn total(total: u64) -> Counts {
        Counts { total, ..Counts::default() }
    }

    #[test]
    fn a_batch_completes_when_all_is_answered() {
        let mut batch = batch();
        assert_eq!((batch.status, batch.ends(1001)), (Status::Validating, None));
        batch.accept(1001, total(2));
        batch.answered(true);
        assert_eq!((batch.status, batch.ends(1002)), (Status::InProgress, None));
        batch.answered(false);
        // Even if its time has just run out.
        assert_eq!(batch.ends(u64::MAX), Some(Ending::Completed));
        batch.finalize(1003, Ending::Completed, Some("file-2".into()), Some("file-3".into()));
        assert_eq!((batch.view()["status"].as_str(), batch.view()["output_file_id"].as_str()), (Some("finalizing"), None));
        batch.close(1004);
        let view = batch.view();
        assert_eq!(view["status"], "completed");
        assert_eq!((&view["output_file_id"], &view["error_file_id"]), (&json!("file-2"), &json!("file-3")));
        assert_eq!(view["request_counts"], json!({"total": 2, "completed": 1, "failed": 1}));
        assert_eq!((&view["completed_at"], &view["finalizing_at"], &view["created_at"]), (&json!(1004), &json!(1003), &json!(1000)));
        assert!(!batch.cancel(1005), "it is over");
        batch.check_integrity();
    }

    #[test]
    fn a_batch_that_goes_on_after_a_restart_keeps_its_times() {
        let mut batch = batch();
        batch.accept(1001, total(2));
        batch.answered(true);
        let mut again: Batch = serde_json::from_value(serde_json::to_value(&batch).unwrap()).unwrap();
        again.accept(2000, Counts { total: 2, completed: 1, failed: 0 });
        assert_eq!(again, batch);
    }

    #[test]
    fn a_day_is_all_that_it_has() {
        let mut batch = batch();
        batch.accept(1001, total(1));
        assert_eq!((batch.ends(1000 + WINDOW_S - 1), batch.ends(1000 + WINDOW_S)), (None, Some(Ending::Expired)));
    }

    #[test]
    fn whoever_may_not_ask_any_more_has_the_reason() {
        let mut batch = batch();
        batch.accept(1001, total(1));
        batch.stop(1002, Problem::new("invalid_api_key", "revoked"));
        assert_eq!((batch.status, batch.ends(1002)), (Status::Cancelling, Some(Ending::Cancelled)));
        assert_eq!(batch.view()["errors"]["data"][0]["code"], "invalid_api_key");
    }

    #[derive(Clone, Debug)]
    enum Event {
        Accept,
        Refuse,
        Answered(bool),
        Cancel,
        End,
        Close,
    }

    proptest! {
        /// The calls of its shell, in any order of outside events.
        #[test]
        fn a_batch_ends_once_whatever_happens(events in prop::collection::vec(
            prop_oneof![
                Just(Event::Accept), Just(Event::Refuse), any::<bool>().prop_map(Event::Answered),
                Just(Event::Cancel), Just(Event::End), Just(Event::Close),
            ], 0..40)) {
            let mut batch = batch();
            for (now, event) in (1001..).zip(events) {
                let before = batch.clone();
                match event {
                    Event::Accept if batch.times.in_progress.is_none() => batch.accept(now, total(3)),
                    Event::Refuse if batch.times.in_progress.is_none() && batch.ending.is_none() => batch.refuse(now, vec![Problem::new("x", "y")]),
                    Event::Answered(good) if batch.ends(now).is_none() && batch.counts.total > 0 && batch.ending.is_none() => batch.answered(good),
                    Event::Cancel => drop(batch.cancel(now)),
                    Event::End => {
                        if let Some(ending) = batch.ends(now).filter(|_| batch.ending.is_none()) {
                            batch.finalize(now, ending, None, None);
                        }
                    }
                    Event::Close => batch.close(now),
                    _ => {}
                }
                batch.check_integrity();
                if before.is_over() {
                    prop_assert_eq!(before.status, batch.status);
                    prop_assert_eq!(before.ended_at(), batch.ended_at());
                }
            }
        }
    }
}
