//! Blocks between paged memory and slots, on the device and across the bus; and steps recorded as graphs.

use super::{Checks, TestGpu};
use crate::{
    Dtype, KvLayout, KvStorage,
    cpu::memory::Memory,
    cuda::{
        CudaError, DeviceKv,
        graph::{StepGraphs, StepShape},
        kv::BlockSlot,
        pinned::Pinned,
        transfer::{SlotPart, Transfer},
    },
};
use rand::seq::SliceRandom;
use std::ptr::NonNull;

/// Pinned memory of the host, like the pool's arena in a worker.
pub struct HostMemory {
    /// Declared first: unregistered before the memory is freed.
    pinned: Pinned,
    memory: Memory<u8>,
}

impl HostMemory {
    pub fn new(gpu: &TestGpu, bytes: usize) -> Result<Self, CudaError> {
        let mut memory = Memory::new(bytes);
        memory.as_mut_slice().fill(0x5a);
        let start = NonNull::from_mut(memory.as_mut_slice()).cast();
        // SAFETY: the memory stays where it is until it is dropped, after `pinned`.
        let pinned = unsafe { Pinned::register(gpu.device.context(), start, bytes) }?;
        Ok(Self { pinned, memory })
    }

    /// The bytes, for use while the device does not access them.
    pub fn as_slice_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    pub fn address(&self, offset: usize) -> u64 {
        self.pinned.address(offset)
    }
}

pub fn all(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    checks.case(gpu, "blocks", "across the bus".into(), across_the_bus)?;
    checks.case(gpu, "graph", "swiglu".into(), replayed)
}

/// Copies random blocks to the device and back, by fetch and publish, in more than one round; then layer by layer.
fn across_the_bus(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    const BLOCKS: usize = 150;
    let layout = KvLayout { layers: 5, kv_heads: 3, head_dim: 80, dtype: KvStorage::Float(Dtype::Bf16), latent: None };
    let size = layout.block_bytes();
    let (mut from, mut to) = (HostMemory::new(gpu, BLOCKS * size)?, HostMemory::new(gpu, BLOCKS * size)?);
    rand::Rng::fill(&mut gpu.rng, from.as_slice_mut());
    let mut kv = DeviceKv::new(&gpu.device, layout, BLOCKS + 7)?;
    let mut ids: Vec<u32> = (0..kv.blocks() as u32).collect();
    ids.shuffle(&mut gpu.rng);
    let placed = |memory: &HostMemory| -> Vec<BlockSlot> {
        ids[..BLOCKS].iter().enumerate().map(|(i, &block)| BlockSlot { block, slot: memory.address(i * size) }).collect()
    };
    let kernels = gpu.kernels(80)?;
    let mut transfer = Transfer::new(&gpu.device, &kv, SlotPart::whole(&layout), 70)?;
    // SAFETY: both memories are pinned, have a slot per block, and are left alone until the device rests.
    unsafe {
        let fetched = transfer.fetch(&kernels, &mut kv, &placed(&from))?;
        transfer.publish(&kernels, &kv, &placed(&to), 0..layout.layers, &fetched)?;
    }
    gpu.device.synchronize()?;
    checks.same("fetch and publish", format!("{BLOCKS} blocks"), to.as_slice_mut(), from.as_slice_mut(), 0.0);

    to.as_slice_mut().fill(0);
    for layer in (0..layout.layers).rev() {
        let ready = gpu.stream.record_event(None)?;
        // SAFETY: as above.
        unsafe { transfer.publish(&kernels, &kv, &placed(&to), layer..layer + 1, &ready) }?;
    }
    gpu.device.synchronize()?;
    checks.same("publish by layer", format!("{BLOCKS} blocks"), to.as_slice_mut(), from.as_slice_mut(), 0.0);

    // Straight to host memory, without staging.
    to.as_slice_mut().fill(0);
    // SAFETY: as above.
    unsafe { kernels.kv_gather(&gpu.stream, &kv, &placed(&to), 0..layout.layers) }?;
    gpu.device.synchronize()?;
    checks.same("gather to the host", format!("{BLOCKS} blocks"), to.as_slice_mut(), from.as_slice_mut(), 0.0);
    Ok(())
}

/// Checks that a recorded step does each time the same as its launches did.
fn replayed(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    const WIDTH: usize = 512;
    let shape = StepShape::holding(3, 1);
    let input = gpu.bf16s(shape.rows * 2 * WIDTH, 4.0);
    let mut on_device = gpu.upload(&input)?;
    let (mut expected, mut out) = (gpu.poisoned::<u16>(shape.rows * WIDTH)?, gpu.poisoned::<u16>(shape.rows * WIDTH)?);
    let kernels = gpu.kernels(128)?;
    let mut graphs = StepGraphs::new(gpu.stream.clone());
    graphs.record::<CudaError>(shape, |stream| kernels.swiglu(stream, &mut out.as_view_mut(), &on_device.as_view(), WIDTH))?;
    let recorded = gpu.download(&out)?;
    checks.same("graph records without running", "swiglu".into(), &recorded, &vec![u16::MAX; recorded.len()], 0.0);
    for _ in 0..2 {
        let input = gpu.bf16s(shape.rows * 2 * WIDTH, 4.0);
        gpu.stream.memcpy_htod(&input, &mut on_device)?;
        kernels.swiglu(&gpu.stream, &mut expected.as_view_mut(), &on_device.as_view(), WIDTH)?;
        graphs.launch(shape)?;
        checks.same("graph replays", "swiglu".into(), &gpu.download(&out)?, &gpu.download(&expected)?, 0.0);
    }
    Ok(())
}
