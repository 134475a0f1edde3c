//! The result of a probe through every model.

use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// The last run, held while another one runs.
pub type LastProbe = Mutex<Option<Probed>>;

#[derive(Clone, Debug)]
pub struct Probed {
    pub(super) ended: Instant,
    pub(super) models: Vec<ProbedModel>,
}

/// A model's answer to the probe.
#[derive(Clone, Debug)]
pub struct ProbedModel {
    pub name: String,
    /// The time that it took, or the reason why there was no token.
    pub answered: Result<Duration, String>,
}
