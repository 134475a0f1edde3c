//! Revoked certificates, kept apart from the registry's log: they stay revoked when the log is created anew, as it is after the permanent
//! loss of a majority. They are put into the new log, where the other coordinators and operators find them.

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

#[derive(Debug, Default)]
pub struct Revoked {
    /// `None` if nothing outlives this process.
    file: Option<PathBuf>,
    kept: Kept,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    /// The log, by its group's number.
    log: u64,
    serials: BTreeSet<String>,
}

/// The revoked certificates known from a log and this file.
#[derive(Debug, PartialEq, Eq)]
pub struct Known {
    pub serials: BTreeSet<String>,
    /// Certificates that the log lacks.
    pub missing: BTreeSet<String>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot read the revoked certificates in {path}: {source} (mend it, or move it away and revoke them again)")]
pub struct ReadError {
    path: PathBuf,
    source: io::Error,
}

impl Revoked {
    /// Reads `file`, if it exists.
    pub fn read(file: Option<PathBuf>) -> Result<Self, ReadError> {
        let kept = match &file {
            Some(path) => read(path).map_err(|source| ReadError { path: path.clone(), source })?,
            None => Kept::default(),
        };
        Ok(Self { file, kept })
    }

    /// Returns all revoked certificates, given the records of a log. For the log that was last seen, these records are complete: a record
    /// that an operator deletes is revoked no longer. A new log starts with the certificates of the previous one.
    pub fn all(&mut self, log: u64, records: BTreeSet<String>) -> Known {
        let missing: BTreeSet<_> = match log == self.kept.log {
            true => BTreeSet::new(),
            false => self.kept.serials.difference(&records).cloned().collect(),
        };
        let serials = &records | &missing;
        if missing.is_empty() {
            self.keep(Kept { log, serials: records });
        }
        Known { serials, missing }
    }

    fn keep(&mut self, kept: Kept) {
        if kept == self.kept {
            return;
        }
        if let Some(path) = &self.file
            && let Err(error) = write(path, &kept)
        {
            tracing::error!(path = %path.display(), %error, "revoked certificates cannot be kept beside the registry's log");
        }
        self.kept = kept;
    }
}

fn read(path: &Path) -> io::Result<Kept> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
        Err(error) => Err(error),
    }
}

/// Replaces the file atomically: a reader finds the old one or the new one.
fn write(path: &Path, kept: &Kept) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(kept)?)?;
    file.sync_all()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(serials: &str) -> BTreeSet<String> {
        serials.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn what_was_revoked_stays_so_in_another_log() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Revoked::read(Some(dir.path().join("revoked.json"))).unwrap();
        let known = |serials, missing| Known { serials: set(serials), missing: set(missing) };
        let mut revoked = open();
        assert_eq!(revoked.all(7, set("a b c")), known("a b c", ""));
        assert_eq!(revoked.all(7, set("a b")), known("a b", ""), "what an operator takes back");
        // The log is created anew, and this process restarts in between: the new log receives the certificates one after the other.
        let mut revoked = open();
        assert_eq!(revoked.all(8, set("")), known("a b", "a b"));
        let mut revoked = open();
        assert_eq!(revoked.all(8, set("b d")), known("a b d", "a"));
        assert_eq!(revoked.all(8, set("a b d")), known("a b d", ""));
        assert_eq!(revoked.all(8, set("d")), known("d", ""), "from now on it is the one that counts");
        assert_eq!(open().all(8, set("d")), known("d", ""));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_not_taken_for_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("revoked.json");
        fs::write(&file, "{").unwrap();
        assert!(Revoked::read(Some(file)).unwrap_err().to_string().contains("revoked.json"));
    }
}
