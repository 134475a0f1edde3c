//! The index's memory: every known block in 24 bytes, and a hash table of about 14 more bytes per block.
//!
//! ```text
//!   entries   [key, holders] [key, holders] …    in the order in which blocks became known
//!   table     256 parts of open addressing: 32 bits of the key, and the number of an entry
//! ```
//!
//! Pool nodes report the blocks of a chain in order, so the entries of a chain mostly lie in order as well: the next block's entry is the
//! next one, and finding a long prompt reads memory sequentially. Where that guess fails, the table is asked for several blocks at a time,
//! so that the processor waits for their memory only once. Each part of the table grows by itself, so no pause is long.

use super::holders::Holders;
use tidemill_proto::block::BlockKey;

const PARTS: usize = 256;
/// The maximum number of blocks, at about 40 bytes each.
const BLOCKS_MAX: usize = 1 << 26;
/// The number of blocks looked up in the table at a time.
const BATCH: usize = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) key: BlockKey,
    /// Empty if the entry is free.
    pub(super) holders: Holders,
}

#[derive(Debug)]
pub(super) struct Blocks {
    entries: Vec<Entry>,
    free: Vec<u32>,
    parts: Vec<Part>,
}

/// A part of the table, with linear probing. A bucket has the key's tag in its upper half and the entry's number plus one in the lower; 0
/// is empty.
#[derive(Debug, Default)]
struct Part {
    /// The buckets: none, or a power of two.
    buckets: Vec<u64>,
    len: usize,
}

impl Default for Blocks {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), parts: (0..PARTS).map(|_| Part::default()).collect() }
    }
}

impl Blocks {
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// An upper bound of the entries' numbers, free ones included.
    pub(super) fn numbers(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn entry(&self, number: usize) -> &Entry {
        &self.entries[number]
    }

    pub(super) fn holders_mut(&mut self, number: usize) -> &mut Holders {
        &mut self.entries[number].holders
    }

    pub(super) fn find(&self, key: &BlockKey) -> Option<usize> {
        let part = &self.parts[part_of(key)];
        part.probe(tag_of(key)).find(|number| self.entries[*number].key == *key)
    }

    /// Returns the number of this block's entry. A new entry has no holders: the caller adds some or calls [`free`](Self::free). Returns
    /// `None` if there are too many blocks.
    pub(super) fn find_or_insert(&mut self, key: &BlockKey) -> Option<usize> {
        if let Some(number) = self.find(key) {
            return Some(number);
        }
        let entry = Entry { key: *key, holders: Holders::default() };
        let number = match self.free.pop() {
            Some(number) => {
                self.entries[number as usize] = entry;
                number as usize
            }
            None if self.entries.len() == BLOCKS_MAX => return None,
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        };
        self.parts[part_of(key)].insert(tag_of(key), number);
        Some(number)
    }

    /// Removes a block that has no holders left.
    pub(super) fn free(&mut self, number: usize) {
        let Entry { key, holders } = self.entries[number];
        debug_assert!(holders.is_empty());
        self.parts[part_of(&key)].remove(tag_of(&key), number);
        self.free.push(number as u32);
    }

    /// Visits the entries of the leading `keys`, up to the first unknown one, or until `visit` returns `false`.
    pub(super) fn visit_leading(&self, keys: &[BlockKey], mut visit: impl FnMut(&Entry) -> bool) {
        let (mut known, mut last, mut stride) = (0, None, 1_isize);
        while known < keys.len() {
            while let Some(next) = last.and_then(|last: usize| last.checked_add_signed(stride))
                && let Some(entry) = self.entries.get(next)
                && keys.get(known) == Some(&entry.key)
                && !entry.holders.is_empty()
            {
                if !visit(entry) {
                    return;
                }
                (known, last) = (known + 1, Some(next));
            }
            let rest = &keys[known..];
            let (found, asked) = self.find_batch(&rest[..rest.len().min(BATCH)]);
            for number in &found[..asked] {
                let Some(number) = *number else { return };
                if !visit(&self.entries[number]) {
                    return;
                }
                // Freed entries are reused last first, so a chain in reused entries may lie in descending order.
                stride = last.map_or(1, |last| if number < last { -1 } else { 1 });
                (known, last) = (known + 1, Some(number));
            }
        }
    }

    /// Finds each of up to [`BATCH`] keys. The loads of a pass do not depend on each other, so the processor overlaps them.
    fn find_batch(&self, keys: &[BlockKey]) -> ([Option<usize>; BATCH], usize) {
        let mut home = [0; BATCH];
        for (home, key) in home.iter_mut().zip(keys) {
            *home = self.parts[part_of(key)].home(tag_of(key));
        }
        // The other buckets with the same tag are mostly in the memory that has just been loaded.
        let mut likely = [None; BATCH];
        for ((likely, home), key) in likely.iter_mut().zip(home).zip(keys).filter(|((_, home), _)| *home != 0) {
            *likely = number_of(home, tag_of(key)).or_else(|| self.parts[part_of(key)].probe(tag_of(key)).next());
        }
        let mut same = [false; BATCH];
        for ((same, likely), key) in same.iter_mut().zip(likely).zip(keys) {
            *same = likely.is_some_and(|number| self.entries[number].key == *key);
        }
        let mut found = likely;
        // Two keys may have one tag.
        for ((found, _), key) in found.iter_mut().zip(same).zip(keys).filter(|((found, same), _)| found.is_some() && !same) {
            *found = self.find(key);
        }
        (found, keys.len())
    }

    /// Bytes taken from the allocator.
    pub(super) fn bytes(&self) -> usize {
        let buckets: usize = self.parts.iter().map(|part| part.buckets.capacity() * size_of::<u64>()).sum();
        buckets
            + self.parts.capacity() * size_of::<Part>()
            + self.entries.capacity() * size_of::<Entry>()
            + self.free.capacity() * size_of::<u32>()
    }

    pub(super) fn check_integrity(&self) {
        let held = self.entries.iter().enumerate().filter(|(_, entry)| !entry.holders.is_empty());
        for (number, entry) in held.clone() {
            assert_eq!(self.find(&entry.key), Some(number), "a block is found where it is");
        }
        assert_eq!(held.count(), self.len(), "an entry is held or free");
        assert_eq!(self.parts.iter().map(|part| part.len).sum::<usize>(), self.len(), "the table has each block once");
        for part in &self.parts {
            assert_eq!(part.buckets.iter().filter(|bucket| **bucket != 0).count(), part.len);
        }
    }
}

/// A key is already a hash: each of its parts is as good as a separate hash.
fn part_of(key: &BlockKey) -> usize {
    usize::from(key.0[0]) % PARTS
}

fn tag_of(key: &BlockKey) -> u32 {
    u32::from_le_bytes(*key.0[4..].first_chunk().expect("a key has 16 bytes"))
}

fn number_of(bucket: u64, tag: u32) -> Option<usize> {
    (bucket != 0 && bucket >> 32 == u64::from(tag)).then_some((bucket as u32).wrapping_sub(1) as usize)
}

impl Part {
    /// The bucket at the home position of a tag.
    fn home(&self, tag: u32) -> u64 {
        self.buckets.get(tag as usize & self.buckets.len().wrapping_sub(1)).copied().unwrap_or(0)
    }

