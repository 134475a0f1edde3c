//! Copies blocks between pinned slots in DRAM and the paged memory, on streams of their own, while the model computes.
//!
//! The bus is the bottleneck, and copy engines are fastest with long contiguous pieces, while a block on the device
//! lies in a piece per layer. So a block crosses the bus whole, from or to a staging buffer on the device, and a kernel
//! scatters or gathers it there at the rate of device memory: a few percent on top.
//!
//! ```text
//!   fetch:    slot ──copy engine──► staging ──kv_scatter──► paged memory
//!   publish:  paged memory ──kv_gather──► staging ──copy engine──► slot
//! ```
//!
//! A device that has some of the heads copies its part of a slot: rows of the slot, of which it has a range, are rows of the copy.
//!
//! Copies and kernels each have a stream, so that one block crosses the bus while another is scattered or gathered. Both take precedence
//! over the model's kernels: they are short, and the bus would wait for a layer's thousands of thread blocks.

use super::{
    CudaError,
    device::Device,
    kernels::Kernels,
    kv::{BlockSlot, DeviceKv},
    launch::address,
};
use crate::kv::KvLayout;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, sys};
use std::{ops::Range, ptr, sync::Arc};

/// The part of a slot that a device has: of each layer's K and V, `[kv head]`, a range.
#[derive(Clone, Debug)]
pub struct SlotPart {
    /// Bytes of K or V of one layer.
    row_bytes: usize,
    /// The device's bytes of these.
    own: Range<usize>,
}

impl SlotPart {
    /// The part with `heads` of a slot of this layout.
    pub fn of(layout: &KvLayout, heads: Range<usize>) -> Self {
        assert!(!heads.is_empty() && heads.end <= layout.kv_heads, "heads that there are");
        let of_head = layout.head_bytes();
        Self { row_bytes: layout.kv_heads * of_head, own: heads.start * of_head..heads.end * of_head }
    }

    pub fn whole(layout: &KvLayout) -> Self {
        Self::of(layout, 0..layout.kv_heads)
    }

    /// A copy of `rows` between the part of a slot and staged bytes without the rest.
    fn copy(&self, slot: u64, staged: u64, rows: Range<usize>) -> (End, End, Size) {
        let width = self.own.len();
        let slot = End { address: slot + (rows.start * self.row_bytes + self.own.start) as u64, pitch: self.row_bytes };
        let staged = End { address: staged + (rows.start * width) as u64, pitch: width };
        (slot, staged, Size { width, rows: rows.len() })
    }
}

/// An end of a copy: an address, and the distance of its rows.
#[derive(Clone, Copy)]
struct End {
    address: u64,
    pitch: usize,
}

#[derive(Clone, Copy)]
struct Size {
    width: usize,
    rows: usize,
}

/// One direction's streams and staging buffer. A worker has two: it fetches and publishes.
pub struct Transfer {
    /// The stream of copies across the bus.
    bus: Arc<CudaStream>,
    /// The stream of the kernels.
    beside: Arc<CudaStream>,
    staging: CudaSlice<u8>,
    part: SlotPart,
    /// Bytes of the part.
    block_bytes: usize,
    /// Rows of a layer: K and V.
    rows_of_layer: usize,
    /// The end of the last use of each slot of the staging buffer.
    used: Vec<Option<Arc<CudaEvent>>>,
    /// The least recently used slot.
    next: usize,
}

/// Events of a publication.
pub struct Published {
    /// The device's blocks have been read and may be overwritten.
    pub gathered: Arc<CudaEvent>,
    /// The slots hold the bytes.
    pub done: Arc<CudaEvent>,
}

impl Transfer {
    /// Creates a transfer between `kv` and `part` of slots, with a staging buffer of `slots` blocks.
    pub fn new(device: &Device, kv: &DeviceKv, part: SlotPart, slots: usize) -> Result<Self, CudaError> {
        let block_bytes = kv.layout().block_bytes();
        let rows_of_layer = kv.layout().parts();
        assert_eq!(block_bytes, kv.layout().layers * rows_of_layer * part.own.len(), "the part has the heads of `kv`");
        assert!(slots > 0 && block_bytes.is_multiple_of(16), "slots are aligned to 16 bytes");
        let staging = device.alloc(slots * block_bytes)?;
        let (bus, beside) = (device.new_urgent_stream()?, device.new_urgent_stream()?);
        Ok(Self { bus, beside, staging, part, block_bytes, rows_of_layer, used: vec![None; slots], next: 0 })
    }

    /// Delays later fetches' writes to `kv` until an event of another stream.
    pub fn wait(&self, event: &CudaEvent) -> Result<(), CudaError> {
        Ok(self.beside.wait(event)?)
    }

