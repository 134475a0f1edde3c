//! Deletion of what has become too old, each kind at its own age.
//!
//! A sweep deletes a bounded number at a time, so that requests come between, until nothing is old any more. Coordinators that share a
//! database sweep side by side: none waits for what another deletes.

use super::settings::Ages;
use crate::{
    batches::Batches,
    features::feedback::Feedback,
    metrics,
    store::{Kind, Store, StoreError},
};
use std::{sync::Arc, time::Duration};

/// A sweep through all that is stored here.
pub(super) struct Sweep<'a> {
    pub(super) ages: Ages,
    pub(super) store: &'a dyn Store,
    pub(super) batches: Option<&'a Batches>,
    pub(super) feedback: Option<&'a Arc<Feedback>>,
}

impl Sweep<'_> {
    /// Deletes what is too old at `now`, in Unix seconds. A kind that cannot be deleted from is logged, and left for the next sweep.
    pub(super) async fn at(&self, now: u64) {
        let Ages { responses, conversations, memories, opinions } = self.ages;
        let kinds = [
            ("responses", Kind::Response, responses),
            ("conversations", Kind::Conversation, conversations),
            ("memories", Kind::Memory, memories),
        ];
        for (name, kind, age) in kinds {
            if let Some(before) = before(now, age) {
                note(name, self.records(kind, before).await);
            }
        }
        if let Some(batches) = self.batches {
            match batches.expire(now).await {
                Ok((files, batches)) => {
                    note::<StoreError>("files", Ok(files));
                    note::<StoreError>("batches", Ok(batches));
                }
                Err(error) => note("files and batches", Err(error)),
            }
        }
        if let (Some(feedback), Some(before)) = (self.feedback, before(now, opinions)) {
            let feedback = Arc::clone(feedback);
            let deleted = tokio::task::spawn_blocking(move || feedback.expire(before).map_err(|error| error.to_string()));
            note("opinions", deleted.await.unwrap_or_else(|panic| Err(panic.to_string())));
        }
    }

    async fn records(&self, kind: Kind, before: u64) -> Result<u64, StoreError> {
        let mut deleted = 0;
        loop {
            match self.store.expire(kind, before).await? {
                0 => return Ok(deleted),
                some => deleted += some,
            }
        }
    }
}

/// The time before which things of this age are too old; `None` if they are kept.
fn before(now: u64, age: Option<Duration>) -> Option<u64> {
    age.map(|age| now.saturating_sub(age.as_secs()))
}

fn note<E: std::fmt::Display>(kind: &'static str, deleted: Result<u64, E>) {
    match deleted {
        Ok(0) => {}
        Ok(deleted) => metrics::note_expired(kind, deleted),
        Err(error) => tracing::warn!(kind, %error, "could not delete what is too old: it is tried again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        batch::file::Room,
        batches::Limits,
        features::feedback::{Answered, FeedbackSettings, Opinion},
        store::{self, NewRecord, Owner, Page, sqlite::Sqlite},
    };
    use tidemill_safety::pii::{self, find::Finder};

    const AGE: Option<Duration> = Some(Duration::from_secs(1000));

    fn owner() -> Owner {
        Owner("acme".into())
    }

    async fn held(store: &dyn Store, kind: Kind) -> usize {
        store.list(&owner(), kind, Page { after: None, limit: 9, descending: false }).await.unwrap().records.len()
    }

    #[tokio::test]
    async fn each_kind_goes_at_its_own_age_and_what_has_none_stays() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room { files: 3, bytes: 100 };
        let (total_bytes, reserve_bytes) = (1000, 0);
        let limits = Limits {
            file_bytes: 50,
            lines: 10,
            room,
            total_bytes,
            reserve_bytes,
            files_age: AGE,
            batches_age: None,
            at_once: 2,
            line_bytes: 1000,
        };
        let batches = Batches::open(dir.path(), limits).unwrap();
        let arriving = batches.upload("acme").await.unwrap();
        let file = batches.keep(arriving, "acme", "requests.jsonl".into(), None).await.unwrap();
        let feedback = FeedbackSettings {
            file: None,
            keep: Duration::from_secs(60),
            bytes_max: 1 << 20,
            finder: Arc::new(Finder::new(&pii::Kind::ALL)),
        };
        let feedback = Arc::new(Feedback::open(feedback).unwrap());
        let store = Sqlite::in_memory(store::Limits { bytes: 1 << 30, history_bytes: 1 << 30 }).unwrap();
        let now = file.created_ms / 1000;
        for (id, kind) in [("resp_1", Kind::Response), ("conv_1", Kind::Conversation), ("mem_1", Kind::Memory)] {
            store.put(&owner(), NewRecord { id: id.into(), kind, body: "{}".into(), ..NewRecord::default() }, now).await.unwrap();
        }
        for (id, at) in [("resp_1", now), ("resp_2", now + 900)] {
            feedback.keep(at, id, &Answered { owner: owner(), ..Answered::default() }, &Opinion::default()).unwrap();
        }
        let ages = Ages { responses: Some(Duration::from_secs(10)), conversations: None, memories: AGE, opinions: AGE };
        let sweep = Sweep { ages, store: &store, batches: Some(&batches), feedback: Some(&feedback) };
        let left = async || {
            let opinions = feedback.list(None, None, 9).unwrap().len();
            let files = usize::from(batches.content(&file).exists());
            let [responses, conversations, memories] = [Kind::Response, Kind::Conversation, Kind::Memory];
            [held(&store, responses).await, held(&store, conversations).await, held(&store, memories).await, files, opinions]
        };
        for (later, expected) in [(10, [1, 1, 1, 1, 2]), (11, [0, 1, 1, 1, 2]), (1001, [0, 1, 0, 0, 1]), (1901, [0, 1, 0, 0, 0])] {
            sweep.at(now + later).await;
            assert_eq!(left().await, expected, "after {later} s");
        }
    }
}
