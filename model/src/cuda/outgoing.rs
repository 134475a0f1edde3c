//! Pinned memory for blocks that the device copies out: a slot for each block, reused once its reader is done.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};
use tidemill_kernels::cuda::{CudaError, Device, host::HostBuffer};

/// The slots, in slabs, as pinning costs time per call.
pub(super) struct Outgoing {
    block_bytes: usize,
    free: Free,
}

type Free = Arc<Mutex<Vec<Slot>>>;

struct Slot {
    slab: Arc<HostBuffer<u8>>,
    /// The slot's offset in the slab.
    at: usize,
}

/// Size of a slab, unless a block is larger.
const SLAB_BYTES: usize = 64 << 20;

impl Outgoing {
    pub(super) fn new(block_bytes: usize) -> Self {
        Self { block_bytes, free: Free::default() }
    }

    /// Pins memory until there are this many free slots.
    pub(super) fn reserve(&mut self, device: &Device, slots: usize) -> Result<(), CudaError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while free.len() < slots {
            let count = (SLAB_BYTES / self.block_bytes).clamp(1, slots - free.len());
            let slab = Arc::new(HostBuffer::new(device, count * self.block_bytes)?);
            free.extend((0..count).map(|i| Slot { slab: Arc::clone(&slab), at: i * self.block_bytes }));
        }
        Ok(())
    }

    /// Takes slots for blocks that are read now.
    pub(super) fn take(&mut self, device: &Device, count: usize) -> Result<Slots, CudaError> {
        self.reserve(device, count)?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = free.len() - count;
        Ok(Slots { slots: free.split_off(kept), block_bytes: self.block_bytes, free: Arc::clone(&self.free) })
    }
}

/// Slots that are taken. The owner knows when the device is done with them.
pub(super) struct Slots {
    slots: Vec<Slot>,
    block_bytes: usize,
    free: Free,
}

impl Slots {
    /// The device addresses of the slots.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().map(|slot| slot.slab.address(slot.at))
    }

    /// # Safety
    /// No copy to the slots is in flight, and none begins while the blocks live.
    pub(super) unsafe fn take_blocks(&mut self) -> Vec<PinnedBlock> {
        let (slots, bytes) = (mem::take(&mut self.slots), self.block_bytes);
        slots.into_iter().map(|slot| PinnedBlock { slot: Some(slot), bytes, free: Arc::clone(&self.free) }).collect()
    }

    /// Gives the slots back, for the next reads.
    ///
    /// # Safety
    /// No copy to them is in flight.
    pub(super) unsafe fn give_back(&mut self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.slots);
    }
}

/// A block in a pinned slot, which is reused after this is dropped.
pub struct PinnedBlock {
    /// `None` once the slot has been given back.
    slot: Option<Slot>,
    bytes: usize,
    free: Free,
}

impl AsRef<[u8]> for PinnedBlock {
    fn as_ref(&self) -> &[u8] {
        let slot = self.slot.as_ref().expect("it is set until it is dropped");
        // SAFETY: no copy to this slot is in flight (`Slots::take_blocks`), and none begins before it is given back.
        unsafe { slot.slab.part(slot.at..slot.at + self.bytes) }
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend(self.slot.take());
    }
}