    /// Copies blocks from pinned slots into `kv`. The returned event marks the end: the model's stream can wait for it, or the host can
    /// poll it.
    ///
    /// # Safety
    /// Each slot is pinned memory of a whole block's size, and stays pinned until the event. Writing a slot before then makes the block
    /// meaningless, and has no other effect. Nothing else on the device uses these blocks of `kv` until then.
    pub unsafe fn fetch(&mut self, kernels: &Kernels, kv: &mut DeviceKv, placed: &[BlockSlot]) -> Result<Arc<CudaEvent>, CudaError> {
        let layers = 0..kv.layout().layers;
        let mut done = None;
        for round in placed.chunks(self.round()) {
            let slots = self.take(round.len());
            self.wait_until_free(&self.bus, &slots)?;
            let staged = self.staged(round, &slots);
            for (from, to) in round.iter().zip(&staged) {
                let (from, to, size) = self.part.copy(from.slot, to.slot, self.rows(&layers));
                self.copy(to, from, size)?;
            }
            self.beside.wait(&self.bus.record_event(None)?)?;
            // SAFETY: only these streams use the staging buffer: the kernel runs after the copies, and later copies to its slots
            // after the kernel.
            unsafe { kernels.kv_scatter(&self.beside, kv, &staged, layers.clone()) }?;
            done = Some(self.free_after(self.beside.record_event(None)?, &slots));
        }
        done.map_or_else(|| Ok(self.beside.record_event(None)?.into()), Ok)
    }

    /// Copies `layers` of blocks of `kv` to pinned slots, after `ready`: the event that the model's stream recorded
    /// when these layers were done.
    ///
    /// # Safety
    /// Each slot is pinned memory of a whole block's size. Until `done`, nothing else reads or writes this device's part of it. Nothing on the device writes these
    /// blocks of `kv` until `gathered`.
    pub unsafe fn publish(
        &mut self,
        kernels: &Kernels,
        kv: &DeviceKv,
        placed: &[BlockSlot],
        layers: Range<usize>,
        ready: &CudaEvent,
    ) -> Result<Published, CudaError> {
        self.beside.wait(ready)?;
        let mut events = None;
        for round in placed.chunks(self.round()) {
            let slots = self.take(round.len());
            self.wait_until_free(&self.beside, &slots)?;
            let staged = self.staged(round, &slots);
            // SAFETY: only these streams use the staging buffer: the copies run after the kernel, and later kernels that write to
            // its slots after the copies.
            unsafe { kernels.kv_gather(&self.beside, kv, &staged, layers.clone()) }?;
            let gathered = Arc::new(self.beside.record_event(None)?);
            self.bus.wait(&gathered)?;
            for (to, from) in round.iter().zip(&staged) {
                let (to, from, size) = self.part.copy(to.slot, from.slot, self.rows(&layers));
                self.copy(to, from, size)?;
            }
            let done = self.free_after(self.bus.record_event(None)?, &slots);
            events = Some(Published { gathered, done });
        }
        match events {
            Some(events) => Ok(events),
            None => {
                let event = Arc::new(self.beside.record_event(None)?);
                Ok(Published { gathered: Arc::clone(&event), done: event })
            }
        }
    }

    /// Blocks per round: while half of the staging buffer is copied, the other half is scattered or gathered.
    fn round(&self) -> usize {
        self.used.len().div_ceil(2)
    }

    /// Takes the least recently used slots.
    fn take(&mut self, count: usize) -> Vec<usize> {
        let all = self.used.len();
        let slots = (self.next..self.next + count).map(|slot| slot % all).collect();
        self.next = (self.next + count) % all;
        slots
    }

    /// Makes the stream wait until the last use of these slots has ended.
    fn wait_until_free(&self, stream: &CudaStream, slots: &[usize]) -> Result<(), CudaError> {
        let mut last: Option<&Arc<CudaEvent>> = None;
        for event in slots.iter().filter_map(|&slot| self.used[slot].as_ref()) {
            // Slots of one round share an event.
            if !last.is_some_and(|last| Arc::ptr_eq(last, event)) {
                stream.wait(event)?;
            }
            last = Some(event);
        }
        Ok(())
    }

    /// Later uses of these slots wait for the event.
    fn free_after(&mut self, event: CudaEvent, slots: &[usize]) -> Arc<CudaEvent> {
        let event = Arc::new(event);
        slots.iter().for_each(|&slot| self.used[slot] = Some(Arc::clone(&event)));
        event
    }

    /// The pairs of these slots of the staging buffer and these blocks.
    fn staged(&self, round: &[BlockSlot], slots: &[usize]) -> Vec<BlockSlot> {
        let start = address(&self.staging);
        round.iter().zip(slots).map(|(p, slot)| BlockSlot { block: p.block, slot: start + (slot * self.block_bytes) as u64 }).collect()
    }

    fn rows(&self, layers: &Range<usize>) -> Range<usize> {
        layers.start * self.rows_of_layer..layers.end * self.rows_of_layer
    }

    /// Copies with the copy engine; pinned memory and device memory share one address space.
    fn copy(&self, to: End, from: End, Size { width, rows }: Size) -> Result<(), CudaError> {
        self.bus.context().bind_to_thread()?;
        if to.pitch == from.pitch {
            // SAFETY: one side is staging, the other a slot, alive by our callers' contract.
            return Ok(unsafe { sys::cuMemcpyAsync(to.address, from.address, rows * width, self.bus.cu_stream()) }.result()?);
        }
        let kind = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: kind,
            srcHost: ptr::null(),
            srcDevice: from.address,
            srcArray: ptr::null_mut(),
            srcPitch: from.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: kind,
            dstHost: ptr::null_mut(),
            dstDevice: to.address,
            dstArray: ptr::null_mut(),
            dstPitch: to.pitch,
            WidthInBytes: width,
            Height: rows,
        };
        // SAFETY: as above.
        Ok(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.bus.cu_stream()) }.result()?)
    }
}
