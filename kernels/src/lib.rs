//! What computes: operations on CPU, and on CUDA devices. Knows no transformer.
//!
//! **Exactness contract.** An output row's bits depend on that row's inputs alone: not on the batch around it, the tiling,
//! the number of threads, or the instruction set. So the arithmetic is stated once, for a virtual machine with 16 lanes of
//! f32 (`simd`). Products and attention have their lanes along the outputs: each number is one chain of fused multiply-adds in
//! ascending order (`tile`). With bf16 weights, activations are rounded to bf16 as well and the chain goes in twos, the odd one
//! first (`lines`): just what AVX-512 BF16 computes at twice the rate, and it is used where that was found true (`simd::proof`). AMX
//! computes in another order (`amx`), at many times the rate: the one exception, and no two machines of different order share KV.
//! Norms and softmax sum lane by lane in ascending order, and add the lanes in one fixed tree. AVX-512 holds
//! the 16 lanes in one register, AVX2 in two, NEON in four, portable code in an array; all give the same bits, and the tests hold them to
//! it.
//!
//! - [`cpu`]: an instruction set that this machine has, and threads to run on; `pool`: those threads; `affinity`: cores
//! - `simd`: the 16-lane machine, and its implementations
//! - [`dtype`]: f32, f16 and bf16 in memory, as chunks of 16
//! - `bf16`: rounding to what products multiply; `lines`: how weights of each type lie in a panel, and are multiplied
//! - [`matrix`]: a matrix as a file stores it, and row look-up; [`Weights`]: the same, packed for products
//! - [`Tiles`]: activations, packed for products; `tile`: the inner loop of products and attention
//! - [`matmul`]: activations times weights; `amx`: the same on tiles of bf16
//! - [`int8`]: the same in 8-bit integers
//! - [`elementwise`]: norm, rotary embedding, SiLU
//! - [`kv`]: the paged memory for K and V, and writing into it
//! - [`attention`]: attention over that memory
//! - `memory`, `scratch`, `disjoint`: aligned memory, each thread's room for sums, one output written by many
//! - [`vocab`]: what a sampler needs of a long row: largest element, exponentials
//! - [`cuda`]: the same and sampling on NVIDIA GPUs, where there is one
//!
//! Contract violations (wrong lengths) panic by assertion: callers own the shapes. Nothing here reads a file or a peer.

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
