//! The moderator's side of an answer, as the answer sees it.

use crate::generation::guarded::ModerationVerdict;
use std::{
    fmt::Debug,
    task::{Context, Poll},
};
use tidemill_safety::judge::Doubt;

/// Moderates uncertain findings in one answer's choices, one of each at a time. Dropping it ends what is under way.
pub trait Moderation: Debug + Send {
    fn ask(&mut self, choice: usize, doubt: Doubt);
    fn is_busy(&self) -> bool;
    /// Returns the next verdict, and its choice; while nothing [is asked](Self::is_busy), none ever comes.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(usize, ModerationVerdict)>;
}
