//! The choice of the block that leaves when room is needed: one policy per tier, replaceable, one file each.
//!
//! A policy sees slots (small dense numbers) and ranks the *candidates*, those that may leave. The owner of the slots informs it of their
//! changes; it never sees bytes, leases or clocks.
//!
//! ```text
//!            insert               pin
//!   (absent) ──────► candidate ──────────► pinned
//!      ▲              │  ▲  │                 │
//!      └── evict ─────┘  │  └── remove        │
//!                        └────── unpin ───────┘
//! ```
//!
//! The blocks of one operation are part of a chain, in order, and equally old. The last of them should leave first: a block without
//! those before it can never be matched, so a chain shrinks from its end.
//!
//! - [`lru`]: least recently used
//! - [`lfu`]: least frequently used
//! - [`s3fifo`]: three FIFO queues through which blocks that are used once pass quickly
//! - [`hit_density`]: fewest expected hits for the room a block takes
//! - `ghosts`: a policy's memory of blocks that left

mod ghosts;
pub mod hit_density;
pub mod lfu;
pub mod lru;
pub mod s3fifo;

use hit_density::HitDensity;
use lfu::Lfu;
use lru::Lru;
use s3fifo::S3Fifo;
use std::{fmt, str::FromStr};
use tidemill_proto::block::BlockKey;

/// The last use of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    /// Number of the operation. A larger number is later.
    pub at: u64,
    /// Place among that operation's blocks, in chain order.
    pub place: u32,
    /// Whether it was that operation's last block, and neither a state nor followed by one: such a block is worth no more than those before
    /// it.
    pub tail: bool,
    /// Whether the block holds a part of a recurrent layer's state instead of K and V.
    pub state: bool,
}

impl Use {
    /// The uses of an operation's `blocks`, in chain order.
    pub fn of_chain(at: u64, blocks: usize) -> impl Iterator<Item = Use> {
        (0..blocks as u32).map(move |place| Use::in_chain(at, place, blocks))
    }

    /// The same use for the block at this place from the beginning of the chain, which is part of a state or not.
    pub fn of_block(self, place: u32, state: bool) -> Self {
        Self { place, state, tail: self.tail && !state, ..self }
    }

    /// The use of the block of K and V at `place` among an operation's `blocks`.
    pub fn in_chain(at: u64, place: u32, blocks: usize) -> Self {
        Self { at, place, tail: place as usize + 1 == blocks, state: false }
    }
}

/// Ranks the blocks that may leave. Each call costs O(log n), some only on average.
pub trait EvictionPolicy: Send {
    /// Makes `slot`, which now holds the block `key`, a candidate. If it was pinned, its earlier block is forgotten.
    fn insert(&mut self, slot: u32, key: &BlockKey, used: Use);

    /// Marks the candidate `slot` as in use: it is no candidate until [`unpin`](Self::unpin).
    fn pin(&mut self, slot: u32);

    /// Makes `slot` a candidate again after its last user is done. The same operation as in its last use means that it was not used again.
    fn unpin(&mut self, slot: u32, used: Use);

    /// Chooses a candidate and forgets it; `None` if there is none.
    fn evict(&mut self) -> Option<u32>;

    /// Forgets the candidate `slot`, which the caller chose.
    fn remove(&mut self, slot: u32);

    /// Takes note that this many slots are in use now. Slot numbers do not change.
    fn resize(&mut self, _slots: u32) {}

    /// Whether `slot` is a candidate. For the `check_integrity` of the slots' owner.
    fn is_candidate(&self, slot: u32) -> bool;
}

/// The available policies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    Lru,
    Lfu,
    S3Fifo,
    /// The default, by the hit rates in `docs/results/eviction.md`.
    #[default]
    HitDensity,
}

impl Policy {
    pub const ALL: [Policy; 4] = [Policy::Lru, Policy::Lfu, Policy::S3Fifo, Policy::HitDensity];

    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::S3Fifo => "s3fifo",
            Policy::HitDensity => "hit-density",
        }
    }

    /// The policy for slots `0..slots`, none of which is a candidate.
    pub fn build(self, slots: u32) -> Box<dyn EvictionPolicy> {
        match self {
            Policy::Lru => Box::new(Lru::new(slots)),
            Policy::Lfu => Box::new(Lfu::new(slots)),
            Policy::S3Fifo => Box::new(S3Fifo::new(slots)),
            Policy::HitDensity => Box::new(HitDensity::new(slots)),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no eviction policy {0:?}: choose one of {names}", names = Policy::ALL.map(Policy::name).join(", "))]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Policy::ALL.into_iter().find(|policy| policy.name() == name).ok_or_else(|| UnknownPolicy(name.into()))
    }
}

#[cfg(test)]
mod tests;
