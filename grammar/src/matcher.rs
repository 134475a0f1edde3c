//! The matching of one sequence against a grammar.
//!
//! The compiler's limits do not bound the time of a mask: a row of 400 items that end alike takes a third of a second. So an answer has an
//! [`Allowance`] of CPU time, by which a grammar is judged before it is used, and which ends an answer that comes to need more.

use crate::compiler::Compiled;
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;
use tidemill_proto::{block::Token, grammar::Constraint, step::Mask};

/// The state of one sequence: a function of its constraint and the tokens generated so far.
pub struct Matcher {
    inner: llguidance::Matcher,
    end_tokens: Vec<Token>,
    ends_late: bool,
    width: usize,
    allowance: Allowance,
    tokens: u32,
    cpu: Duration,
}

/// The CPU time that an answer's masks may take: `at_first`, and more with each token.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    pub at_first: Duration,
    pub per_token: Duration,
}

impl Allowance {
    /// The allowance of an answer. Almost all masks take less than a tenth of a millisecond, and those of the most complex public schemas
    /// less than two. The first masks in each part of a grammar build its automata and take some ten times as long, for which the answer
    /// has time at first.
    pub const ANSWER: Self = Self { at_first: Duration::from_secs(2), per_token: Duration::from_millis(5) };
    /// The allowance of a trial, which has so few tokens that most of its masks are first ones.
    pub const TRIAL: Self = Self { at_first: Duration::from_millis(100), per_token: Duration::from_millis(5) };

    fn after(self, tokens: u32) -> Duration {
        self.at_first + self.per_token * tokens
    }
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
    #[error(
        "following the grammar took {} ms of computing for {tokens} tokens, and {} ms are the most: simplify the grammar or schema, with \
         fewer alternatives and fewer ways to read the same text",
        cpu.as_millis(),
        most.as_millis()
    )]
    TooSlow { tokens: u32, cpu: Duration, most: Duration },
}

impl Matcher {
    /// A matcher in the state after the tokens in `generated`. It repeats the work of generating them, so that results that depend on
    /// earlier work are the same.
    pub fn new(compiled: &Compiled, constraint: &Constraint, generated: &[Token]) -> Result<Self, MatchError> {
        let Constraint { end_tokens, ends_late, .. } = constraint;
        let mut matcher = Self::within(Allowance::ANSWER, compiled, end_tokens, *ends_late);
        for &token in generated {
            matcher.mask()?;
            matcher.advance(token)?;
        }
        Ok(matcher)
    }

    pub(crate) fn within(allowance: Allowance, compiled: &Compiled, end_tokens: &[Token], ends_late: bool) -> Self {
        let (inner, width) = (compiled.fresh(), compiled.width);
        Self { inner, end_tokens: end_tokens.to_vec(), ends_late, width, allowance, tokens: 0, cpu: Duration::ZERO }
    }

    /// The CPU time of all calls so far.
    pub fn cpu(&self) -> Duration {
        self.cpu
    }

    /// The tokens that may come next, at least one. It must be called exactly once between two tokens.
    pub fn mask(&mut self) -> Result<Mask, MatchError> {
        let mask = self.metered(Self::compute_mask);
        let (tokens, cpu, most) = (self.tokens, self.cpu, self.allowance.after(self.tokens));
        if cpu > most { Err(MatchError::TooSlow { tokens, cpu, most }) } else { mask }
    }

    fn compute_mask(&mut self) -> Result<Mask, MatchError> {
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
        self.tokens += 1;
        self.metered(|matcher| matcher.inner.consume_token(token)).map_err(|error| refusal(token, first_line(&error.to_string())))
    }

    /// Adds the CPU time of some work to the answer's.
    fn metered<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = thread_cpu();
        let outcome = work(self);
        self.cpu += thread_cpu().saturating_sub(before);
        outcome
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

/// The CPU time of this thread, without the time in which it waits for a core.
fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compiler, Vocabulary};
    use std::path::Path;
    use tidemill_proto::grammar::Grammar;

    #[test]
    fn each_token_adds_to_what_an_answer_may_take() {
        let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama3/tokenizer.json");
        let compiler = Compiler::new(&Vocabulary::load(&tokenizer, 512).unwrap());
        let compiled = compiler.compile(&Grammar::Regex("[a-z]*".into())).unwrap();
        let follow = |allowance: Allowance| {
            let mut matcher = Matcher::within(allowance, &compiled, &[], false);
            for _ in 0..20 {
                let token = matcher.mask()?.tokens().next().expect("a mask allows a token");
                matcher.advance(token)?;
            }
            Ok(())
        };
        assert_eq!(follow(Allowance::ANSWER), Ok(()));
        let (none, much) = (Duration::ZERO, Duration::from_secs(60));
        assert!(matches!(follow(Allowance { at_first: none, per_token: much }), Err(MatchError::TooSlow { tokens: 0, .. })));
        let error: MatchError = follow(Allowance { at_first: Duration::from_nanos(1), per_token: none }).unwrap_err();
        assert!(error.to_string().contains("simplify the grammar"), "{error}");
    }
}
