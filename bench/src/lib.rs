//! Measurements of Tidemill, and the workloads and models that they need.
//!
//! - [`chaos`]: `tidemill-bench chaos`, faults of live processes
//! - [`grammar`]: `tidemill-bench grammar`, what constrained decoding costs
//! - [`kernels`]: `tidemill-bench kernels`, kernels and models against this machine's limits
//!   - [`kernels::ceilings`]: the machine's limits: multiply-adds and bytes read per second
//!   - [`kernels::limits`]: the least time for given work under the ceilings
//!   - [`kernels::ops`]: each kernel
//!   - [`kernels::phases`]: prefill and decode of whole models
//!   - [`kernels::cuda`]: the same on a GPU: [`kernels::cuda::gpu`], the device that is measured; [`kernels::cuda::ceilings`],
//!     [`kernels::cuda::ops`], [`kernels::cuda::phases`]
//!   - [`kernels::report`]: results and their tables
//! - [`kv`]: `tidemill-bench kv`, bytes per second of the KV pool
//!   - [`kv::transfer`]: put and get, timed
//!   - [`kv::reference`]: memcpy and TCP on this machine
//!   - [`kv::nvme`]: blocks to and from disk, beside the raw disk ([`kv::nvme::raw`])
//!   - [`kv::node`]: the pool node under test, as a process
//!   - [`kv::clocks`]: wall and CPU time of both sides
//!   - [`kv::report`]: rows and their table
//! - [`load`]: `tidemill-bench load`, open-loop load on any OpenAI-compatible endpoint
//!   - [`load::arrivals`]: when each request is due
//!   - [`load::workload`]: each request's prompt and length
//!   - [`load::timeline`]: one answer's events to its latencies
//!   - [`load::summary`]: all answers to percentiles, rates and goodput
//! - [`model`]: `tidemill-bench model`, a checkpoint with a published model's shape and random weights
//!   - [`model::shapes`]: the published shapes, as a table
//!   - [`model::weights`]: random tensors, streamed into a safetensors file
//!   - [`model::tokenizer`]: a byte-level BPE tokenizer as large as the model's vocabulary
//! - [`perplexity`]: `tidemill-bench perplexity`, the cost of fewer bits in quality
//! - [`replay`]: `tidemill-bench replay`, hit rates of the KV pool on recorded traffic
//!   - [`replay::trace`]: trace files
//!   - [`replay::pool`]: a trace through the pool's directory
//!   - [`replay::optimum`]: the best possible policy, which knows the future
//!   - [`replay::bound`]: a bound on policies that do not
//! - [`sim`]: `tidemill-bench sim`, simulated clusters
//!   - [`sim::scenario`]: scenario files
//!   - [`sim::summary`]: runs to figures
//!   - [`sim::timing`], [`sim::memory`]: what decisions cost in real time, and in bytes allocated
//!   - [`sim::report`], [`sim::html`], [`sim::plot`]: figures as text, JSON and a page with plots

pub mod chaos;
pub mod grammar;
pub mod kernels;
pub mod kv;
pub mod load;
pub mod model;
pub mod perplexity;
pub mod replay;
pub mod sim;
