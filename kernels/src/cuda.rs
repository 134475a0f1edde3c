//! The same operations on NVIDIA GPUs from sm_80 (A100) on, written for Hopper.
//!
//! All CUDA libraries are loaded at run time: a program with this in it starts, and runs on the CPU, where there are none. Kernels are
//! CUDA C++ (`kernels/cu`, one per file; a file says what its kernel does and why it is as it is), compiled by NVRTC for the device
//! that is there, and kept on disk. Nothing waits for the device but what says so; an error that says the device failed means
//! that nothing computed since may be used.
//!
//! Activations and KV are bf16, the residual stream, logits and all sums f32.
//!
//! - [`error`]: what can go wrong, and what to do
//! - [`compile`]: CUDA C++ to machine code; [`cache`]: and kept
//! - [`device`]: a device, its memory and streams
//! - [`kernels`]: all kernels, loaded for one head size; `launch`: putting one on a stream
//! - [`elementwise`], [`attention`], [`sampling`]: the operations
//! - [`gemm`]: matrix products in bf16 and FP8, by cuBLASLt
//! - [`kv`]: the paged memory, and blocks to and from contiguous slots
//! - [`host`], [`pinned`]: DRAM that the device can reach, its own and others'; [`upload`], [`transfer`]: matrices and blocks across the bus
//! - [`graph`]: a step's launches, recorded once

pub mod attention;
pub mod cache;
#[cfg(any(test, feature = "checks"))]
pub mod checks;
pub mod compile;
pub mod device;
pub mod elementwise;
pub mod error;
pub mod gemm;
pub mod graph;
pub mod host;
pub mod kernels;
pub mod kv;
mod launch;
pub mod pinned;
mod prefill_kernel;
pub mod sampling;
pub mod transfer;
pub mod upload;

pub use cache::KernelCache;
pub use device::{Bf16, Device};
pub use error::CudaError;
pub use gemm::Gemm;
pub use kernels::Kernels;
pub use kv::DeviceKv;

/// The position of a row that only fills up a batch: nothing is read or written for it.
pub const NO_POSITION: u32 = u32::MAX;
