//! The frequency of reads of blocks over the network: the most frequently read ones get a copy nearby.
//!
//! A count-min sketch whose counts are halved periodically (TinyLFU: Einziger, Friedman, Manes 2017, §3): fixed memory for any number of
//! blocks, and old reads fade. It may overcount, which costs a needless copy.

use crate::schedule::SourceRun;
use tidemill_proto::block::BlockKey;

/// The number of counters, of one byte each.
const COUNTERS: usize = 1 << 22;
/// Counters per block; the least of them is its count.
const ROWS: usize = 4;
/// All counts are halved after this many reads: half of a row's counters have been hit by then, so few blocks share all of theirs.
const READS_PER_AGE: usize = COUNTERS / ROWS / 2;

#[derive(Debug)]
pub struct FrequencySketch {
    counters: Box<[u8]>,
    reads: usize,
}

impl Default for FrequencySketch {
    fn default() -> Self {
        Self { counters: vec![0; COUNTERS].into(), reads: 0 }
    }
}

impl FrequencySketch {
    /// Counts a sequence's reads over the network. Returns the number of leading blocks that are hot, that is, read at least `threshold`
    /// times. A reader of a block also reads those before it, so hot blocks come first.
    pub fn hot_blocks(&mut self, read: &[SourceRun], keys: &[BlockKey], threshold: Option<u8>) -> u32 {
        let runs = read.iter().flat_map(|run| std::iter::repeat_n(run.near, run.blocks as usize));
        let far = (1..).zip(runs.zip(keys)).filter(|(_, (near, _))| !near);
        let reads: Vec<(u32, u8)> = far.map(|(number, (_, key))| (number, self.read(key))).collect();
        let hot = reads.iter().take_while(|(_, reads)| threshold.is_some_and(|threshold| *reads >= threshold));
        hot.last().map_or(0, |(number, _)| *number)
    }

    /// Counts one read of a block. Returns its recent number of reads, including this one.
    pub fn read(&mut self, key: &BlockKey) -> u8 {
        self.reads += 1;
        if self.reads.is_multiple_of(READS_PER_AGE) {
            self.counters.iter_mut().for_each(|count| *count /= 2);
        }
        // A key is already a hash: each of its parts is as good as a separate hash.
        let parts = key.0.as_chunks::<{ 16 / ROWS }>().0;
        let at = |row: usize| row * (COUNTERS / ROWS) + u32::from_le_bytes(parts[row]) as usize % (COUNTERS / ROWS);
        let least = (0..ROWS).map(|row| self.counters[at(row)]).min().expect("there are rows");
        let count = least.saturating_add(1);
        // Only the least counters grow (conservative update): the others are shared with other blocks.
        for row in 0..ROWS {
            let counter = &mut self.counters[at(row)];
            *counter = (*counter).max(count);
        }
        count
    }

    /// Panics if a count is impossible. Tests call it.
    pub fn check_integrity(&self) {
        assert_eq!(self.counters.len(), COUNTERS);
        assert!(
            self.counters.iter().all(|count| usize::from(*count) <= self.reads),
            "a block was read more often than all blocks together"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u64) -> BlockKey {
        let mix = |n: u64| n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        BlockKey([mix(n).to_le_bytes(), mix(!n).to_le_bytes()].concat().try_into().expect("16 bytes"))
    }

    #[test]
    fn reads_are_counted_per_block() {
        let mut sketch = FrequencySketch::default();
        assert_eq!([1, 1, 2, 1].map(|n| sketch.read(&key(n))), [1, 2, 1, 3]);
        for _ in 0..1000 {
            sketch.read(&key(1));
        }
        assert_eq!(sketch.read(&key(1)), u8::MAX, "counts stop at their maximum");
        sketch.check_integrity();
    }

    #[test]
    fn what_is_read_no_longer_cools_down_and_rare_blocks_stay_cold() {
        let mut sketch = FrequencySketch::default();
        for _ in 0..40 {
            sketch.read(&key(0));
        }
        let overcounted = (1..3 * READS_PER_AGE as u64).filter(|&n| sketch.read(&key(n)) > 3).count();
        assert!(sketch.read(&key(0)) < 20, "old reads count less");
        assert!(overcounted < READS_PER_AGE / 1000, "{overcounted} blocks that were read once look hot");
    }
}
