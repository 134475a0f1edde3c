//! Rollouts: users move from one model to another, step by step, as long as the new one is as good; and back at once if it is not.
//!
//! Core:
//!
//! - [`record`]: a rollout, as the coordinators agree on it, and its changes by operators and time
//! - [`seen`]: the figures of both models, which coordinators exchange; [`votes`]: the weight of one tenant's votes
//! - [`judge`]: advance, wait, or go back
//!
//! Shell: [`running`]: rollouts at this gateway; [`routed`]: a request whose model was chosen; [`shadow`]: requests that the new model
//! answers unseen.

pub mod judge;
pub mod record;
pub mod seen;
pub mod votes;

#[cfg(feature = "shell")]
mod metrics;
#[cfg(feature = "shell")]
pub mod routed;
#[cfg(feature = "shell")]
pub mod running;
#[cfg(feature = "shell")]
pub mod shadow;

/// The kind of a rollout's record in the registry. Its key is the model that users move from.
pub const KIND: &str = "rollout";
/// The kind of a record of one coordinator's counts in a rollout. Its key is `ID@COORDINATOR`.
pub const SEEN_KIND: &str = "rollout-seen";
