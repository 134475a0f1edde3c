//! The format of a pack: many blocks in one object, with an index at its end.
//!
//! ```text
//!   block 0 │ block 1 │ … │ record 0 │ record 1 │ … │ tail
//! ```
//!
//! All blocks of a pack have one size, so the size of the object gives their number and the position of the index: one ranged read fetches
//! the whole index, and one more any run of blocks. A record has the block's key, its XXH3 (which readers of the arena check), a BLAKE3 of
//! its bytes, and its lineage. The tail has the format, the block size, the layout fingerprint, and a BLAKE3 of the object's name, all
//! records and the tail itself, keyed with the cluster's secret.
//!
//! The store is not trusted: bytes are used only if they hash to a record, and records only if the tail's digest is right. So a truncated
//! object, a changed bit, another object's bytes under this name and an older version of it are all refused. Without a secret the digest
//! only guards against accidents: anyone who may write to the bucket can compute it.

use crate::core::validate::checksum;
use std::{array, ops::Range};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint, Tenant},
    ids::RequestId,
    pool::Lineage,
};

/// The format of the blocks in a pack. Packs of other formats are of no use to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    pub layout: LayoutFingerprint,
    /// Size of a block, at least 1.
    pub block_bytes: u64,
}

/// The key of the digest of an index.
#[derive(Clone)]
pub struct Secret([u8; 32]);

/// A block of a pack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    pub key: BlockKey,
    pub checksum: u64,
    pub digest: Digest,
    pub lineage: Lineage,
}

/// The first half of a BLAKE3 hash.
pub type Digest = [u8; 16];

/// The reason why an object cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PackError {
    #[error("an object of {bytes} bytes is no pack of blocks of {block_bytes} bytes")]
    Size { bytes: u64, block_bytes: u64 },
    #[error("it does not end as a pack does")]
    NoPack,
    #[error("it has format {found}, and this version reads {FORMAT}: run one version of Tidemill on a bucket, or give each its own prefix")]
    Format { found: u32 },
    #[error("its blocks are another model's, or have another size")]
    OtherBlocks,
    #[error("it says that it has {said} blocks, and its size that it has {has}")]
    Count { said: u32, has: u32 },
    #[error(
        "its index was changed, belongs to another object, or was written with another secret: give all nodes the same --object-secret"
    )]
    Forged,
}

/// The version of the format.
pub const FORMAT: u32 = 1;
/// Bytes of a record.
pub const RECORD_BYTES: usize = 80;
/// Bytes of the tail.
pub const TAIL_BYTES: usize = 56;
/// The most blocks of a pack. An index has at most 5 MiB.
pub const BLOCKS_MAX: u32 = 1 << 16;

const MAGIC: [u8; 8] = *b"TIDEPACK";
const DIGEST_BYTES: usize = size_of::<Digest>();
/// The marker of a record whose block is the first of a chain.
const FIRST: u32 = 0;
/// The marker of a record whose block follows its parent.
const FOLLOWS: u32 = 1;

impl Secret {
    /// Derives the key from the operator's secret; without one, from a publicly known constant.
    pub fn of(given: Option<&[u8]>) -> Self {
        Self(blake3::derive_key("tidemill 2026 secret of packs", given.unwrap_or_default()))
    }

    fn digest(&self, parts: &[&[u8]]) -> Digest {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hasher.update(part);
        }
        half(&hasher.finalize())
    }
}

/// Whether the bytes match the record.
pub fn matches(record: &Record, bytes: &[u8]) -> bool {
    checksum(bytes) == record.checksum && half(&blake3::hash(bytes)) == record.digest
}

/// The range of block `number` in a pack.
pub fn block_range(number: u32, block_bytes: u64) -> Range<u64> {
    let start = u64::from(number) * block_bytes;
    start..start + block_bytes
}

/// The range of the index in a pack of `bytes` bytes.
pub fn index_range(bytes: u64, block_bytes: u64) -> Result<Range<u64>, PackError> {
    let blocks = u64::from(blocks(bytes, block_bytes)?);
    Ok(blocks * block_bytes..bytes)
}

fn blocks(bytes: u64, block_bytes: u64) -> Result<u32, PackError> {
    let size = PackError::Size { bytes, block_bytes };
    let each = block_bytes.checked_add(RECORD_BYTES as u64).filter(|_| block_bytes > 0);
    let (Some(content), Some(each)) = (bytes.checked_sub(TAIL_BYTES as u64), each) else { return Err(size) };
    let blocks = content / each;
    if content % each != 0 || !(1..=u64::from(BLOCKS_MAX)).contains(&blocks) { Err(size) } else { Ok(blocks as u32) }
}