    /// The numbers of the entries with this tag.
    fn probe(&self, tag: u32) -> impl Iterator<Item = usize> {
        let mask = self.buckets.len().wrapping_sub(1);
        let places = (0..self.buckets.len()).map(move |step| (tag as usize).wrapping_add(step) & mask);
        places.map(|place| self.buckets[place]).take_while(|bucket| *bucket != 0).filter_map(move |bucket| number_of(bucket, tag))
    }

    fn insert(&mut self, tag: u32, number: usize) {
        // At most three quarters full, so that probes stay short.
        if 4 * (self.len + 1) > 3 * self.buckets.len() {
            let old = std::mem::take(&mut self.buckets);
            self.buckets = vec![0; (2 * old.len()).max(16)];
            old.into_iter().filter(|bucket| *bucket != 0).for_each(|bucket| self.settle(bucket));
        }
        self.settle(u64::from(tag) << 32 | (number as u64 + 1));
        self.len += 1;
    }

    /// Puts a bucket at the first free position from its home on.
    fn settle(&mut self, bucket: u64) {
        let mask = self.buckets.len() - 1;
        let mut place = (bucket >> 32) as usize & mask;
        while self.buckets[place] != 0 {
            place = (place + 1) & mask;
        }
        self.buckets[place] = bucket;
    }

    fn remove(&mut self, tag: u32, number: usize) {
        let mask = self.buckets.len().wrapping_sub(1);
        let wanted = u64::from(tag) << 32 | (number as u64 + 1);
        let mut hole = tag as usize & mask;
        while self.buckets[hole] != wanted {
            assert_ne!(self.buckets[hole], 0, "a known block is in the table");
            hole = (hole + 1) & mask;
        }
        // Later buckets of the run move up, so that no probe ends early.
        let mut next = (hole + 1) & mask;
        while self.buckets[next] != 0 {
            let home = (self.buckets[next] >> 32) as usize & mask;
            if (next.wrapping_sub(home) & mask) >= (next.wrapping_sub(hole) & mask) {
                self.buckets[hole] = self.buckets[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.buckets[hole] = 0;
        self.len -= 1;
    }
}
