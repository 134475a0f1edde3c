//! Measuring Tidemill, and what a measurement needs.
//!
//! - [`kernels`]: `tidemill-bench kernels`, the CUDA kernels against references and the device's limits
//!   - [`kernels::check_rows`], [`kernels::check_products`], [`kernels::check_attention`], [`kernels::check_sampling`],
//!     [`kernels::check_blocks`]: each operation against f64 on the host
//!   - [`kernels::limits`]: what the device can do at most
//!   - [`kernels::speed`], [`kernels::step`]: operations, and whole steps, as fractions of that
//!   - [`kernels::gpu`], [`kernels::report`]: a device under test; what came out
//! - [`kv`]: `tidemill-bench kv`, bytes per second of the KV pool
//!   - [`kv::transfer`]: put and get, timed
//!   - [`kv::reference`]: what the machine itself does: memcpy, TCP
//!   - [`kv::node`]: the pool node under test, as a process
//!   - [`kv::clocks`]: wall and CPU time of both sides
//!   - [`kv::report`]: rows and their table
//! - [`load`]: `tidemill-bench load`, open-loop load on any OpenAI-compatible endpoint
//!   - [`load::arrivals`]: when each request is due
//!   - [`load::workload`]: what each request asks
//!   - [`load::timeline`]: one answer's events to its latencies
//!   - [`load::summary`]: all answers to percentiles, rates and goodput
//! - [`model`]: `tidemill-bench model`, a checkpoint with a published model's shape and random weights
//!   - [`model::shapes`]: the published shapes, as a table
//!   - [`model::weights`]: random tensors, streamed into a safetensors file
//!   - [`model::tokenizer`]: a byte-level BPE tokenizer as large as the model's vocabulary
//! - [`replay`]: `tidemill-bench replay`, hit rates of the KV pool on recorded traffic
//!   - [`replay::trace`]: trace files
//!   - [`replay::pool`]: a trace through the pool's directory
//!   - [`replay::optimum`]: what no policy can beat

pub mod kernels;
pub mod kv;
pub mod load;
pub mod model;
pub mod replay;
