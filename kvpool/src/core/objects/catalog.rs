//! The content of the bucket: the pack of each block, and the packs that leave when there are too many bytes.
//!
//! A block that two nodes wrote is attributed to the pack that was seen first. When that pack is deleted, the block is gone for this node
//! until it restarts, which costs a miss.

use super::pack::Record;
use std::collections::{BTreeMap, HashMap};
use tidemill_proto::block::BlockKey;

/// The identity of a pack in this node's catalog. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PackId(pub u64);

/// A block and its location.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedBlock {
    pub pack: PackId,
    /// The block's place among the pack's blocks.
    pub number: u32,
    pub record: Record,
}

#[derive(Debug, Default)]
pub struct Catalog {
    blocks: HashMap<BlockKey, (PackId, u32)>,
    packs: BTreeMap<PackId, Pack>,
    by_name: HashMap<String, PackId>,
    bytes: u64,
    next: u64,
}

#[derive(Debug)]
struct Pack {
    name: String,
    bytes: u64,
    /// The time when it was written, or when this node last read from it, in seconds since the start of 1970.
    used_s: u64,
    records: Vec<Record>,
}

/// The most blocks that a node knows, in about 300 MB of memory. The indexes of further packs are not read.
pub const BLOCKS_MAX: usize = 1 << 21;
/// The most packs that a node knows.
pub const PACKS_MAX: usize = 100_000;

impl Catalog {
    /// Whether the indexes of more packs may not be read.
    pub fn is_full(&self) -> bool {
        self.blocks.len() >= BLOCKS_MAX || self.packs.len() >= PACKS_MAX
    }