/// Reads `index`, the bytes at [`index_range`] of the pack `name` of `bytes` bytes.
pub fn read_index(name: &str, bytes: u64, index: &[u8], kind: Kind, secret: &Secret) -> Result<Vec<Record>, PackError> {
    let has = blocks(bytes, kind.block_bytes)?;
    let (Some((records, tail)), true) = (index.split_last_chunk(), index.len() == has as usize * RECORD_BYTES + TAIL_BYTES) else {
        return Err(PackError::NoPack);
    };
    let tail: &[u8; TAIL_BYTES] = tail;
    let (mut fields, digest) = (Fields(tail), &tail[TAIL_BYTES - DIGEST_BYTES..]);
    if fields.take() != MAGIC {
        return Err(PackError::NoPack);
    }
    let format = u32::from_le_bytes(fields.take());
    if format != FORMAT {
        return Err(PackError::Format { found: format });
    }
    let (said, block_bytes) = (u32::from_le_bytes(fields.take()), u64::from_le_bytes(fields.take()));
    if (Kind { layout: LayoutFingerprint(fields.take()), block_bytes }) != kind {
        return Err(PackError::OtherBlocks);
    }
    if said != has {
        return Err(PackError::Count { said, has });
    }
    if secret.digest(&[name.as_bytes(), records, &tail[..TAIL_BYTES - DIGEST_BYTES]]) != digest {
        return Err(PackError::Forged);
    }
    Ok(records.as_chunks().0.iter().map(Record::decode).collect())
}

/// A pack that is being built.
#[derive(Debug)]
pub struct Packing {
    kind: Kind,
    bytes: Vec<u8>,
    records: Vec<Record>,
}

impl Packing {
    pub fn new(kind: Kind) -> Self {
        Self { kind, bytes: Vec::new(), records: Vec::new() }
    }

    /// Appends a block. Panics if its size differs from the others.
    pub fn push(&mut self, key: BlockKey, lineage: Lineage, bytes: &[u8]) {
        assert_eq!(bytes.len() as u64, self.kind.block_bytes, "all blocks of a pack have one size");
        self.records.push(Record { key, checksum: checksum(bytes), digest: half(&blake3::hash(bytes)), lineage });
        self.bytes.extend_from_slice(bytes);
    }

    pub fn blocks(&self) -> u32 {
        self.records.len() as u32
    }

    /// The object with this name, and its records. Panics unless there are between 1 and [`BLOCKS_MAX`] blocks.
    pub fn finish(mut self, name: &str, secret: &Secret) -> (Vec<u8>, Vec<Record>) {
        assert!((1..=BLOCKS_MAX).contains(&self.blocks()), "a pack has blocks, and not too many");
        let index_at = self.bytes.len();
        self.records.iter().for_each(|record| record.encode(&mut self.bytes));
        let tail_at = self.bytes.len();
        let (blocks, Kind { layout, block_bytes }) = (self.blocks(), self.kind);
        for field in [&MAGIC[..], &FORMAT.to_le_bytes(), &blocks.to_le_bytes(), &block_bytes.to_le_bytes(), &layout.0] {
            self.bytes.extend_from_slice(field);
        }
        let digest = secret.digest(&[name.as_bytes(), &self.bytes[index_at..tail_at], &self.bytes[tail_at..]]);
        self.bytes.extend_from_slice(&digest);
        (self.bytes, self.records)
    }
}

impl Record {
    fn encode(&self, to: &mut Vec<u8>) {
        let Lineage { origin, tenant, parent, position } = self.lineage;
        let (kind, parent) = parent.map_or((FIRST, BlockKey([0; 16])), |parent| (FOLLOWS, parent));
        for field in [&self.key.0[..], &self.checksum.to_le_bytes(), &self.digest, &parent.0, &origin.0.to_le_bytes()] {
            to.extend_from_slice(field);
        }
        for field in [&tenant.0.to_le_bytes()[..], &position.to_le_bytes(), &kind.to_le_bytes()] {
            to.extend_from_slice(field);
        }
    }

    fn decode(record: &[u8; RECORD_BYTES]) -> Self {
        let mut fields = Fields(record);
        let (key, checksum, digest) = (BlockKey(fields.take()), u64::from_le_bytes(fields.take()), fields.take());
        let parent = BlockKey(fields.take());
        let (origin, tenant) = (RequestId(u64::from_le_bytes(fields.take())), Tenant(u64::from_le_bytes(fields.take())));
        let (position, kind) = (u32::from_le_bytes(fields.take()), u32::from_le_bytes(fields.take()));
        Self { key, checksum, digest, lineage: Lineage { origin, tenant, parent: (kind != FIRST).then_some(parent), position } }
    }
}

/// Fields one after the other. Callers know that there are enough.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_at(N);
        self.0 = rest;
        array::from_fn(|at| field[at])
    }
}

