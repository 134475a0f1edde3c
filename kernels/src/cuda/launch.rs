//! Launching a kernel on a stream.

use super::{CudaError, peers::RANKS_MAX};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};

/// An argument of a kernel.
pub(crate) enum Arg<'a> {
    /// An address in device memory; 0 is null.
    Pointer(u64),
    U32(u32),
    U64(u64),
    F32(f32),
    Blocks(&'a BlockBatch),
    Parts(&'a PartAddresses),
}

/// The addresses of a matrix's parts, as in `gather.cu`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PartAddresses {
    pub(crate) at: [u64; RANKS_MAX],
}

impl PartAddresses {
    pub(crate) const EMPTY: Self = Self { at: [0; RANKS_MAX] };
}

// SAFETY: plain numbers in C's order, as gather.cu declares them; any bits are valid.
unsafe impl DeviceRepr for PartAddresses {}

/// The blocks of one launch, as in `kv_copy.cu`.
pub(crate) const BATCH_BLOCKS: usize = 64;

/// Blocks and the addresses of their slots, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BlockBatch {
    pub(crate) slots: [u64; BATCH_BLOCKS],
    pub(crate) blocks: [u32; BATCH_BLOCKS],
}

impl BlockBatch {
    pub(crate) const EMPTY: Self = Self { slots: [0; BATCH_BLOCKS], blocks: [0; BATCH_BLOCKS] };
}

// SAFETY: plain numbers in C's order, as kv_copy.cu declares them; any bits are valid.
unsafe impl DeviceRepr for BlockBatch {}

/// The kernels' argument for `cap tanh(x / cap)` in addition to x and the cap.
pub(crate) fn soft_cap_factor(cap: f32) -> f32 {
    2.0 * std::f32::consts::LOG2_E / cap
}

/// A pointer that may be null.
pub(crate) fn optional<T>(view: Option<&CudaView<'_, T>>) -> Arg<'static> {
    view.map_or(Arg::Pointer(0), Arg::from)
}

impl<T> From<&CudaView<'_, T>> for Arg<'static> {
    fn from(view: &CudaView<'_, T>) -> Self {
        Arg::Pointer(address(view))
    }
}

impl<T> From<&mut CudaViewMut<'_, T>> for Arg<'static> {
    fn from(view: &mut CudaViewMut<'_, T>) -> Self {
        Arg::Pointer(address(view))
    }
}

impl<T> From<&CudaSlice<T>> for Arg<'static> {
    fn from(slice: &CudaSlice<T>) -> Self {
        Arg::Pointer(address(slice))
    }
}

impl<T> From<&mut CudaSlice<T>> for Arg<'static> {
    fn from(slice: &mut CudaSlice<T>) -> Self {
        Arg::Pointer(address(slice))
    }
}

impl From<usize> for Arg<'static> {
    /// Converts to u32, the type of the kernels' counts and strides.
    fn from(x: usize) -> Self {
        Arg::U32(count(x))
    }
}

impl From<f32> for Arg<'static> {
    fn from(x: f32) -> Self {
        Arg::F32(x)
    }
}

/// The address of device memory. The caller is responsible for the order of streams (`Device`).
pub(crate) fn address<T>(memory: &impl DevicePtr<T>) -> u64 {
    memory.device_ptr(memory.stream()).0
}

pub(crate) fn count(x: usize) -> u32 {
    u32::try_from(x).expect("counts and strides of one launch are below 2^32")
}

/// Grid of blocks, threads per block, and bytes of dynamic shared memory.
pub(crate) struct Shape {
    pub(crate) grid: (usize, usize, usize),
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
}

impl Shape {
    pub(crate) fn new(grid: (usize, usize, usize), threads: usize) -> Self {
        Self { grid, threads, shared_bytes: 0 }
    }
}

/// Launches a kernel on the stream; an empty grid launches nothing.
///
/// # Safety
/// The arguments match the kernel's parameters in order and type. Behind each pointer is as much memory as the kernel
/// touches, given the other arguments; it lives, and nothing else writes to it, until the kernel is done.
pub(crate) unsafe fn launch(stream: &CudaStream, function: &CudaFunction, shape: Shape, args: &[Arg<'_>]) -> Result<(), CudaError> {
    let (x, y, z) = shape.grid;
    if x == 0 || y == 0 || z == 0 {
        return Ok(());
    }
    let mut builder = stream.launch_builder(function);
    for arg in args {
        match arg {
            Arg::Pointer(x) | Arg::U64(x) => builder.arg(x),
            Arg::U32(x) => builder.arg(x),
            Arg::F32(x) => builder.arg(x),
            Arg::Blocks(x) => builder.arg(*x),
            Arg::Parts(x) => builder.arg(*x),
        };
    }
    let config = LaunchConfig {
        grid_dim: (count(x), count(y), count(z)),
        block_dim: (count(shape.threads), 1, 1),
        shared_mem_bytes: count(shape.shared_bytes),
    };
    // SAFETY: the caller's contract.
    unsafe { builder.launch(config) }?;
    Ok(())
}
