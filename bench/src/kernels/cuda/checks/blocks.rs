//! Blocks between paged memory and slots, on the device and across the bus; and steps recorded as graphs.

use super::Checks;
use crate::kernels::cuda::gpu::Gpu;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rand::seq::SliceRandom;
use std::{num::NonZeroUsize, ptr::NonNull};
use tidemill_kernels::{
    Dtype, KvLayout, KvStorage,
    cuda::{
        CudaError, DeviceKv,
        graph::{StepGraphs, StepShape},
        kv::BlockSlot,
        pinned::Pinned,
        transfer::Transfer,
    },
};

/// Pinned memory of the host, as the pool's arena is in a worker.
pub struct HostMemory {
    start: NonNull<u8>,
    bytes: usize,
    /// Dropped, and so unregistered, before the memory is unmapped.
    pub pinned: Option<Pinned>,
}

impl HostMemory {
    pub fn new(gpu: &Gpu, bytes: usize) -> anyhow::Result<Self> {
        let length = NonZeroUsize::new(bytes).expect("some memory");
        // SAFETY: a fresh mapping, of nothing else.
        let start = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE) }?.cast();
        let mut memory = Self { start, bytes, pinned: None };
        memory.as_slice_mut().fill(0x5a);
        // SAFETY: mapped until this is dropped, after `pinned`.
        memory.pinned = Some(unsafe { Pinned::register(&gpu.device, start, bytes) }?);
        Ok(memory)
    }

    /// While the device does not use it.
    pub fn as_slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped and initialized; the device rests, says the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    pub fn address(&self, offset: usize) -> u64 {
        self.pinned.as_ref().expect("registered").address(offset)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.pinned = None;
        // SAFETY: mapped in `new`, unmapped only here.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

pub fn all(gpu: &mut Gpu, checks: &mut Checks) -> anyhow::Result<()> {
    across_the_bus(gpu, checks)?;
    Ok(replayed(gpu, checks)?)
}

/// Random blocks to the device and back, by fetch and publish, through more rounds than one; then layers one by one.
fn across_the_bus(gpu: &mut Gpu, checks: &mut Checks) -> anyhow::Result<()> {
    const BLOCKS: usize = 150;
    let layout = KvLayout { layers: 5, kv_heads: 3, head_dim: 80, dtype: KvStorage::Float(Dtype::Bf16) };
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
    let mut transfer = Transfer::new(&gpu.device, &kv, 70)?;
    // SAFETY: both memories are pinned, of a slot for each block, and left alone until the device rests.
    unsafe {
        let fetched = transfer.fetch(&kernels, &mut kv, &placed(&from))?;
        transfer.publish(&kernels, &kv, &placed(&to), 0..layout.layers, &fetched)?;
    }
    gpu.device.synchronize()?;
    checks.same("fetch and publish", format!("{BLOCKS} blocks"), to.as_slice_mut(), from.as_slice_mut(), 0.0);

    to.as_slice_mut().fill(0);
    for layer in (0..layout.layers).rev() {
        let ready = gpu.stream.record_event(None).map_err(CudaError::from)?;
        // SAFETY: as above.
        unsafe { transfer.publish(&kernels, &kv, &placed(&to), layer..layer + 1, &ready) }?;
    }
    gpu.device.synchronize()?;
    checks.same("publish by layer", format!("{BLOCKS} blocks"), to.as_slice_mut(), from.as_slice_mut(), 0.0);

    // Straight to the host's memory, without staging.
    to.as_slice_mut().fill(0);
    // SAFETY: as above.
    unsafe { kernels.kv_gather(&gpu.stream, &kv, &placed(&to), 0..layout.layers) }?;
    gpu.device.synchronize()?;
    checks.same("gather to the host", format!("{BLOCKS} blocks"), to.as_slice_mut(), from.as_slice_mut(), 0.0);
    Ok(())
}

/// A recorded step does what its launches did, each time it is launched.
fn replayed(gpu: &mut Gpu, checks: &mut Checks) -> Result<(), CudaError> {
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
