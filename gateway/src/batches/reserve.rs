//! The disk space that clients do not get: below it, no more of their files are written, and what the server itself writes still fits.

use super::disk::blocking;
use crate::{batch::file::NoRoom, metrics};
use nix::sys::statvfs::statvfs;
use std::path::PathBuf;

/// The size of what was written after which it is checked again whether there is room.
pub(super) const CHECK_EVERY_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Reserve {
    folder: PathBuf,
    bytes: u64,
}

impl Reserve {
    pub(super) fn new(folder: PathBuf, bytes: u64) -> Self {
        Self { folder, bytes }
    }

    /// Checks the free space of the disk as it is now. A disk that cannot be asked is not full: writing to it tells.
    pub(super) async fn check(&self) -> Result<(), NoRoom> {
        let folder = self.folder.clone();
        let Ok(disk) = blocking(move || Ok(statvfs(&folder)?)).await else { return Ok(()) };
        let free = disk.blocks_available().saturating_mul(disk.fragment_size());
        metrics::show_data_free_bytes(free);
        if free < self.bytes {
            metrics::count_disk_refusal();
            return Err(NoRoom::Disk { free, reserve: self.bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_free_is_compared_with_the_reserve() {
        let folder = tempfile::tempdir().unwrap();
        let reserve = async |bytes| Reserve::new(folder.path().to_owned(), bytes).check().await;
        assert_eq!(reserve(1).await, Ok(()));
        assert!(matches!(reserve(u64::MAX).await, Err(NoRoom::Disk { reserve: u64::MAX, free }) if free > 0));
        assert_eq!(Reserve::new("/nowhere/at/all".into(), u64::MAX).check().await, Ok(()));
    }
}
