//! Measurements of Tidemill, and the workloads and models that they need.
//!
//! - [`abuse`]: `tidemill-bench abuse`, the effects of an attacking client on others
//!   - [`abuse::attacks`]: the table of attacks
//!   - [`abuse::attacker`]: the client that attacks
//! - [`abuse::cluster`], [`abuse::premium`], [`abuse::keepsakes`]: the cluster, a tenant that chats, and the stored data of others
//! - [`abuse::outcome`]: the outcome of the attacks
//! - [`chaos`]: `tidemill-bench chaos`, faults of live processes
//! - [`contamination`]: `tidemill-bench contamination`, whether caches mix conversations up
//!   - [`contamination::asks`]: conversations with secret words, and short questions
//!   - [`contamination::tally`]: each pass compared with the answers without a cache
//! - [`goodput`]: `tidemill-bench goodput`, the highest rate at which servers keep their limits
//! - [`goodput::search`]: bisection, and intervals of its results
//!   - [`goodput::server`]: servers to compare, started and stopped
//! - [`grammar`]: `tidemill-bench grammar`, the cost of constrained decoding
//! - [`kernels`]: `tidemill-bench kernels`, kernels and models against this machine's limits
//!   - [`kernels::ceilings`]: the machine's limits: multiply-adds and bytes read per second
//!   - [`kernels::limits`]: the least time for given work under the ceilings
//!   - [`kernels::ops`]: each kernel
//!   - [`kernels::collectives`]: the gathers of ranks, and the link between stages
//!   - [`kernels::phases`]: prefill and decode of whole models
//! - [`kernels::cuda`]: the same on a GPU: [`kernels::cuda::gpu`], the measured device; [`kernels::cuda::ceilings`],
//!   [`kernels::cuda::ops`], [`kernels::cuda::phases`]
//!   - [`kernels::report`]: results and their tables
//! - [`kv`]: `tidemill-bench kv`, bytes per second of the KV pool
//!   - [`kv::transfer`]: put and get, timed
//!   - [`kv::reference`]: memcpy and TCP on this machine
//!   - [`kv::nvme`]: blocks to and from disk, beside the raw disk ([`kv::nvme::raw`])
//!   - [`kv::node`]: the pool node under test, as a process
//!   - [`kv::clocks`]: wall and CPU time of both sides
//!   - [`kv::report`]: rows and their table
//! - [`load`]: `tidemill-bench load`, load on any OpenAI-compatible endpoint, in an open loop or a closed one
//! - [`load::arrivals`]: the times of requests
//! - [`load::workload`]: the requests: [`load::length`], [`load::chats`] from a file, [`load::trace`]s, [`load::kind`]s of
//!   a mixed workload
//!   - [`load::target`]: the server, and one request to it
//!   - [`load::drive`]: sends sessions of requests, each at its time
//!   - [`load::timeline`]: one answer's events to its latencies
//!   - [`load::percentiles`]: latencies to percentiles
//!   - [`load::summary`]: all answers to percentiles, rates and goodput
//! - [`load::overhead`]: the cost of the client itself
//! - [`load::progress`]: the display meanwhile
//! - [`model`]: `tidemill-bench model`, a checkpoint with a published model's shape and random weights
//!   - [`model::shapes`]: the published shapes, as a table
//!   - [`model::weights`]: random tensors, streamed into a safetensors file
//!   - [`model::tokenizer`]: a byte-level BPE tokenizer as large as the model's vocabulary
//! - [`perplexity`]: `tidemill-bench perplexity`, the cost of fewer bits in quality
//! - [`plan`]: `tidemill-bench plan`, from users to GPUs and dollars
//! - [`plan::assumptions`]: all assumptions, as rows
//!   - [`plan::tables`]: models and hardware by name
//!   - [`plan::fleet`]: the arithmetic
//! - [`plan::levers`]: the most important assumption, and the savings of each measure
//!   - [`plan::examples`]: published worked examples beside ours
//!   - [`plan::validate`]: the plan in the simulator
//!   - [`plan::page`]: the interactive page
//! - [`record`]: the format of every subcommand's `--json`
//! - [`replay`]: `tidemill-bench replay`, recorded traffic: to a live server, and hit rates of the KV pool
//!   - [`replay::trace`]: trace files
//!   - [`replay::live`]: a trace's requests at their times
//!   - [`replay::pool`]: a trace through the pool's directory
//!   - [`replay::optimum`]: the best possible policy, which knows the future
//! - [`replay::bound`]: a bound on policies that do not know the future
//! - [`report`]: `tidemill-bench report`, one or many `--json` files as a page or a table, or compared
//! - [`report::figures`]: the tables and plots of a record
//! - [`report::compare`]: changes beyond noise
//! - [`sim`]: `tidemill-bench sim`, simulated clusters
//!   - [`sim::scenario`]: scenario files
//!   - [`sim::summary`]: runs to figures
//! - [`sim::timing`], [`sim::memory`]: the cost of decisions in real time, and in bytes allocated
//!   - [`sim::report`], [`sim::html`], [`sim::plot`]: figures as text, JSON and a page with plots
//! - [`stub`]: `tidemill-bench stub`, a server with known delays, which shows the accuracy of the client

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
