//! The cluster's decision core, sans I/O: no clock, socket, thread, text or HTTP. Events and time go in, actions come out.
//!
//! - [`Cluster`]: the machine as a whole; `workers`: workers' events
//! - `lifecycle`: a request's stages, one per file; `requests`: requests, their sequences and the queue
//! - [`class`]: the limits that requests are promised
//! - [`admission`]: whether a request is accepted; [`schedule`]: where a sequence runs. Both are pure, over the data that `candidates`
//!   joins
//! - [`membership`]: the members, on which all coordinators can agree
//! - [`load`]: each worker's work from this coordinator, and its last report (never replicated)
//! - [`index`]: which pool nodes hold a block, and which blocks are read often
//! - [`autoscale`]: the number of workers that a model wants
//! - [`cost`]: a model of times, learnt from workers' steps
//! - [`probes`]: checks that engines compute correctly; `distrust`: the consequences if not
//! - [`models`]: several models, each with a cluster of its own
//! - `request`, `view`: the client's and the operator's side

pub mod admission;
pub mod autoscale;
mod candidates;
pub mod class;
mod cluster;
pub mod cost;
mod decisions;
mod distrust;
mod fairness;
pub mod index;
mod lifecycle;
pub mod load;
pub mod membership;
pub mod models;
mod pace;
pub mod probes;
mod request;
mod requests;
pub mod schedule;
mod shortlist;
#[cfg(test)]
mod tests;
mod view;
mod workers;

pub use cluster::{Action, Cluster, ClusterSettings, Origin, Warning};
pub use decisions::{ConsideredView, DecisionView};
pub use lifecycle::Forecast;
pub use membership::Refusal;
pub use models::{ModelId, Models};
pub use request::{ChoiceUsage, Failure, NewRequest, Outcome, Rejection, RequestEvent};
pub use view::{ClusterView, MemberView, ModelView, PredictionError, ProbeView, ProbesView};
