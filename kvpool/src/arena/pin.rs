//! What a device must offer to copy blocks from a node's slots by itself. The engine brings it along; nothing here knows which device it is.

use std::{fmt, ptr::NonNull};

/// A device's way to memory of the host.
pub trait Pin: fmt::Debug + Send + Sync {
    /// Locks memory and makes it known to the device. Takes a while: it is called on a thread of its own. `Err` says why it cannot be, and
    /// what to do.
    ///
    /// # Safety
    /// The memory stays mapped where it is, for reading and writing, until what is returned is dropped.
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<Box<dyn Pinned>, String>;
}

/// Memory that a device knows, as long as this lives.
pub trait Pinned: fmt::Debug + Send + Sync {
    /// Where the device finds byte `offset`.
    fn address(&self, offset: usize) -> u64;
}
