//! The NVMe tier's files: one preallocated file of equal slots, and records that describe the slots' content.
//!
//! ```text
//!   DIR/slab       slot 0 │ slot 1 │ …                whole pages each, read and written past the page cache (O_DIRECT)
//!   DIR/records    manifest │ slot 0 │ slot 1 │ …     format, block size, layout fingerprint; key, checksum, lineage of a block
//! ```
//!
//! The records are in that file, or in RocksDB if the node is told so ([`RecordStore`]).
//!
//! Nothing is synced: a crash may leave a record without its bytes, bytes without their record, or half of either. All of these are
//! misses, because a record is only a claim: a load checks that the bytes hash to the record's checksum.
//!
//! It is a cache: anything unusable is wiped. The [directory](crate::core::directory) decides which slot holds which block.

mod records;

use crate::core::directory::DiskBlock;
use memmap2::{Advice, MmapMut};
use nix::{
    fcntl::{FallocateFlags, OFlag, fallocate},
    sys::statvfs::fstatvfs,
};
use records::Records;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    str::FromStr,
};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint},
    pool::Lineage,
};

#[derive(Debug, thiserror::Error)]
pub enum SlabError {
    #[error("cannot use {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} has room for {free_bytes} bytes, and {wanted_bytes} are to be reserved: give the pool node a smaller --nvme-capacity")]
    Full { path: PathBuf, free_bytes: u64, wanted_bytes: u64 },
    #[error("{capacity_bytes} bytes of disk hold no block of {block_bytes} bytes: give the pool node a larger --nvme-capacity")]
    TooSmall { capacity_bytes: u64, block_bytes: u64 },
}

/// The description of a disk's content. If its file format or its blocks are of another kind, the disk is wiped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    pub block_bytes: u64,
    pub layout: LayoutFingerprint,
}

impl Manifest {
    pub fn new(block_bytes: u64, layout: LayoutFingerprint) -> Self {
        Self { format: FORMAT, block_bytes, layout }
    }
}

/// The store of a disk's records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RecordStore {
    /// A file of equal places.
    #[default]
    File,
    #[cfg(feature = "rocksdb")]
    RocksDb,
}

impl FromStr for RecordStore {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "file" => Ok(Self::File),
            #[cfg(feature = "rocksdb")]
            "rocksdb" => Ok(Self::RocksDb),
            #[cfg(not(feature = "rocksdb"))]
            "rocksdb" => Err("this program was built without RocksDB: take one from the packages, or build it with the feature `rocksdb`"),
            _ => Err("must be file or rocksdb"),
        }
    }
}

/// The files of one disk, open in one process at a time: the records are locked.
#[derive(Debug)]
pub struct Slab {
    records: Records,
    records_path: PathBuf,
    slab: File,
    slab_path: PathBuf,
}

/// The layout of blocks of one size on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    pub slots: u32,
    /// The distance from one slot to the next, in bytes.
    pub stride: usize,
}

/// The version of the files' format.
const FORMAT: u32 = 2;
/// The alignment that O_DIRECT requires of offsets, lengths and memory, enough for any disk.
pub const PAGE: usize = 4096;
/// The number of the manifest's record.
const MANIFEST: u64 = 0;
/// The number of the first slot's record; slot `n` has the one `n` places later.
const FIRST_SLOT: u64 = 1;

impl Geometry {
    /// A geometry with as many slots as the capacity holds.
    pub fn new(capacity_bytes: u64, block_bytes: u64) -> Result<Self, SlabError> {
        let too_small = SlabError::TooSmall { capacity_bytes, block_bytes };
        let Some(stride) = block_bytes.checked_next_multiple_of(PAGE as u64) else { return Err(too_small) };
        let slots = (capacity_bytes / stride).min(u64::from(u32::MAX - 1)) as u32;
        if slots == 0 { Err(too_small) } else { Ok(Self { slots, stride: stride as usize }) }
    }

    pub fn offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.stride as u64
    }

    fn bytes(&self) -> u64 {
        self.offset(self.slots)
    }
}

