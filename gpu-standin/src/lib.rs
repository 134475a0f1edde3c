//! A strict stand-in for a GPU: what the CUDA backend loads at run time (`libcuda.so.1`, `libcublasLt.so.13`,
//! `libnvrtc.so.13`) as one library under three names, for tests on machines without one. Product code is unchanged.
//!
//! Kernels are compiled by the real NVRTC, and their PTX is interpreted. Where hardware forgives or leaves things to
//! timing, the stand-in does not: memory is checked for bounds, alignment, freed and unwritten bytes; warps and blocks
//! that race are errors, and so are barriers and shuffles that not all lanes reach; copies and products arrive as late
//! as their waits allow; streams run as late as events allow; a host buffer is watched while a copy is pending. Every
//! random choice comes from one seed (`options`).
//!
//! It is no measure of speed, and no proof: what hardware does beyond PTX's rules (compilers' and caches' errors,
//! timing) it cannot show.
//!
//! - `ptx`: text to instructions
//! - `exec`: running them; `memory`: what they access
//! - `device`: streams, events, graphs, and the work on them; `gemm`: products
//! - `api`: the libraries' functions, one file each
//! - `options`: the simulated device; `fault`: what is wrong

mod api;
mod device;
mod exec;
mod fault;
mod gemm;
mod memory;
mod options;
mod ptx;
