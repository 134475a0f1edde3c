//! Measurements of Tidemill, and the workloads and models that they need.
//!
//! - [`abuse`]: `tidemill-bench abuse`, what others notice of a client that attacks
//!   - [`abuse::attacks`]: the table of attacks
//!   - [`abuse::attacker`]: the client that attacks
//!   - [`abuse::cluster`], [`abuse::premium`], [`abuse::keepsakes`]: the cluster, a tenant that chats, and what others have stored
//!   - [`abuse::outcome`]: what came of it
//! - [`chaos`]: `tidemill-bench chaos`, faults of live processes
//! - [`contamination`]: `tidemill-bench contamination`, whether caches mix conversations up
//!   - [`contamination::asks`]: conversations with secret words, and short questions
//!   - [`contamination::tally`]: each pass compared with the answers without a cache
//! - [`goodput`]: `tidemill-bench goodput`, the highest rate at which servers keep their limits
//!   - [`goodput::search`]: bisection, and intervals of what it finds
//!   - [`goodput::server`]: servers to compare, started and stopped
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
//! - [`load`]: `tidemill-bench load`, load on any OpenAI-compatible endpoint, in an open loop or a closed one
//!   - [`load::arrivals`]: when each request is due
//!   - [`load::workload`]: what is asked: [`load::length`], [`load::chats`] from a file, [`load::trace`]s, [`load::kind`]s of
//!     a mixed workload
//!   - [`load::target`]: the server, and one request to it
//!   - [`load::drive`]: sends sessions of requests, each at its time
//!   - [`load::timeline`]: one answer's events to its latencies
//!   - [`load::percentiles`]: latencies to percentiles
//!   - [`load::summary`]: all answers to percentiles, rates and goodput
//!   - [`load::overhead`]: what the client itself costs
//!   - [`load::progress`]: what one sees meanwhile
//! - [`model`]: `tidemill-bench model`, a checkpoint with a published model's shape and random weights
//!   - [`model::shapes`]: the published shapes, as a table
//!   - [`model::weights`]: random tensors, streamed into a safetensors file
//!   - [`model::tokenizer`]: a byte-level BPE tokenizer as large as the model's vocabulary
//! - [`perplexity`]: `tidemill-bench perplexity`, the cost of fewer bits in quality
//! - [`plan`]: `tidemill-bench plan`, from users to GPUs and dollars
//!   - [`plan::assumptions`]: everything that is assumed, as rows
//!   - [`plan::tables`]: models and hardware by name
//!   - [`plan::fleet`]: the arithmetic
//!   - [`plan::levers`]: which assumption matters most, and what saves how much
//!   - [`plan::examples`]: published worked examples beside ours
//!   - [`plan::validate`]: the plan in the simulator
//!   - [`plan::page`]: the interactive page
//! - [`record`]: what every subcommand's `--json` writes
//! - [`replay`]: `tidemill-bench replay`, recorded traffic: to a live server, and hit rates of the KV pool
//!   - [`replay::trace`]: trace files
//!   - [`replay::live`]: a trace's requests at their times
//!   - [`replay::pool`]: a trace through the pool's directory
//!   - [`replay::optimum`]: the best possible policy, which knows the future
//!   - [`replay::bound`]: a bound on policies that do not
//! - [`report`]: `tidemill-bench report`, one or many `--json` files as a page or a table, or compared
//!   - [`report::figures`]: what a record has to show: tables, plots
//!   - [`report::compare`]: what changed beyond noise
//! - [`sim`]: `tidemill-bench sim`, simulated clusters
//!   - [`sim::scenario`]: scenario files
//!   - [`sim::summary`]: runs to figures
//!   - [`sim::timing`], [`sim::memory`]: what decisions cost in real time, and in bytes allocated
//!   - [`sim::report`], [`sim::html`], [`sim::plot`]: figures as text, JSON and a page with plots
//! - [`stub`]: `tidemill-bench stub`, a server with known delays, which shows how true the client is

pub mod abuse;
pub mod chaos;
pub mod contamination;
pub mod goodput;
pub mod grammar;
pub mod kernels;
pub mod kv;
pub mod load;
pub mod model;
pub mod perplexity;
pub mod plan;
pub mod record;
pub mod replay;
pub mod report;
pub mod sim;
pub mod stub;
