//! The matching of one sequence against a grammar.

use crate::compiler::Compiled;
use tidemill_proto::{block::Token, grammar::Constraint, step::Mask};

/// The state of one sequence: a function of its constraint and the tokens generated so far.
pub struct Matcher {
    inner: llguidance::Matcher,
    end_tokens: Vec<Token>,
    ends_late: bool,
    width: usize,
}

/// An error that ends the sequence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    #[error("the grammar leads to where no token of this model is allowed")]
    DeadEnd,
    #[error("the grammar is complete, and this model has no end-of-sequence token to say so")]
    NoEnd,
    #[error("token {token} does not follow the grammar: {reason}")]
    Strayed { token: Token, reason: String },
    #[error("the grammar takes more work than is allowed: {0}")]
    TooComplex(String),
}

impl Matcher {
    /// A matcher in the state after the tokens in `generated`. It repeats the work of generating them, so that results that depend on
    /// earlier work are the same.
    pub fn new(compiled: &Compiled, constraint: &Constraint, generated: &[Token]) -> Result<Self, MatchError> {
        let Constraint { end_tokens, ends_late, .. } = constraint;
        let mut matcher = Self { inner: compiled.fresh(), end_tokens: end_tokens.clone(), ends_late: *ends_late, width: compiled.width };
        for &token in generated {
            matcher.mask()?;
            matcher.advance(token)?;
        }
        Ok(matcher)
    }

    /// The tokens that may come next, at least one. It must be called exactly once between two tokens.
    pub fn mask(&mut self) -> Result<Mask, MatchError> {
        if self.inner.stop_reason() != llguidance::api::StopReason::NotStopped {
            return self.ends_only();
        }
        let allowed = self.inner.compute_mask().map_err(|error| self.failure(&error))?;
        let may_end = allowed.is_allowed(self.width as Token);
        let mut mask = Mask::new(allowed.as_slice(), self.width);
        if may_end && !(self.ends_late && mask.allows_any()) {
            self.end_tokens.iter().for_each(|&token| mask.allow(token));
        }
        if !mask.allows_any() {
            return self.ends_only();
        }
        Ok(mask)
    }

    /// Consumes the next token. No token follows an end-of-sequence token.
    pub fn advance(&mut self, token: Token) -> Result<(), MatchError> {
        if self.end_tokens.contains(&token) {
            return Ok(());
        }
        self.inner.consume_token(token).map_err(|error| refusal(token, first_line(&error.to_string())))
    }

    /// The mask at which the grammar is complete: only end-of-sequence tokens.
    fn ends_only(&self) -> Result<Mask, MatchError> {
        let mut mask = Mask::none(self.width);
        self.end_tokens.iter().for_each(|&token| mask.allow(token));
        if mask.allows_any() { Ok(mask) } else { Err(MatchError::NoEnd) }
    }

    fn failure(&self, error: &impl ToString) -> MatchError {
        let message = first_line(&error.to_string());
        if message == llguidance::api::StopReason::NoExtensionBias.to_string() {
            MatchError::DeadEnd
        } else {
            MatchError::TooComplex(message)
        }
    }
}

/// The error for a token that was not accepted. The parser's rows have a limit apart from the budget of a mask, so consuming an allowed
/// token may be too complex. Only the text of llguidance's error distinguishes that from a token that was not allowed.
fn refusal(token: Token, reason: String) -> MatchError {
    if reason.contains("Current row has") { MatchError::TooComplex(reason) } else { MatchError::Strayed { token, reason } }
}

/// The message of llguidance, without its dump of the state.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("end_tokens", &self.end_tokens).finish_non_exhaustive()
    }
}
