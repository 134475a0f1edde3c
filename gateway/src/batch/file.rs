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
    #[error("all tenants' files together would have {bytes} bytes, and may have {max} (`batch_total_bytes_max`)")]
    Total { bytes: u64, max: u64 },
    #[error("this server's disk has {free} bytes left, and keeps {reserve} free of clients' files (`batch_disk_reserve`)")]
    Disk { free: u64, reserve: u64 },
}

/// Files, and the bytes of files and of answers that are not in one yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub files: usize,
    pub bytes: u64,
}

impl Room {
    /// Checks whether a tenant that has `held` may have `more`.
    pub fn check(&self, held: Used, more: Used) -> Result<(), NoRoom> {
        let bytes = held.bytes.saturating_add(more.bytes);
        if more.files > 0 && held.files + more.files > self.files {
            return Err(NoRoom::Files(held.files));
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
        let check = |files, bytes, more| room.check(Used { files, bytes }, Used { files: 1, bytes: more });
        assert_eq!(check(1, 6, 4), Ok(()));
        assert_eq!(check(1, 6, 5), Err(NoRoom::Bytes { bytes: 11, max: 10 }));
        assert_eq!(check(2, 2, 1), Err(NoRoom::Files(2)));
        assert_eq!(check(0, 0, u64::MAX), Err(NoRoom::Bytes { bytes: u64::MAX, max: 10 }));
        assert_eq!(room.check(Used { files: 2, bytes: 2 }, Used { files: 0, bytes: 1 }), Ok(()), "answers are no file yet");
    }
}
