//! A pool node's disk, which can be slow, full or failing, and whose bits can flip. It survives its process; writes in progress may be
//! missing, complete or torn.

use super::bytes::{Bytes, checksum, flip};
use crate::random::Random;
use std::time::Duration;
use tidemill_kvpool::core::directory::{DiskBlock, DiskFault};
use tidemill_proto::pool::SlotRef;

#[derive(Debug)]
pub(crate) struct Disk {
    records: Vec<Option<DiskBlock>>,
    blocks: Vec<Bytes>,
    pub(crate) health: Health,
    /// Whether the directory has given up the disk, and so expects no more answers.
    pub(crate) given_up: bool,
    /// The writes in progress.
    writing: Vec<(u32, DiskBlock, Bytes)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Health {
    #[default]
    Good,
    /// Each read or write takes this long.
    Slow(Duration),
    /// Writes fail.
    Full,
    /// Reads and writes fail.
    Broken,
}

/// A job of the disk for the directory.
#[derive(Debug)]
pub(crate) enum DiskJob {
    Store { disk: u32, block: DiskBlock, copied: Result<Bytes, DiskFault> },
    Load { disk: u32, to: SlotRef, checksum: u64, until: Duration },
}

impl Disk {
    pub(crate) fn new(slots: u32) -> Self {
        let slots = slots as usize;
        Self { records: vec![None; slots], blocks: vec![None; slots], health: Health::Good, given_up: false, writing: Vec::new() }
    }

    pub(crate) fn slots(&self) -> u32 {
        self.records.len() as u32
    }

    pub(crate) fn takes(&self) -> Duration {
        match self.health {
            Health::Slow(time) => time,
            Health::Good | Health::Full | Health::Broken => Duration::from_millis(2),
        }
    }

    pub(crate) fn begin_write(&mut self, disk: u32, block: DiskBlock, bytes: Bytes) {
        self.writing.push((disk, block, bytes));
    }

    pub(crate) fn write(&mut self, disk: u32) -> Result<(), DiskFault> {
        let Some(at) = self.writing.iter().position(|(slot, ..)| *slot == disk) else { return Err(DiskFault::Io) };
        let (_, block, bytes) = self.writing.remove(at);
        if matches!(self.health, Health::Full | Health::Broken) {
            return Err(DiskFault::Io);
        }
        (self.records[disk as usize], self.blocks[disk as usize]) = (Some(block), bytes);
        Ok(())
    }

    pub(crate) fn read(&self, disk: u32) -> Result<Bytes, DiskFault> {
        if self.health == Health::Broken { Err(DiskFault::Io) } else { Ok(self.blocks[disk as usize]) }
    }

    pub(crate) fn erase(&mut self, disk: u32) {
        self.records[disk as usize] = None;
    }

    /// Applies a crash of the process to the writes in progress: of each, the bytes, the record, both or neither are stored, or the bytes
    /// are torn.
    pub(crate) fn tear(&mut self, random: &mut Random) {
        for (disk, block, bytes) in self.writing.drain(..) {
            let disk = disk as usize;
            if random.draw().is_multiple_of(2) {
                self.records[disk] = Some(block);
            }
            match random.draw() % 3 {
                0 => {}
                1 => self.blocks[disk] = bytes,
                _ => self.blocks[disk] = bytes.map(|mut block| (flip(&mut block, 77), block).1),
            }
        }
        self.given_up = false;
    }

    /// Flips one bit of a random block.
    pub(crate) fn flip(&mut self, random: &mut Random) {
        let slot = random.between(0, self.slots().saturating_sub(1)) as usize;
        if let Some(Some(block)) = self.blocks.get_mut(slot) {
            flip(block, random.between(0, 1023));
        }
    }

    /// The records that an earlier process has left.
    pub(crate) fn records(&self) -> Vec<(u32, DiskBlock)> {
        (0..).zip(&self.records).filter_map(|(slot, record)| Some((slot, (*record)?))).collect()
    }
}

/// Checks the bytes that were copied from a slot for the disk.
pub(crate) fn checked(bytes: Bytes, generation: u64, from: SlotRef, block: &DiskBlock) -> Result<Bytes, DiskFault> {
    if generation != from.generation {
        return Err(DiskFault::Late);
    }
    if bytes.is_none() || checksum(bytes) == block.checksum { Ok(bytes) } else { Err(DiskFault::Corrupt) }
}