impl Slab {
    /// Opens the files in `dir`, or creates them. What was recorded in another store is forgotten.
    pub fn open(dir: &Path, store: RecordStore) -> Result<Self, SlabError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| SlabError::File { path, source }
        };
        // Only the owner may read the files: blocks are derived from clients' prompts.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))?;
        let (records_path, slab_path) = (dir.join("records"), dir.join("slab"));
        let records = Records::open(dir, store).map_err(failed(&records_path))?;
        let slab = open_direct(&slab_path).map_err(failed(&slab_path))?;
        Ok(Self { records, records_path, slab, slab_path })
    }

    /// The manifest, or `None` if there is none that this version can read.
    pub fn manifest(&self) -> Option<Manifest> {
        self.records.read::<Manifest>(MANIFEST).filter(|manifest| manifest.format == FORMAT)
    }

    /// Prepares the disk for blocks of this kind and reserves its space. Existing blocks stay if they are of the same kind.
    pub fn prepare(&self, manifest: Manifest, geometry: Geometry) -> Result<(), SlabError> {
        let failed = |source| SlabError::File { path: self.slab_path.clone(), source };
        if self.manifest() != Some(manifest) {
            self.recorded(self.records.clear())?;
            self.slab.set_len(0).map_err(failed)?;
            self.recorded(self.records.write([(MANIFEST, manifest)]))?;
        }
        let held = self.slab.metadata().map_err(failed)?.len();
        if held > geometry.bytes() {
            self.slab.set_len(geometry.bytes()).map_err(failed)?;
        } else if held < geometry.bytes() {
            let disk = fstatvfs(&self.slab).map_err(|error| failed(error.into()))?;
            let (free_bytes, wanted_bytes) = (disk.blocks_available() * disk.fragment_size(), geometry.bytes() - held);
            if free_bytes < wanted_bytes {
                return Err(SlabError::Full { path: self.slab_path.clone(), free_bytes, wanted_bytes });
            }
            let length = i64::try_from(geometry.bytes()).map_err(|_| failed(io::ErrorKind::FileTooLarge.into()))?;
            fallocate(&self.slab, FallocateFlags::empty(), 0, length).map_err(|error| failed(error.into()))?;
        }
        Ok(())
    }

    /// The blocks that the disk claims to hold, by slot, without unreadable records.
    pub fn records(&self) -> impl Iterator<Item = (u32, DiskBlock)> {
        self.records.read_from::<(BlockKey, u64, Lineage)>(FIRST_SLOT).filter_map(|(number, (key, checksum, lineage))| {
            Some((u32::try_from(number - FIRST_SLOT).ok()?, DiskBlock { key, checksum, lineage }))
        })
    }

    /// Records the new content of slots.
    pub fn record(&self, blocks: impl IntoIterator<Item = (u32, DiskBlock)>) -> Result<(), SlabError> {
        let record = |(slot, DiskBlock { key, checksum, lineage })| (FIRST_SLOT + u64::from(slot), (key, checksum, lineage));
        self.recorded(self.records.write(blocks.into_iter().map(record)))
    }

    /// Forgets a slot's block.
    pub fn erase(&self, slot: u32) -> Result<(), SlabError> {
        self.recorded(self.records.erase(FIRST_SLOT + u64::from(slot)))
    }

    fn recorded(&self, outcome: io::Result<()>) -> Result<(), SlabError> {
        outcome.map_err(|source| SlabError::File { path: self.records_path.clone(), source })
    }

    /// Writes to the slab. `offset`, the length of `bytes` and their address must be multiples of [`PAGE`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), SlabError> {
        self.slab.write_all_at(bytes, offset).map_err(|source| SlabError::File { path: self.slab_path.clone(), source })
    }

    /// Reads from the slab, with the same alignment as [`write`](Self::write).
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), SlabError> {
        self.slab.read_exact_at(bytes, offset).map_err(|source| SlabError::File { path: self.slab_path.clone(), source })
    }
}

/// Memory for reading and writing the disk.
pub fn buffer(bytes: usize) -> io::Result<MmapMut> {
    let buffer = MmapMut::map_anon(bytes)?;
    // With huge pages a block is one page, for copies and for the disk. Small pages also work.
    let _ = buffer.advise(Advice::HugePage);
    Ok(buffer)
}

