//! Clients' stored files, and files of answers.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// The purposes of files: requests that a client stores, and answers that it gets.
pub const INPUT: &str = "batch";
pub const OUTPUT: &str = "batch_output";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFile {
    pub id: String,
    /// The name of an [`Owner`](crate::store::Owner).
    pub owner: String,
    pub filename: String,
    pub purpose: String,
    pub bytes: u64,
    /// Determines the order of lists.
    pub created_ms: u64,
    /// The time of expiry in Unix seconds; `None` if the file is kept until it is deleted.
    pub expires_at: Option<u64>,
}

impl StoredFile {
    pub fn is_old(&self, now: u64) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    /// Lets the file expire at this age at the latest.
    pub fn with_age(mut self, age: Option<Duration>) -> Self {
        let at = age.map(|age| (self.created_ms / 1000).saturating_add(age.as_secs()));
        self.expires_at = self.expires_at.into_iter().chain(at).min();
        self
    }

    /// Returns the file as clients see it.
    pub fn view(&self) -> Value {
        json!({
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_ms / 1000, "expires_at": self.expires_at,
            "filename": self.filename, "purpose": self.purpose, "status": "processed", "status_details": null,
        })
    }
}

/// The room that one tenant may fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub files: usize,
    /// The maximum size of all files together.
    pub bytes: u64,
}

/// The reason why a file is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    #[error("your tenant has {0} files, and may have no more: delete some")]
    Files(usize),
    #[error("your tenant's files would have {bytes} bytes, and may have {max}: delete some")]
    Bytes { bytes: u64, max: u64 },
}

impl Room {
    /// Checks whether one more file of this size fits beside `others` of the same tenant.
    pub fn check(&self, others: impl Iterator<Item = u64>, bytes: u64) -> Result<(), NoRoom> {
        let (files, stored) = others.fold((0, 0_u64), |(files, stored), bytes| (files + 1, stored.saturating_add(bytes)));
        let bytes = stored.saturating_add(bytes);
        if files >= self.files {
            return Err(NoRoom::Files(files));
        }
        if bytes > self.bytes {
            return Err(NoRoom::Bytes { bytes, max: self.bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_so_many_files_and_bytes() {
        let room = Room { files: 2, bytes: 10 };
        assert_eq!(room.check([6].into_iter(), 4), Ok(()));
        assert_eq!(room.check([6].into_iter(), 5), Err(NoRoom::Bytes { bytes: 11, max: 10 }));
        assert_eq!(room.check([1, 1].into_iter(), 1), Err(NoRoom::Files(2)));
        assert_eq!(room.check(std::iter::empty(), u64::MAX), Err(NoRoom::Bytes { bytes: u64::MAX, max: 10 }));
    }
}
