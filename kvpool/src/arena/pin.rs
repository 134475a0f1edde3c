//! The interface of a device that copies blocks from a node's slots by itself. The engine implements it; nothing here depends on the kind
//! of device.

use std::{fmt, ptr::NonNull};

/// A device's access to memory of the host.
pub trait Pin: fmt::Debug + Send + Sync {
    /// Locks memory and maps it for the device. Takes a while, so it is called on a dedicated thread. `Err` says why it failed and what to
    /// do.
    ///
    /// # Safety
    /// The memory stays mapped at the same address, for reading and writing, until the returned value is dropped.
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<Box<dyn Pinned>, String>;
}

/// Memory that is pinned for a device as long as this lives.
pub trait Pinned: fmt::Debug + Send + Sync {
    /// The device's address of byte `offset`.
    fn address(&self, offset: usize) -> u64;
}