fn half(hash: &blake3::Hash) -> Digest {
    array::from_fn(|at| hash.as_bytes()[at])
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIND: Kind = Kind { layout: LayoutFingerprint([7; 16]), block_bytes: 40 };

    fn lineage() -> impl Strategy<Value = Lineage> {
        (any::<u64>(), any::<u64>(), any::<Option<[u8; 16]>>(), any::<u32>()).prop_map(|(origin, tenant, parent, position)| Lineage {
            origin: RequestId(origin),
            tenant: Tenant(tenant),
            parent: parent.map(BlockKey),
            position,
        })
    }

    fn blocks() -> impl Strategy<Value = Vec<(BlockKey, Lineage, Vec<u8>)>> {
        let bytes = prop::collection::vec(any::<u8>(), KIND.block_bytes as usize);
        prop::collection::vec((any::<[u8; 16]>().prop_map(BlockKey), lineage(), bytes), 1..6)
    }

    fn packed(blocks: &[(BlockKey, Lineage, Vec<u8>)], secret: &Secret) -> (Vec<u8>, Vec<Record>) {
        let mut packing = Packing::new(KIND);
        blocks.iter().for_each(|(key, lineage, bytes)| packing.push(*key, *lineage, bytes));
        packing.finish("a", secret)
    }

    fn read(name: &str, object: &[u8], secret: &Secret) -> Result<Vec<Record>, PackError> {
        let range = index_range(object.len() as u64, KIND.block_bytes)?;
        read_index(name, object.len() as u64, &object[range.start as usize..], KIND, secret)
    }

    proptest! {
        #[test]
        fn what_is_packed_is_found_again(blocks in blocks()) {
            let secret = Secret::of(Some(b"secret"));
            let (object, records) = packed(&blocks, &secret);
            prop_assert_eq!(read("a", &object, &secret), Ok(records.clone()));
            for (number, ((key, lineage, bytes), record)) in (0..).zip(blocks.iter().zip(records)) {
                let range = block_range(number, KIND.block_bytes);
                prop_assert_eq!((*key, *lineage), (record.key, record.lineage));
                prop_assert_eq!(&object[range.start as usize..range.end as usize], &bytes[..]);
                prop_assert!(matches(&record, bytes));
            }
        }

        #[test]
        fn a_changed_byte_is_noticed_wherever_it_is(blocks in blocks(), at: prop::sample::Index, change in 1u8..) {
            let secret = Secret::of(None);
            let (mut object, records) = packed(&blocks, &secret);
            let at = at.index(object.len());
            object[at] ^= change;
            let number = at / KIND.block_bytes as usize;
            match records.get(number) {
                Some(record) => {
                    let range = block_range(number as u32, KIND.block_bytes);
                    prop_assert!(!matches(record, &object[range.start as usize..range.end as usize]));
                    prop_assert_eq!(read("a", &object, &secret), Ok(records));
                }
                None => prop_assert!(read("a", &object, &secret).is_err()),
            }
        }

        #[test]
        fn a_cut_object_and_arbitrary_bytes_are_refused(blocks in blocks(), cut: prop::sample::Index, noise in prop::collection::vec(any::<u8>(), 0..400)) {
            let secret = Secret::of(None);
            let (object, _) = packed(&blocks, &secret);
            prop_assert!(read("a", &object[..cut.index(object.len())], &secret).is_err());
            prop_assert!(read("a", &noise, &secret).is_err());
        }
    }

    #[test]
    fn an_index_is_good_for_its_name_its_secret_and_its_blocks_only() {
        let lineage = Lineage { origin: RequestId(1), tenant: Tenant(2), parent: None, position: 0 };
        let secret = Secret::of(Some(b"secret"));
        let (object, _) = packed(&[(BlockKey([1; 16]), lineage, vec![3; 40])], &secret);
        assert!(read("a", &object, &secret).is_ok());
        assert_eq!(read("b", &object, &secret), Err(PackError::Forged));
        assert_eq!(read("a", &object, &Secret::of(None)), Err(PackError::Forged));
        let (bytes, index) = (object.len() as u64, &object[40..]);
        let other = |kind| read_index("a", bytes, index, kind, &secret);
        assert_eq!(other(Kind { layout: LayoutFingerprint([8; 16]), ..KIND }), Err(PackError::OtherBlocks));
        assert_eq!(other(Kind { block_bytes: 41, ..KIND }), Err(PackError::Size { bytes, block_bytes: 41 }));
        assert_eq!(index_range(u64::MAX, u64::MAX), Err(PackError::Size { bytes: u64::MAX, block_bytes: u64::MAX }));
        assert!(index_range(0, 40).is_err() && index_range(100, 0).is_err());
        let mut newer = object.clone();
        newer[40 + RECORD_BYTES + 8] = 9;
        assert_eq!(read("a", &newer, &secret), Err(PackError::Format { found: 9 }));
    }
}
