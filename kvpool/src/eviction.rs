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
//! Time is the order of the calls. An operation that concerns several blocks of one chain goes from the chain's end to
//! its start: the start then counts as used last, and of equally old blocks the one at the end leaves first. A chain
//! thus shrinks from its leaf, since a block without those before it can never be matched.

pub mod lru;

use tidemill_proto::block::BlockKey;

/// Ranks the blocks that may leave. Each call costs O(log n) or less.
pub trait EvictionPolicy: Send {
    /// `slot` holds the block `key` from now on and is a candidate.
    fn insert(&mut self, slot: u32, key: &BlockKey);

    /// `slot`, a candidate, is being used: it is none until [`unpin`](Self::unpin).
    fn pin(&mut self, slot: u32);

    /// The last user of `slot` is done. Counts as the use.
    fn unpin(&mut self, slot: u32);

    /// Chooses a candidate and forgets it; `None` when there is none.
    fn evict(&mut self) -> Option<u32>;

    /// Forgets the candidate `slot` without having chosen it.
    fn remove(&mut self, slot: u32);

    /// Whether `slot` is a candidate. For `check_integrity` of whoever owns the slots.
    fn is_candidate(&self, slot: u32) -> bool;
}