    pub fn knows(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Adds a pack that is in the bucket. A useless one has no records, but its bytes count all the same. Returns the blocks that were not
    /// known before.
    pub fn add(&mut self, name: String, bytes: u64, written_s: u64, records: Vec<Record>) -> Vec<BlockKey> {
        if self.knows(&name) {
            return Vec::new();
        }
        self.next += 1;
        let id = PackId(self.next);
        let mut new = Vec::new();
        for (number, record) in (0..).zip(&records) {
            self.blocks.entry(record.key).or_insert_with(|| {
                new.push(record.key);
                (id, number)
            });
        }
        self.bytes += bytes;
        self.by_name.insert(name.clone(), id);
        self.packs.insert(id, Pack { name, bytes, used_s: written_s, records });
        new
    }

    /// Removes a pack. Returns the blocks that are no longer in the bucket.
    pub fn remove(&mut self, id: PackId) -> Vec<BlockKey> {
        let Some(Pack { name, bytes, records, .. }) = self.packs.remove(&id) else { return Vec::new() };
        self.by_name.remove(&name);
        self.bytes -= bytes;
        let own = records.iter().filter(|record| self.blocks.get(&record.key).is_some_and(|(pack, _)| *pack == id));
        let lost: Vec<BlockKey> = own.map(|record| record.key).collect();
        for key in &lost {
            self.blocks.remove(key);
        }
        lost
    }

    /// Forgets a block of a pack that does not match its record. Returns `true` if this pack was its known location.
    pub fn forget(&mut self, key: &BlockKey, pack: PackId) -> bool {
        let known = self.blocks.get(key).is_some_and(|(from, _)| *from == pack);
        known && self.blocks.remove(key).is_some()
    }

    pub fn holds(&self, key: &BlockKey) -> bool {
        self.blocks.contains_key(key)
    }

    pub fn find(&self, key: &BlockKey) -> Option<PackedBlock> {
        let &(pack, number) = self.blocks.get(key)?;
        Some(PackedBlock { pack, number, record: self.packs[&pack].records[number as usize] })
    }

    pub fn name(&self, id: PackId) -> Option<&str> {
        self.packs.get(&id).map(|pack| &*pack.name)
    }

    /// Records that a block of the pack was read.
    pub fn touch(&mut self, id: PackId, now_s: u64) {
        if let Some(pack) = self.packs.get_mut(&id) {
            pack.used_s = pack.used_s.max(now_s);
        }
    }

    /// Packs that are no longer in the bucket, where `there` says whether the bucket has a name.
    pub fn missing(&self, there: impl Fn(&str) -> bool) -> Vec<PackId> {
        self.packs.iter().filter(|(_, pack)| !there(&pack.name)).map(|(id, _)| *id).collect()
    }

    /// Packs that must leave for `more` bytes to fit `capacity`: the least recently used ones.
    pub fn victims(&self, more: u64, capacity: u64) -> Vec<PackId> {
        let mut left = self.bytes.saturating_add(more);
        if left <= capacity {
            return Vec::new();
        }
        let mut oldest: Vec<(u64, PackId, u64)> = self.packs.iter().map(|(id, pack)| (pack.used_s, *id, pack.bytes)).collect();
        oldest.sort_unstable();
        let leaving = oldest.into_iter().take_while(|(.., bytes)| {
            let leaves = left > capacity;
            left = left.saturating_sub(*bytes);
            leaves
        });
        leaving.map(|(_, id, _)| id).collect()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn packs(&self) -> usize {
        self.packs.len()
    }

    pub fn keys(&self) -> impl ExactSizeIterator<Item = &BlockKey> {
        self.blocks.keys()
    }

    /// Panics if the books do not balance.
    pub fn check_integrity(&self) {
        assert_eq!(self.bytes, self.packs.values().map(|pack| pack.bytes).sum::<u64>(), "bytes are miscounted");
        assert_eq!(self.by_name.len(), self.packs.len(), "a name leads nowhere");
        for (id, pack) in &self.packs {
            assert_eq!(self.by_name.get(&pack.name), Some(id), "the name of a pack leads elsewhere");
        }
        for (key, (pack, number)) in &self.blocks {
            assert_eq!(self.packs[pack].records[*number as usize].key, *key, "a key leads to another block");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;
    use tidemill_proto::{block::Tenant, ids::RequestId, pool::Lineage};

    fn record(n: u8) -> Record {
        let lineage = Lineage { origin: RequestId(1), tenant: Tenant(1), parent: None, position: 0 };
        Record { key: BlockKey([n; 16]), checksum: n.into(), digest: [n; 16], lineage }
    }

    fn catalog() -> Catalog {
        let mut catalog = Catalog::default();
        for (name, used_s, keys) in [("a", 30, 0..3), ("b", 10, 2..5), ("c", 20, 5..6)] {
            catalog.add(name.into(), 100, used_s, keys.map(record).collect());
        }
        catalog
    }

    #[test]
    fn packs_that_were_used_longest_ago_leave_first() {
        let mut catalog = catalog();
        let names = |catalog: &Catalog, ids: Vec<PackId>| ids.iter().map(|id| catalog.name(*id).unwrap().to_owned()).collect::<String>();
        assert_eq!(names(&catalog, catalog.victims(100, 400)), "");
        assert_eq!(names(&catalog, catalog.victims(100, 399)), "b");
        assert_eq!(names(&catalog, catalog.victims(100, 200)), "bc");
        assert_eq!(names(&catalog, catalog.victims(100, 0)), "bca");
        let b = catalog.find(&BlockKey([3; 16])).unwrap().pack;
        catalog.touch(b, 40);
        assert_eq!(names(&catalog, catalog.victims(100, 399)), "c");
    }

    #[test]
    fn a_block_of_two_packs_is_known_from_the_first() {
        let mut catalog = catalog();
        let first = catalog.find(&BlockKey([2; 16])).unwrap();
        assert_eq!((catalog.name(first.pack), first.number), (Some("a"), 2));
        let second = catalog.find(&BlockKey([3; 16])).unwrap().pack;
        assert!(!catalog.forget(&BlockKey([2; 16]), second) && catalog.forget(&BlockKey([2; 16]), first.pack));
        assert_eq!(catalog.missing(|name| name != "b"), [second]);
        assert_eq!(catalog.remove(second), [BlockKey([3; 16]), BlockKey([4; 16])]);
        assert!(catalog.remove(second).is_empty());
        catalog.check_integrity();
    }

    proptest! {
        #[test]
        fn the_books_balance(ops in prop::collection::vec((0u8..4, 0u8..6, 0u8..20, 0u8..6), 1..80)) {
            let mut catalog = Catalog::default();
            let mut held: HashSet<BlockKey> = HashSet::new();
            for (op, name, first, blocks) in ops {
                match op {
                    0 | 1 => {
                        let new = catalog.add(name.to_string(), u64::from(blocks), 0, (first..first + blocks).map(record).collect());
                        for key in new {
                            prop_assert!(held.insert(key));
                        }
                    }
                    2 => {
                        let gone = catalog.missing(|there| there != name.to_string());
                        for key in gone.into_iter().flat_map(|id| catalog.remove(id)) {
                            prop_assert!(held.remove(&key));
                        }
                    }
                    _ => {
                        let key = BlockKey([first; 16]);
                        if let Some(found) = catalog.find(&key) {
                            prop_assert!(catalog.forget(&key, found.pack) && held.remove(&key));
                        }
                    }
                }
                catalog.check_integrity();
                prop_assert_eq!(&held, &catalog.keys().copied().collect());
            }
        }
    }
}
