//! Which block leaves when room is needed: a replaceable policy per tier, one file each.
//!
//! A policy sees slots (small dense numbers) and ranks those that may leave, the *candidates*. Whoever owns the slots
//! tells it what happens to them; it never sees bytes, leases or clocks.
//!
//! ```text
//!            insert               pin
//!   (absent) ──────► candidate ──────────► pinned
//!      ▲              │  ▲  │                 │
//!      └── evict ─────┘  │  └── remove        │
//!                        └────── unpin ───────┘
//! ```
//!
//! The blocks of one operation are a part of a chain, in order, and equally old. Of these, the one at the end should
//! leave first: a block without those before it can never be matched, so a chain shrinks from its leaf.

pub mod lru;

use tidemill_proto::block::BlockKey;

/// When a block was used last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    /// Number of the operation that used it: larger is later.
    pub at: u64,
    /// Its place among the blocks of that operation, in chain order.
    pub place: u32,
}

/// Ranks the blocks that may leave. Each call costs O(log n) or less.
pub trait EvictionPolicy: Send {
    /// `slot` holds the block `key` from now on and is a candidate.
    fn insert(&mut self, slot: u32, key: &BlockKey, used: Use);

    /// `slot`, a candidate, is being used: it is none until [`unpin`](Self::unpin).
    fn pin(&mut self, slot: u32);

    /// The last user of `slot` is done.
    fn unpin(&mut self, slot: u32, used: Use);

    /// Chooses a candidate and forgets it; `None` when there is none.
    fn evict(&mut self) -> Option<u32>;

    /// Forgets the candidate `slot` without having chosen it.
    fn remove(&mut self, slot: u32);

    /// Whether `slot` is a candidate. For `check_integrity` of whoever owns the slots.
    fn is_candidate(&self, slot: u32) -> bool;
}
