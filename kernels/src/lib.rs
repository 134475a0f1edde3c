//! Numeric kernels: operations on the CPU and on CUDA devices. They know nothing about transformers.
//!
//! **Exactness contract.** The bits of an output row depend on that row's inputs alone: not on the batch around it, the tiling, the number
//! of threads, or the instruction set. ([`cpu`] explains how; [`cuda`], to what extent it holds on a GPU.)
//!
//! - [`dtype`], [`matrix`]: numbers as stored in files
//! - [`kv`]: what a block of K and V holds, and where
//! - [`kv`]: the layout of a block of K and V
//! - [`cuda`]: the same and sampling on NVIDIA GPUs
//!
//! Broken contracts (wrong lengths) panic by assertion: callers own the shapes. Nothing here reads a file or talks to a
//! peer.

#[cfg(target_endian = "big")]
compile_error!("weights and KV are little-endian in memory");

pub mod cpu;
pub mod cuda;
pub mod dtype;
pub mod kv;
pub mod matrix;

pub use cpu::{Bf16Products, Cpu, Isa, KernelError};
pub use dtype::Dtype;
pub use kv::{BLOCK_POSITIONS, KvLayout, KvStorage};
pub use matrix::Matrix;
