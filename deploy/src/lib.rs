//! The parts of the `tidemill` binary, as a library for the bench.
//!
//! - [`client`]: a streaming client of any OpenAI-compatible endpoint (`tidemill chat` and `tidemill-bench load`)
//! - [`autoscale`]: `tidemill autoscale`, a command run for each number of workers that is [`wanted`]
//! - [`backup`]: `tidemill backup` and `tidemill restore`
//! - [`certs`]: `tidemill certs`, certificates with roles
//! - [`chat`]: `tidemill chat`, a conversation in the terminal
//! - [`cluster`]: `tidemill cluster`, the state of a running cluster
//! - [`appeals`]: `tidemill appeals`; [`audit`]: `tidemill audit`; [`feedback`]: `tidemill feedback`;
//!   [`golden`]: the file of golden cases
//! - [`doctor`]: `tidemill doctor`, checks that machines and clusters are fit to serve
//! - [`erase`]: `tidemill erase` and `tidemill export`
//! - [`eval`]: `tidemill eval`, evaluation of models' answers
//! - [`keys`]: `tidemill keys` and `tidemill tenants`; [`usage`]: `tidemill usage`; [`operators`]: the token that these and others send
//! - [`registry`]: `tidemill registry`, the records that the coordinators agree on
//! - [`rollout`]: `tidemill rollout`, moving users from one model to another
//! - [`safety`]: `tidemill safety`, training and evaluation of the safety checks' classifier
//! - [`up`]: `tidemill up`, a whole cluster on one machine
//! - [`processes`]: the role processes that `up` starts, watches and ends
//! - [`demo_model`]: the checkpoint that `up` serves by default

pub mod appeals;
pub mod audit;
pub mod autoscale;
pub mod backup;
pub mod certs;
pub mod chat;
pub mod client;
pub mod cluster;
pub mod demo_model;
pub mod doctor;
pub mod erase;
pub mod eval;
pub mod feedback;
pub mod gguf;
pub mod golden;
pub mod keys;
pub mod operators;
pub mod processes;
pub mod registry;
pub mod rollout;
pub mod safety;
pub mod up;
pub mod usage;
pub mod wanted;
