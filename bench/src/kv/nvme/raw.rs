//! The speed of the disk alone: each of several threads writes, or reads, the next block of an existing file, bypassing the page cache. The
//! order of reads matters, even for blocks of two MiB: a disk that is a file of another machine may read ahead there, or have parts of it
//! in memory.

use crate::kv::{clocks::Clocks, report::Rate};
use anyhow::Context;
use nix::fcntl::OFlag;
use rand::{SeedableRng, rngs::SmallRng, seq::SliceRandom};
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};
use tidemill_kvpool::node::nvme::slab;

/// The number of concurrent reads or writes, that of the pool node.
pub const THREADS: usize = 8;

/// Blocks of a file. Clones share it.
#[derive(Clone, Debug)]
pub struct RawFile {
    file: Arc<File>,
    block_bytes: usize,
    /// The order of the blocks in a pass.
    order: Arc<[u64]>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    Write,
}

impl RawFile {
    /// Creates a file and writes it completely once, so that the file system only has to pass later writes on.
    pub fn create(path: &Path, block_bytes: usize, blocks: u64) -> anyhow::Result<Self> {
        let order = (0..blocks).collect();
        let raw = Self::open_with(OpenOptions::new().write(true).create(true).truncate(true), path, block_bytes, order)?;
        raw.pass(Access::Write)?;
        Ok(raw)
    }

    /// Opens a file for reading, in a pass, a random half of its `blocks` in random order, always the same.
    pub fn open_half(path: &Path, block_bytes: usize, blocks: u64) -> anyhow::Result<Self> {
        let mut order: Vec<u64> = (0..blocks).collect();
        order.shuffle(&mut SmallRng::seed_from_u64(blocks));
        order.truncate(order.len() / 2);
        Self::open_with(OpenOptions::new().read(true), path, block_bytes, order.into())
    }

    fn open_with(options: &mut OpenOptions, path: &Path, block_bytes: usize, order: Arc<[u64]>) -> anyhow::Result<Self> {
        let file = options.custom_flags(OFlag::O_DIRECT.bits()).open(path);
        let file = file.with_context(|| format!("{} cannot be opened with O_DIRECT", path.display()))?;
        Ok(Self { file: Arc::new(file), block_bytes, order })
    }

    /// Accesses all blocks of the order once.
    pub fn pass(&self, access: Access) -> anyhow::Result<Rate> {
        let next = AtomicUsize::new(0);
        let clocks = Clocks::new(&[])?;
        let started = clocks.now()?;
        thread::scope(|scope| {
            let work = || -> anyhow::Result<()> {
                let mut buffer = slab::buffer(self.block_bytes)?;
                loop {
                    let Some(&block) = self.order.get(next.fetch_add(1, Relaxed)) else { return Ok(()) };
                    let offset = block * self.block_bytes as u64;
                    match access {
                        Access::Read => self.file.read_exact_at(&mut buffer, offset)?,
                        Access::Write => {
                            buffer[..8].copy_from_slice(&block.to_le_bytes());
                            self.file.write_all_at(&buffer, offset)?;
                        }
                    }
                }
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("reading and writing do not panic"))
        })?;
        Ok(Rate::new(clocks.now()? - started, self.block_bytes * self.order.len()))
    }
}
