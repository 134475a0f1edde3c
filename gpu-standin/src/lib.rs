//! A strict stand-in for a GPU: the libraries that the CUDA backend loads at run time (`libcuda.so.1`, `libcublasLt.so.13`,
//! `libnvrtc.so.13`) as one library under three names, for tests on machines without a GPU. Product code is unchanged.
//!
//! Kernels are compiled by the real NVRTC, and their PTX is interpreted. The stand-in is strict where hardware tolerates errors or depends
//! on timing: memory is checked for bounds, alignment, freed and unwritten bytes; races between warps and blocks are errors, and so are
//! barriers and shuffles that not all lanes reach; copies and products arrive as late as their waits allow; streams run as late as events
//! allow; a host buffer is checked while a copy is pending. Every random choice comes from one seed (`options`).
//!
//! The stand-in is no measure of speed, and no proof: it cannot show effects of hardware beyond PTX's rules (errors of compilers and
//! caches, timing).
//!
//! - `ptx`: text to instructions
//! - `exec`: running them; `memory`: the memory that they access
//! - `device`: streams, events, graphs, and the work on them; `gemm`: products
//! - `api`: the libraries' functions, one file each
//! - `options`: the simulated device; `fault`: the errors

mod api;
mod device;
mod exec;
mod fault;
mod gemm;
mod memory;
mod options;
mod ptx;
