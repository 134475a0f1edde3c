//! The coordinators' agreed records, as operators see and change them.

use serde::Serialize;
use serde_json::Value;
use std::{collections::BTreeMap, fmt, future::Future, pin::Pin};

/// The agreed records. Reads do not wait; a change waits for a majority of the coordinators, with a deadline.
pub trait Registry: fmt::Debug + Send + Sync {
    fn view(&self) -> RegistryView;
    /// The records of this kind and key, in order.
    fn records(&self, kind: Option<&str>, key: Option<&str>) -> Vec<RecordView>;
    /// Writes a record. With `expected`, only if this is its revision; 0 if it must not exist. Returns the new revision.
    fn put(&self, kind: String, key: String, value: Value, expected: Option<u64>) -> Changing<'_, u64>;
    fn delete(&self, kind: String, key: String, expected: Option<u64>) -> Changing<'_, ()>;
    /// Removes a coordinator that will not return from the group.
    fn remove_coordinator(&self, name: String) -> Changing<'_, ()>;
}

/// The kind of the records that say when a model's cache was reset: the key is the model, and the value a number that grows.
pub const CACHE_RESET: &str = "cache-reset";

pub type Changing<'a, T> = Pin<Box<dyn Future<Output = Result<T, ChangeError>> + Send + 'a>>;

#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Conflict(String),
    /// The change may still take effect.
    #[error("{0}")]
    NotNow(String),
}

/// The state of a coordinator's registry.
#[derive(Clone, Debug, Serialize)]
pub struct RegistryView {
    /// The name of this coordinator.
    pub coordinator: String,
    pub part: &'static str,
    pub leader: Option<String>,
    pub term: u64,
    pub voters: Vec<String>,
    pub learners: Vec<String>,
    pub committed: u64,
    pub applied: u64,
    /// The number of entries that are committed but not applied here.
    pub lag: u64,
    /// For the leader: the number of entries that each other coordinator lacks.
    pub behind: BTreeMap<String, u64>,
    /// The number of changes proposed here without an outcome.
    pub changes_waiting: usize,
    pub workers: usize,
    pub records: usize,
    /// The reason why it has stopped, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct RecordView {
    pub kind: String,
    pub key: String,
    pub value: Value,
    pub revision: u64,
}
