//! Storage of tenants and keys. A narrow interface: a keeper hands out the changes that lead to the current state, and accepts further
//! ones.
//!
//! - [`memory`]: until this process ends; [`sqlite`]: a file, which several coordinators of one host may share
//! - the coordinator has a third one: records of the registry that several coordinators agree on

pub mod memory;
pub mod sqlite;

use crate::records::Change;
use std::fmt::Debug;

/// A store of tenants and keys. No request waits for it: it is used at start, when an operator makes a change, and periodically. Calls may
/// block.
pub trait Keeper: Debug + Send + Sync {
    /// Returns every record, tenants before keys. Does not block.
    fn load(&self) -> Result<Vec<Change>, KeepError>;
    /// Whether the loaded records are complete. Until then no caller can be admitted, with a key or without.
    fn is_complete(&self) -> bool {
        true
    }
    /// Stores a change. On return, it survives the process.
    fn apply(&self, change: &Change) -> Result<(), KeepError>;
    /// Whether other processes may have changed something since the last call.
    fn changed(&self) -> Result<bool, KeepError>;
}

#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("cannot make {path}: {source}")]
    File { path: std::path::PathBuf, source: std::io::Error },
    #[error("tenants and keys cannot be kept: {0}")]
    Database(#[from] rusqlite::Error),
    #[error("a record of tenants and keys cannot be read: {0}")]
    Record(#[from] serde_json::Error),
    #[error("{path} was written by another version (schema {found}, not {expected}): use that version, or another file")]
    Version { path: std::path::PathBuf, found: i64, expected: i64 },
    #[error("the coordinators did not agree on a change of tenants or keys, which may still take effect: {0}")]
    NotNow(String),
    #[error("the coordinators refused a change of tenants or keys: {0}")]
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::{memory::Memory, sqlite::Sqlite, *};
    use crate::{
        key::Secret,
        limits::{Limit, Overrides},
        records::{Key, Tenant},
    };

    fn changes() -> [Change; 3] {
        let limits = Overrides { requests_per_minute: Some(Limit(Some(3))), ..Overrides::default() };
        let tenant =
            Tenant { id: "acme".into(), tier: "free".into(), limits, semantic_cache: false, erased: 0, erasures: Vec::new(), created: 5 };
        let secret = Secret::new([3; 32]);
        let key = Key {
            id: secret.prefix().into(),
            digest: secret.digest(),
            tenant: "acme".into(),
            user: None,
            name: Some("ci".into()),
            limits: Overrides::default(),
            created: 6,
            expires: None,
            revoked: None,
        };
        [Change::Tenant(tenant), Change::Key(key.clone()), Change::Key(Key { revoked: Some(9), ..key })]
    }

    /// The contract of every keeper.
    fn contract(keeper: &dyn Keeper) {
        let [tenant, key, revoked] = changes();
        assert!(keeper.load().unwrap().is_empty());
        for change in [&tenant, &key, &revoked, &tenant, &revoked] {
            keeper.apply(change).unwrap();
        }
        assert_eq!(keeper.load().unwrap(), [tenant, revoked]);
    }

    #[test]
    fn keepers_keep_the_last_of_each_record() {
        contract(&Memory::default());
        let dir = tempfile::tempdir().unwrap();
        contract(&Sqlite::open(&dir.path().join("new/tenants.sqlite")).unwrap());
    }

    #[test]
    fn two_processes_share_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tenants.sqlite");
        let (first, second) = (Sqlite::open(&path).unwrap(), Sqlite::open(&path).unwrap());
        assert!(!second.changed().unwrap());
        first.apply(&changes()[0]).unwrap();
        assert!(!first.changed().unwrap(), "one's own changes are known");
        assert_eq!([second.changed().unwrap(), second.changed().unwrap()], [true, false]);
        assert_eq!(second.load().unwrap(), changes()[..1]);
    }

    #[test]
    fn no_secret_is_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tenants.sqlite");
        let keeper = Sqlite::open(&path).unwrap();
        changes().iter().for_each(|change| keeper.apply(change).unwrap());
        drop(keeper);
        let secret = Secret::new([3; 32]);
        let rest = &secret.reveal()[secret.prefix().len()..];
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let path = file.unwrap().path();
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            assert!(!text.contains(rest), "{}", path.display());
        }
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
