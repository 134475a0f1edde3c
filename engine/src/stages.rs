//! The stages of a worker, each a process: the links between the head and the others.
//!
//! ```text
//!                     rows ┌──────────────┐ rows                rows with logits
//!   head: own layers ─────►│ link task 2  ├──────► link task 3 ─────────────► head: logits
//!             │            └──▲────────┬──┘           ▲     │
//!             │ blocks        │  QUIC  ▼              │     ▼
//!             └──────────►  stage 2 of 3           stage 3 of 3
//! ```
//!
//! All rows and blocks go by way of the head, which is the only process that a stage talks to. A stage that cannot be reached, or does not
//! answer in time, ends the head; the other stages keep their weights and wait for the next head.
//!
//! - `head`: meeting the stages, and a link task for each
//! - `serve`: a stage's process
//! - [`protocol`]: the decisions of both sides, without either

#[cfg(feature = "shell")]
pub(crate) mod head;
pub mod protocol;
#[cfg(feature = "shell")]
pub(crate) mod serve;

#[cfg(feature = "shell")]
use std::{net::SocketAddr, time::Duration};
#[cfg(feature = "shell")]
use tidemill_net::link::LinkError;
#[cfg(feature = "shell")]
use tidemill_proto::stage::Stage;

/// The reason why a worker's stages are not together.
#[cfg(feature = "shell")]
#[derive(Debug, thiserror::Error)]
pub enum StagesError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("{stage} at {addr} refuses: {reason}")]
    Refused { stage: Stage, addr: SocketAddr, reason: String },
    #[error("{stage} at {addr} did not take part within {within:?} (`stage_wait_s`): {reason}")]
    Late { stage: Stage, addr: SocketAddr, within: Duration, reason: String },
    #[error("this worker was told to end while it waited for its stages")]
    Told,
}
