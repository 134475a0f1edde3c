//! Measuring Tidemill, and what a measurement needs.
//!
//! - [`kernels`]: `tidemill-bench kernels`, how close computing comes to what this machine can do
//!   - [`kernels::ceilings`]: what it can do: multiply-adds and bytes read per second
//!   - [`kernels::limits`]: work, and the least time for it under the ceilings
//!   - [`kernels::ops`]: each kernel
//!   - [`kernels::phases`]: prefill and decode of whole models
//!   - [`kernels::cuda`]: the same on a GPU: [`kernels::cuda::gpu`], the device that is measured; [`kernels::cuda::ceilings`], [`kernels::cuda::ops`], [`kernels::cuda::phases`]
//!   - [`kernels::report`]: what came out, and its tables
//! - [`kv`]: `tidemill-bench kv`, bytes per second of the KV pool
//!   - [`kv::transfer`]: put and get, timed
//!   - [`kv::reference`]: what the machine itself does: memcpy, TCP
//!   - [`kv::nvme`]: blocks to and from disk, beside [`kv::nvme::raw`], the disk itself
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
//! - [`perplexity`]: `tidemill-bench perplexity`, what fewer bits cost a model
//! - [`replay`]: `tidemill-bench replay`, hit rates of the KV pool on recorded traffic
//!   - [`replay::trace`]: trace files
//!   - [`replay::pool`]: a trace through the pool's directory
//!   - [`replay::optimum`]: what no policy can beat
//!   - [`replay::bound`]: what no policy can beat that does not know the future

pub mod kernels;
pub mod kv;
pub mod load;
pub mod model;
pub mod perplexity;
pub mod replay;
