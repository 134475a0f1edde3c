//! The path of a request into the cluster, and of its answer back.
//!
//! - [`gateway`]: the handle that all handlers share, and the path of a request up to its start
//! - [`backend`]: the cluster as the gateway sees it; [`embedded`]: embeddings, collected from its events
//! - [`encoder`]: a model that reads texts for the gateway itself; [`recall`]: the vectors by which old messages and facts are ranked;
//!   [`examples`]: requests with which `auto` compares others
//! - [`answer`]: a running request's events as deltas of its choices; [`rounds`]: answers with calls of tools that run on the server
//! - [`replays`]: recordings of answers; [`running`]: responses that are being streamed
//! - [`regions`]: requests that another cluster answers

pub mod answer;
pub mod backend;
pub mod embedded;
pub mod encoder;
pub mod examples;
pub mod gateway;
pub mod recall;
pub mod regions;
pub mod replays;
pub mod rounds;
pub mod running;
