//! The paged memory on the device, and copying its blocks to and from contiguous slots.
//!
//! A layer's blocks are adjacent here, `[layer][block][K, V][kv head]`, so that attention reads one stretch of memory. A slot holds one
//! block, `[layer][K, V][kv head]`, the format that is used everywhere else. A head has the parts that [`KvLayout`] gives it, scales and
//! numbers, but its numbers are `[16 positions][head_dim]`, also for K.

use super::{
    CudaError,
    compile::Heads,
    device::Device,
    kernels::Kernels,
    launch::{Arg, BATCH_BLOCKS, BlockBatch, Shape, count, launch},
};
use crate::kv::{BLOCK_POSITIONS, KvLayout};
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};
use std::ops::Range;

/// A fixed number of blocks in device memory.
pub struct DeviceKv {
    layout: KvLayout,
    blocks: usize,
    memory: CudaSlice<u8>,
}

/// One layer of it, and the sequences' block tables.
pub struct PagedLayer<'a> {
    pub memory: CudaViewMut<'a, u8>,
    pub kv_heads: usize,
    pub heads: Heads,
    /// `[sequences, table_stride]`: each sequence's blocks from position 0 on.
    pub tables: &'a CudaView<'a, u32>,
    pub table_stride: usize,
}

/// The number of blocks that fit into `free_bytes` of device memory with `reserve_bytes` left over.
pub fn blocks_that_fit(layout: &KvLayout, free_bytes: usize, reserve_bytes: usize) -> usize {
    let blocks = free_bytes.saturating_sub(reserve_bytes) / layout.block_bytes();
    // Block ids are u32.
    blocks.min(u32::MAX as usize)
}

impl DeviceKv {
    /// Allocates `blocks` blocks. `layout` must be of bf16 or 8-bit integers.
    pub fn new(device: &Device, layout: KvLayout, blocks: usize) -> Result<Self, CudaError> {
        heads(&layout).assert_supported();
        let memory = device.alloc(blocks * layout.block_bytes())?;
        Ok(Self { layout, blocks, memory })
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn layer<'a>(&'a mut self, layer: usize, tables: &'a CudaView<'a, u32>, table_stride: usize) -> PagedLayer<'a> {
        assert!(layer < self.layout.layers && table_stride > 0 && tables.len().is_multiple_of(table_stride), "tables of one length");
        let bytes = self.memory.len() / self.layout.layers;
        let memory = self.memory.slice_mut(layer * bytes..(layer + 1) * bytes);
        PagedLayer { memory, kv_heads: self.layout.kv_heads, heads: heads(&self.layout), tables, table_stride }
    }

    /// Bytes of one layer of a block, K and V.
    fn slice_bytes(&self) -> usize {
        self.layout.block_bytes() / self.layout.layers
    }
}

fn heads(layout: &KvLayout) -> Heads {
    Heads { dim: layout.head_dim, kv: layout.dtype }
}

/// A block, and the device address of its slot in device memory or in pinned host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSlot {
    pub block: u32,
    pub slot: u64,
}

impl Kernels {
    /// Copies `layers` of blocks of `kv` to their slots.
    ///
    /// # Safety
    /// Each slot is memory of a block's size that the device may write, aligned to 16 bytes, and neither freed, read
    /// nor written by others until the stream has passed this.
    pub unsafe fn kv_gather(
        &self,
        stream: &CudaStream,
        kv: &DeviceKv,
        placed: &[BlockSlot],
        layers: Range<usize>,
    ) -> Result<(), CudaError> {
        self.copy(stream, &self.kv_gather, (&kv.memory).into(), kv, placed, layers)
    }

    /// Copies `layers` of blocks from their slots into `kv`.
    ///
    /// # Safety
    /// Each slot is memory of a block's size that the device may read, aligned to 16 bytes, and neither freed nor
    /// written by others until the stream has passed this.
    pub unsafe fn kv_scatter(
        &self,
        stream: &CudaStream,
        kv: &mut DeviceKv,
        placed: &[BlockSlot],
        layers: Range<usize>,
    ) -> Result<(), CudaError> {
        let memory = (&mut kv.memory).into();
        self.copy(stream, &self.kv_scatter, memory, kv, placed, layers)
    }

    fn copy(
        &self,
        stream: &CudaStream,
        function: &cudarc::driver::CudaFunction,
        memory: Arg<'_>,
        kv: &DeviceKv,
        placed: &[BlockSlot],
        layers: Range<usize>,
    ) -> Result<(), CudaError> {
        assert!(layers.end <= kv.layout.layers, "layers of the memory");
        assert!(placed.iter().all(|p| (p.block as usize) < kv.blocks && p.slot.is_multiple_of(16)), "blocks of the memory");
        let Arg::Pointer(pool) = memory else { unreachable!("memory is a pointer") };
        let slice_bytes = kv.slice_bytes();
        for placed in placed.chunks(BATCH_BLOCKS) {
            let mut batch = BlockBatch::EMPTY;
            for (i, BlockSlot { block, slot }) in placed.iter().enumerate() {
                (batch.slots[i], batch.blocks[i]) = (*slot, *block);
            }
            let shape = Shape::new((layers.len(), placed.len(), 1), COPY_THREADS);
            let args = [
                Arg::Pointer(pool),
                Arg::Blocks(&batch),
                Arg::U32(count(kv.blocks)),
                Arg::U32(count(layers.start)),
                Arg::U64(slice_bytes as u64),
            ];
            // SAFETY: blocks and layers are asserted; slots are the caller's contract. A launch copies its arguments.
            unsafe { launch(stream, function, shape, &args) }?;
        }
        Ok(())
    }
}

const COPY_THREADS: usize = 256;

const _: () = assert!(BLOCK_POSITIONS == 16, "`BLOCK` in common.cuh");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dtype::Dtype, kv::KvStorage};

    #[test]
    fn memory_is_divided_into_whole_blocks_and_a_reserve() {
        let layout = KvLayout { layers: 32, kv_heads: 8, head_dim: 128, dtype: KvStorage::Float(Dtype::Bf16), latent: None };
        assert_eq!(layout.block_bytes(), 2 << 20);
        assert_eq!(blocks_that_fit(&layout, 100 << 20, 11 << 20), 44);
        assert_eq!(blocks_that_fit(&layout, 10 << 20, 11 << 20), 0);
    }
}
