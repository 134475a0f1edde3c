//! The NVMe tier of a node: the disk's files, and the threads that read and write them.
//!
//! - [`slab`]: slots of blocks in one file, and an index of what each holds
//! - `threads`: reading and writing, so that no other task waits for the disk

pub mod slab;
mod threads;

pub(super) use threads::{DiskJob, NvmeThreads};

use crate::settings;
use slab::{Geometry, Manifest, Slab, SlabError};
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};

/// A disk that could be opened.
#[derive(Debug)]
pub(super) struct Nvme {
    slab: Arc<Slab>,
    capacity_bytes: u64,
}

impl Nvme {
    /// Opens the disk, or returns `None` if it is not usable. A node without one is slower, but works.
    pub(super) fn open(settings::Nvme { dir, capacity_bytes, records }: settings::Nvme) -> Option<Self> {
        // A write beyond the system's limit on file sizes would kill the process. With a handler it is a disk error like any other.
        if let Err(error) = signal(SignalKind::from_raw(nix::libc::SIGXFSZ)) {
            tracing::warn!(%error, "a limit on file sizes would end this node");
        }
        match Slab::open(&dir, records) {
            Ok(slab) => Some(Self { slab: Arc::new(slab), capacity_bytes }),
            Err(error) => {
                tracing::error!(%error, "this node goes on without NVMe");
                None
            }
        }
    }

    /// The manifest that an earlier run left, or `None` if there is none that can be used.
    pub(super) fn manifest(&self) -> Option<Manifest> {
        self.slab.manifest()
    }

    /// Prepares the disk for blocks of this kind. `None` if that failed, and the node continues without a disk.
    pub(super) fn prepare(&self, manifest: Manifest) -> Option<NvmeThreads> {
        let prepared = || -> Result<Geometry, SlabError> {
            let geometry = Geometry::new(self.capacity_bytes, manifest.block_bytes)?;
            self.slab.prepare(manifest, geometry)?;
            Ok(geometry)
        };
        match prepared() {
            Ok(geometry) => Some(NvmeThreads::new(Arc::clone(&self.slab), geometry)),
            Err(error) => {
                tracing::error!(%error, "this node goes on without NVMe");
                None
            }
        }
    }
}
