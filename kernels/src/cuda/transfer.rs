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

use super::{
    CudaError,
    device::Device,
    kernels::Kernels,
    kv::{BlockSlot, DeviceKv},
    launch::address,
};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, sys};
use std::{ops::Range, sync::Arc};

/// One direction's stream and staging buffer. A worker has two: it fetches and publishes.
pub struct Transfer {
    stream: Arc<CudaStream>,
    staging: CudaSlice<u8>,
    block_bytes: usize,
}

/// Events of a publication.
pub struct Published {
    /// The device's blocks have been read and may be overwritten.
    pub gathered: CudaEvent,
    /// The slots hold the bytes.
    pub done: CudaEvent,
}

impl Transfer {
    /// Copies up to `blocks_at_once` blocks per round.
    pub fn new(device: &Device, kv: &DeviceKv, blocks_at_once: usize) -> Result<Self, CudaError> {
        let block_bytes = kv.layout().block_bytes();
        assert!(blocks_at_once > 0 && block_bytes.is_multiple_of(16), "slots are aligned to 16 bytes");
        Ok(Self { stream: device.new_stream()?, staging: device.alloc(blocks_at_once * block_bytes)?, block_bytes })
    }

    /// Lets later copies wait for an event of another stream.
    pub fn wait(&self, event: &CudaEvent) -> Result<(), CudaError> {
        Ok(self.stream.wait(event)?)
    }

    /// Copies blocks from pinned slots into `kv`. The returned event marks the end: the model's stream can wait for it,
    /// or the host ask.
    ///
    /// # Safety
    /// Each slot is pinned memory of a block's size, and stays pinned until the event. Who writes it before makes the
    /// block meaningless, and nothing worse. Nothing else on the device uses these blocks of `kv` until then.
    pub unsafe fn fetch(&mut self, kernels: &Kernels, kv: &mut DeviceKv, placed: &[BlockSlot]) -> Result<CudaEvent, CudaError> {
        let layers = 0..kv.layout().layers;
        for round in placed.chunks(self.staging.len() / self.block_bytes) {
            let staged = self.staged(round);
            for (from, to) in round.iter().zip(&staged) {
                self.copy(to.slot, from.slot, self.block_bytes)?;
            }
            // SAFETY: only this stream uses the staging buffer: it runs the kernel after the copies, and the next round
            // after the kernel.
            unsafe { kernels.kv_scatter(&self.stream, kv, &staged, layers.clone()) }?;
        }
        Ok(self.stream.record_event(None)?)
    }

    /// Copies `layers` of blocks of `kv` to pinned slots, after `ready`: the event that the model's stream recorded
    /// when these layers were done.
    ///
    /// # Safety
    /// Each slot is pinned memory of a block's size that nobody reads or writes until `done`. Nothing on the device
    /// writes these blocks of `kv` until `gathered`.
    pub unsafe fn publish(
        &mut self,
        kernels: &Kernels,
        kv: &DeviceKv,
        placed: &[BlockSlot],
        layers: Range<usize>,
        ready: &CudaEvent,
    ) -> Result<Published, CudaError> {
        self.stream.wait(ready)?;
        let mut gathered = None;
        let slice_bytes = self.block_bytes / kv.layout().layers;
        let (skipped, bytes) = ((layers.start * slice_bytes) as u64, layers.len() * slice_bytes);
        for round in placed.chunks(self.staging.len() / self.block_bytes) {
            let staged = self.staged(round);
            // SAFETY: only this stream uses the staging buffer: it runs the copies after the kernel, and the next round
            // after them.
            unsafe { kernels.kv_gather(&self.stream, kv, &staged, layers.clone()) }?;
            gathered = Some(self.stream.record_event(None)?);
            for (to, from) in round.iter().zip(&staged) {
                self.copy(to.slot + skipped, from.slot + skipped, bytes)?;
            }
        }
        let done = self.stream.record_event(None)?;
        Ok(Published { gathered: gathered.map_or_else(|| self.stream.record_event(None), Ok)?, done })
    }

    /// The staging buffer's slots for these blocks.
    fn staged(&self, round: &[BlockSlot]) -> Vec<BlockSlot> {
        let start = address(&self.staging);
        round.iter().enumerate().map(|(i, p)| BlockSlot { block: p.block, slot: start + (i * self.block_bytes) as u64 }).collect()
    }

    /// By the copy engine; pinned memory and device memory share one address space.
    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        self.stream.context().bind_to_thread()?;
        // SAFETY: one side is staging, the other a slot, alive by our callers' contract.
        Ok(unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream.cu_stream()) }.result()?)
    }
}
