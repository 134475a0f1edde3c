//! Tenants and keys as records of the registry: each coordinator has all of them, and a change is valid when a majority has it.

use super::CHANGED_MAX;
use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};
use tidemill_registry::{
    command::{Command, Refusal},
    registry::{Failed, Registry},
};
use tidemill_tenancy::{
    keeper::{KeepError, Keeper, sqlite::Sqlite},
    records::Change,
};
use tokio::runtime::Handle;

pub const TENANT: &str = "tenant";
pub const KEY: &str = "key";
/// An id that no key has.
const NO_KEY: &str = "-";
/// The deadline of one attempt to reach a majority.
const HEARD_MAX: Duration = Duration::from_secs(1);

/// The registry as a keeper of tenants and keys. Its calls block, so they need a thread other than the event loop's.
#[derive(Debug)]
pub struct KeysAgreed {
    registry: Registry,
    runtime: Handle,
    /// The file in which this coordinator kept them while it was alone.
    earlier: PathBuf,
    /// Whether this process has seen all changes made before it started.
    complete: AtomicBool,
    /// The index of the registry's last entry that was looked at.
    seen: AtomicU64,
}

impl KeysAgreed {
    /// Must be called on a runtime, whose threads its calls wait on.
    pub fn new(registry: Registry, earlier: PathBuf) -> Self {
        Self { registry, runtime: Handle::current(), earlier, complete: false.into(), seen: 0.into() }
    }

    fn propose(&self, command: Command, within: Duration) -> Result<(), Failed> {
        self.runtime.block_on(self.registry.change(command, within)).map(drop)
    }

    fn put(&self, change: &Change, expected: Option<u64>) -> Result<(), KeepError> {
        let (kind, key) = match change {
            Change::Tenant(tenant) => (TENANT, &tenant.id),
            Change::Key(key) => (KEY, &key.id),
        };
        let command = Command::Put { kind: kind.into(), key: key.clone(), value: serde_json::to_vec(change)?, expected };
        self.propose(command, CHANGED_MAX).map_err(|failed| match failed {
            Failed::Refused(refusal) => KeepError::Refused(refusal.to_string()),
            failed => KeepError::NotNow(format!("{failed}: {}", self.registry.view().why_waiting())),
        })
    }

    /// Makes sure that all changes agreed on before this call are known here. A change without effect is appended to the log after all
    /// others, and its outcome arrives once it is applied here.
    fn catch_up(&self) -> Result<bool, KeepError> {
        let nothing = Command::Delete { kind: KEY.into(), key: NO_KEY.into(), expected: None };
        match self.propose(nothing, HEARD_MAX) {
            Err(Failed::Refused(Refusal::NoRecord)) => {}
            _ => return Ok(false),
        }
        if self.load()?.is_empty() && self.earlier.is_file() {
            let earlier = Sqlite::open(&self.earlier)?.load()?;
            tracing::info!(records = earlier.len(), from = %self.earlier.display(), "tenants and keys go to all coordinators");
            for change in &earlier {
                match self.put(change, Some(0)) {
                    // A different coordinator was first.
                    Ok(()) | Err(KeepError::Refused(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(true)
    }
}

impl Keeper for KeysAgreed {
    fn load(&self) -> Result<Vec<Change>, KeepError> {
        let Some(state) = self.registry.view().state else { return Ok(Vec::new()) };
        let records = [TENANT, KEY].into_iter().flat_map(|kind| state.records_of(kind));
        records.map(|(_, record)| Ok(serde_json::from_slice(&record.value)?)).collect()
    }

    fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    fn apply(&self, change: &Change) -> Result<(), KeepError> {
        self.put(change, None)
    }

    fn changed(&self) -> Result<bool, KeepError> {
        let completed = !self.is_complete() && self.catch_up()?;
        if completed {
            self.complete.store(true, Ordering::Release);
        }
        let applied = self.registry.view().state.map_or(0, |state| state.applied());
        Ok(self.seen.swap(applied, Ordering::Relaxed) != applied || completed)
    }
}
