//! The cluster's deciding part: what clients ask and workers tell goes in, messages come out, time is an argument.

mod cluster;
pub mod cost;
pub mod index;
pub mod membership;
mod placement;
mod request;
pub mod schedule;
#[cfg(test)]
mod tests;
mod view;
mod workers;

pub use cluster::{Action, Cluster, ClusterSettings};
pub use membership::Refusal;
pub use request::{Failure, NewRequest, Outcome, Rejection, RequestEvent, Usage};
pub use view::{ClusterView, MemberView};