/// Opens a file past the page cache if the file system supports it: blocks would only push other data out of it.
fn open_direct(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.clone().custom_flags(OFlag::O_DIRECT.bits()).open(path).or_else(|_| options.open(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use tidemill_proto::{block::Tenant, ids::RequestId};

    const STORES: &[RecordStore] = &[
        RecordStore::File,
        #[cfg(feature = "rocksdb")]
        RecordStore::RocksDb,
    ];
    const LAYOUT: LayoutFingerprint = LayoutFingerprint([3; 16]);

    fn block(n: u8) -> DiskBlock {
        let lineage = Lineage { origin: RequestId(1), tenant: Tenant(2), parent: Some(BlockKey([n - 1; 16])), position: u32::from(n) };
        DiskBlock { key: BlockKey([n; 16]), checksum: u64::from(n), lineage }
    }

    fn prepared(dir: &Path, store: RecordStore, block_bytes: u64, layout: LayoutFingerprint) -> (Slab, Geometry) {
        let disk = Slab::open(dir, store).unwrap();
        let geometry = Geometry::new(1 << 20, block_bytes).unwrap();
        disk.prepare(Manifest::new(block_bytes, layout), geometry).unwrap();
        (disk, geometry)
    }

    #[test]
    fn what_was_recorded_and_written_is_there_after_a_restart() {
        STORES.iter().for_each(|&store| restarted(store));
    }

    fn restarted(store: RecordStore) {
        let dir = tempfile::tempdir().unwrap();
        let (disk, geometry) = prepared(dir.path(), store, 5000, LAYOUT);
        assert_eq!(geometry, Geometry { slots: 128, stride: 8192 });
        let mut page = buffer(8192).unwrap();
        page.fill(7);
        disk.write(geometry.offset(44), &page).unwrap();
        disk.record([(44, block(1)), (3, block(2)), (9, block(3))]).unwrap();
        disk.record([(9, block(4))]).unwrap();
        disk.erase(3).unwrap();
        drop(disk);
        let (disk, geometry) = prepared(dir.path(), store, 5000, LAYOUT);
        assert_eq!(disk.records().collect::<Vec<_>>(), [(9, block(4)), (44, block(1))]);
        page.fill(0);
        disk.read(geometry.offset(44), &mut page).unwrap();
        assert!(page.iter().all(|&byte| byte == 7));
        assert_eq!(fs::metadata(dir.path().join("slab")).unwrap().len(), 1 << 20, "reserved, and no more");
    }

    #[test]
    fn what_is_made_of_prompts_is_for_its_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let new = dir.path().join("new/node");
        let _disk = prepared(&new, RecordStore::File, 5000, LAYOUT);
        for (path, mode) in [(dir.path().join("new"), 0o700), (new.clone(), 0o700), (new.join("slab"), 0o600), (new.join("records"), 0o600)]
        {
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode, "{}", path.display());
        }
    }

    #[test]
    fn other_blocks_begin_with_an_empty_disk() {
        let other = LayoutFingerprint([4; 16]);
        for (&store, (block_bytes, layout)) in STORES.iter().flat_map(|store| [(5000, other), (5001, LAYOUT)].map(|kind| (store, kind))) {
            let dir = tempfile::tempdir().unwrap();
            prepared(dir.path(), store, 5000, LAYOUT).0.record([(1, block(1))]).unwrap();
            let (disk, _) = prepared(dir.path(), store, block_bytes, layout);
            assert_eq!(disk.records().count(), 0);
            assert_eq!(disk.manifest(), Some(Manifest::new(block_bytes, layout)));
        }
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_with_a_reason() {
        assert!(matches!(Geometry::new(4095, 1), Err(SlabError::TooSmall { .. })));
        assert!(matches!(Geometry::new(u64::MAX, u64::MAX), Err(SlabError::TooSmall { .. })));
        let dir = tempfile::tempdir().unwrap();
        let disk = Slab::open(dir.path(), RecordStore::File).unwrap();
        let error = disk.prepare(Manifest::new(4096, LAYOUT), Geometry::new(1 << 43, 4096).unwrap()).unwrap_err();
        assert!(error.to_string().contains("--nvme-capacity"), "{error}");
    }

    #[test]
    fn broken_records_are_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, _) = prepared(dir.path(), RecordStore::File, 5000, LAYOUT);
        disk.record([(1, block(1)), (2, block(2))]).unwrap();
        disk.records.write([(FIRST_SLOT + 1, b"nonsense")]).unwrap();
        assert_eq!(disk.records().collect::<Vec<_>>(), [(2, block(2))]);
        drop(disk);
        fs::write(dir.path().join("records"), b"nonsense").unwrap();
        assert_eq!(Slab::open(dir.path(), RecordStore::File).unwrap().manifest(), None);
    }

    #[test]
    fn a_store_that_is_not_built_in_is_refused_with_a_reason() {
        assert_eq!("file".parse(), Ok(RecordStore::File));
        assert!("tree".parse::<RecordStore>().unwrap_err().contains("file or rocksdb"));
        #[cfg(feature = "rocksdb")]
        assert_eq!("rocksdb".parse(), Ok(RecordStore::RocksDb));
        #[cfg(not(feature = "rocksdb"))]
        assert!("rocksdb".parse::<RecordStore>().unwrap_err().contains("built without RocksDB"));
    }
}
