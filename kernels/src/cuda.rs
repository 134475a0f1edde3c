//! The operations on NVIDIA GPUs from sm_80 (A100) on, tuned for Hopper.
//!
//! All CUDA libraries are loaded at run time: a program that contains this crate also starts on machines without them, and runs on the CPU.
//! Kernels are CUDA C++ (`kernels/cu`, one per file, with its purpose and reasons at the top), compiled by NVRTC for the present device and
//! cached on disk. Calls are asynchronous unless stated otherwise; after an error that says the device failed, nothing computed since may
//! be used.
//!
//! Activations are bf16, K and V bf16 or 8-bit integers; the residual stream, logits and all sums are f32. Attention, norms and sampling
//! give a row the same bits in any batch and any chunking; matrix products do not (see [`gemm`]).
//!
//! - [`error`]: errors, with their remedies
//! - [`compile`]: CUDA C++ to machine code; [`cache`]: keeping it on disk
//! - [`mod@libraries`]: CUDA's libraries, their versions and files
//! - [`device`]: a device, its memory and streams
//! - [`kernels`]: all kernels, loaded for one kind of heads; `launch`: launching one
//! - [`elementwise`], [`attention`], [`sampling`]: the operations; `prefill_kernel`: the choice of a prefill kernel for a
//!   device
//! - [`experts`]: layers of experts
//! - [`gemm`]: matrix products in bf16 and FP8, by cuBLASLt
//! - [`kv`]: the paged memory, and copying blocks to and from contiguous slots
//! - [`host`], [`pinned`]: pinned host memory, our own and others'; [`upload`], [`transfer`]: matrices and blocks
//!   across the bus
//! - [`peers`]: several devices that compute parts of one model
//! - [`graph`]: a step's launches, recorded once
//! - `checks`: the operations against references

pub mod attention;
pub mod cache;
pub mod checks;
pub mod compile;
pub mod device;
pub mod elementwise;
pub mod error;
pub mod experts;
pub mod gemm;
pub mod graph;
pub mod host;
pub mod kernels;
pub mod kv;
mod launch;
pub mod libraries;
pub mod peers;
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
pub use libraries::{Libraries, libraries};

/// The position of a padding row: nothing is read or written for it.
pub const NO_POSITION: u32 = u32::MAX;
