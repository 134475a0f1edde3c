//! The moderator's interface to an answer.

use crate::generation::guarded::ModerationVerdict;
use std::{
    fmt::Debug,
    task::{Context, Poll},
};
use tidemill_safety::judge::Doubt;

/// Moderates uncertain findings in one answer's choices, one of each at a time. Dropping it cancels running checks.
pub trait Moderation: Debug + Send {
    fn ask(&mut self, choice: usize, doubt: Doubt);
    fn is_busy(&self) -> bool;
    /// Returns the next verdict, and its choice. While it is not [busy](Self::is_busy), none ever comes.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(usize, ModerationVerdict)>;
}
