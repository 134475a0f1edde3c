//! Memory that is registered with all of a process's devices, for blocks whose own memory is not.
//!
//! A put's bytes are hashed on their way, and the pass that hashes them also copies them here: that costs little more than hashing, and
//! their owner can reuse its memory at once. A block that is read goes straight to its destination if that is registered, else here.

use super::{
    devices::Device,
    verbs::{Access, Local, Region, VerbsError},
};
use crate::arena::hashed_copy::copy_hashed;
use memmap2::{MmapOptions, MmapRaw};
use parking_lot::{Condvar, Mutex};
use std::{hash::Hasher, io, sync::Arc, time::Instant};
use tokio::sync::Notify;
use twox_hash::XxHash3_64;

/// Equal buffers of a block each, and small pads for data that is read along with a block.
#[derive(Debug)]
pub(super) struct Staging {
    /// The memory's registrations, one per device, in their order. Declared before the memory, which they refer to.
    regions: Vec<Region>,
    memory: MmapRaw,
    block_bytes: usize,
    buffers: Pool,
    pads: Pool,
}

/// The free places among equal ones.
#[derive(Debug)]
struct Pool {
    /// Offsets of free places in the memory.
    free: Mutex<Vec<usize>>,
    freed: Condvar,
    /// Wakes tasks, which wait without a thread.
    notify: Notify,
}

/// A place with one owner. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    staging: Arc<Staging>,
    kind: Kind,
    at: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Buffer,
    Pad,
}

/// The memory for buffers, which limits their number between the two bounds.
const BUFFERS_BYTES: usize = 64 << 20;
/// The fewest buffers, since a few blocks must be on their way at once.
const BUFFERS_MIN: usize = 4;
/// The most buffers.
pub(super) const BUFFERS_MAX: usize = 128;
/// The most blocks being read at once.
pub(super) const PADS: usize = 64;
/// The size of a pad: a cache line.
pub(super) const PAD_BYTES: usize = 64;
const PAGE: usize = 4096;

impl Staging {
    pub(super) fn new<'a>(block_bytes: usize, devices: impl Iterator<Item = &'a Device>) -> Result<Arc<Self>, VerbsError> {
        let stride = block_bytes.next_multiple_of(PAGE);
        let count = (BUFFERS_BYTES / stride).clamp(BUFFERS_MIN, BUFFERS_MAX);
        let bytes = count * stride + PADS * PAD_BYTES;
        let mapped = MmapOptions::new().len(bytes).map_anon();
        let memory = MmapRaw::from(mapped.map_err(|source: io::Error| VerbsError::Register { device: "any".into(), bytes, source })?);
        let register = |device: &Device| {
            // SAFETY: the mapping outlives its regions, and peers get no access.
            unsafe { Region::register(Arc::clone(&device.domain), memory.as_mut_ptr(), bytes, Access::LOCAL) }
        };
        let regions = devices.map(register).collect::<Result<_, _>>()?;
        let pool = |first_at, count, stride| {
            let free = Mutex::new((0..count).map(|place| first_at + place * stride).collect());
            Pool { free, freed: Condvar::new(), notify: Notify::new() }
        };
        let (buffers, pads) = (pool(0, count, stride), pool(count * stride, PADS, PAD_BYTES));
        Ok(Arc::new(Self { regions, memory, block_bytes, buffers, pads }))
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// A free place, if there is one by `until`. Blocks the thread.
    pub(super) fn take(self: &Arc<Self>, kind: Kind, until: Instant) -> Option<Place> {
        let pool = self.pool(kind);
        let mut free = pool.free.lock();
        loop {
            if let Some(at) = free.pop() {
                return Some(Place { staging: Arc::clone(self), kind, at });
            }
            if pool.freed.wait_until(&mut free, until).timed_out() {
                return None;
            }
        }
    }

    /// Whether a buffer is free now.
    pub(super) fn has_room(&self) -> bool {
        !self.buffers.free.lock().is_empty()
    }

    /// Resolves soon after a buffer has become free.
    pub(super) async fn room(&self) {
        let freed = self.buffers.notify.notified();
        if !self.has_room() {
            freed.await;
        }
    }

    fn pool(&self, kind: Kind) -> &Pool {
        match kind {
            Kind::Buffer => &self.buffers,
            Kind::Pad => &self.pads,
        }
    }
}

impl Place {
    /// Fills the place with a block; returns the checksum.
    pub(super) fn fill(&self, bytes: &[u8]) -> u64 {
        assert_eq!(bytes.len(), self.bytes(), "a buffer holds one block");
        let mut hasher = XxHash3_64::new();
        // SAFETY: the place is inside the mapping and has as many bytes; this is its only owner, and `bytes` is other memory.
        unsafe { copy_hashed(bytes.as_ptr(), self.start(), bytes.len(), &mut hasher) };
        hasher.finish()
    }

    /// Copies a block out of the place; returns the checksum of the copy.
    pub(super) fn copy_to(&self, to: &mut [u8]) -> u64 {
        assert_eq!(to.len(), self.bytes(), "a buffer holds one block");
        let mut hasher = XxHash3_64::new();
        // SAFETY: as in fill(), the other way round.
        unsafe { copy_hashed(self.start(), to.as_mut_ptr(), to.len(), &mut hasher) };
        hasher.finish()
    }

    /// Copies the place's first bytes.
    pub(super) fn start_of<const N: usize>(&self) -> [u8; N] {
        assert!(N <= self.bytes(), "a place is as long as what is read into it");
        // SAFETY: the place has as many bytes, of which all values are valid; the device has written them before this is called.
        unsafe { self.start().cast::<[u8; N]>().read_volatile() }
    }

    /// The first `bytes` of the place, as named in requests to a device.
    pub(super) fn local(&self, device: usize, bytes: usize) -> Local {
        let inside = self.staging.regions[device].part(self.start() as usize, bytes);
        inside.filter(|_| bytes <= self.bytes()).expect("all places are registered with all devices")
    }

    pub(super) fn bytes(&self) -> usize {
        match self.kind {
            Kind::Buffer => self.staging.block_bytes,
            Kind::Pad => PAD_BYTES,
        }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: places lie inside the mapping.
        unsafe { self.staging.memory.as_mut_ptr().add(self.at) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let pool = self.staging.pool(self.kind);
        pool.free.lock().push(self.at);
        pool.freed.notify_one();
        pool.notify.notify_waiters();
    }
}
