//! One sequence on its way through a grammar.

use crate::compiler::Compiled;
use tidemill_proto::{block::Token, grammar::Constraint, step::Mask};

/// The state of one sequence: a function of its constraint and the tokens generated so far.
pub struct Matcher {
    inner: llguidance::Matcher,
    end_tokens: Vec<Token>,
    ends_late: bool,
    width: usize,
}

/// The sequence cannot go on.
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
    /// At the place that `generated` leads to. It takes the same work as it took to generate them, so that whatever depends on the work
    /// done before comes out the same.
    pub fn new(compiled: &Compiled, constraint: &Constraint, generated: &[Token]) -> Result<Self, MatchError> {
        let Constraint { end_tokens, ends_late, .. } = constraint;
        let mut matcher = Self { inner: compiled.fresh(), end_tokens: end_tokens.clone(), ends_late: *ends_late, width: compiled.width };
        for &token in generated {
            matcher.mask()?;
            matcher.advance(token)?;
        }
        Ok(matcher)
    }

    /// The tokens that may come next: at least one. Once between any two tokens.
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

    /// The next token. Nothing follows the end of the sequence.
    pub fn advance(&mut self, token: Token) -> Result<(), MatchError> {
        if self.end_tokens.contains(&token) {
            return Ok(());
        }
        self.inner.consume_token(token).map_err(|error| refusal(token, first_line(&error.to_string())))
    }

    /// The grammar is complete.
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

/// The reason why `token` was not taken. A mask looks at tokens under a budget for all of them, and the parser's rows have a limit of their
/// own: the way on from an allowed token may be too much work. Only llguidance's words tell that from a token that was not allowed.
fn refusal(token: Token, reason: String) -> MatchError {
    if reason.contains("Current row has") { MatchError::TooComplex(reason) } else { MatchError::Strayed { token, reason } }
}

/// What llguidance says, without its dump of the state.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("end_tokens", &self.end_tokens).finish_non_exhaustive()
    }
}
