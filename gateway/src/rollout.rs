//! Rollouts: users move from one model to another, step by step, as long as the new one is as good; and back at once when it is not.
//!
//! Core:
//!
//! - [`record`]: a rollout, as the coordinators agree on it; what operators and time do to it
//! - [`seen`]: what was seen of both models, of which coordinators tell each other; [`votes`]: and how much one tenant's votes count
//! - [`judge`]: go on, wait, or go back
//!
//! Shell: [`running`]: rollouts at this front door; [`routed`]: a request whose model was chosen; [`shadow`]: requests that the new model answers, too, and nobody sees.

pub mod judge;
pub mod record;
pub mod seen;
pub mod votes;

#[cfg(feature = "shell")]
mod figures;
#[cfg(feature = "shell")]
pub mod routed;
#[cfg(feature = "shell")]
pub mod running;
#[cfg(feature = "shell")]
pub mod shadow;

/// The kind of a rollout's record in the registry. Its key is the model that users move from.
pub const KIND: &str = "rollout";
/// Of what one coordinator has seen of a rollout. Its key is `ID@COORDINATOR`.
pub const SEEN_KIND: &str = "rollout-seen";
