//! Speculation: a proposer guesses the next tokens, and one step verifies them. A step reads all weights regardless of its number of rows,
//! so rows that turn out right are tokens at a fraction of a step's time.
//!
//! ```text
//!   propose ──► how many pay ([`rows`]) ──► step of 1 + k rows: the sampler draws at each row, as long as the row before
//!      ▲                                    drew the drafted token ──► tokens ──► the value of the proposal ─────────────────┐
//!      └──────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Speculation changes no answer. A row has the same bits beside others (§5 of the architecture), and a draw depends on its row, the tokens
//! before it and (seed, position) alone. A token counts only if the sampler drew it; the proposal decides nothing but the number of a
//! step's rows. This is speculative decoding (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023) in
//! which the target's draw is known beforehand: its rule of acceptance becomes equality.
//!
//! - [`ngram`]: proposes the tokens that followed an earlier occurrence of the last tokens
//! - [`draft_model`]: a small model that guesses; `places`: its keys and values; `confidence`: the accuracy of its guesses
//! - [`rows`]: the number of drafted tokens in a step, and their sequences
//! - `trial`: whether steps with drafted tokens have yielded more than steps without

mod confidence;
pub mod draft_model;
pub mod ngram;
mod places;
pub mod rows;
pub(crate) mod trial;

use confidence::Confidence;
use draft_model::DraftBounds;
use std::fmt;
use tidemill_proto::block::Token;

/// A source of guesses of one sequence's next tokens.
pub trait Proposer: fmt::Debug + Send {
    /// Appends up to `most` tokens that may follow `tokens`, all of the sequence's so far, to `proposal`. Tokens given in earlier calls
    /// come first and are unchanged. Returns the strength of the evidence: the number of last tokens that it is based on.
    fn propose(&mut self, tokens: &[Token], most: usize, proposal: &mut Vec<Token>) -> usize;
}

/// The settings of a worker's speculation.
#[derive(Clone, Copy, Debug)]
pub struct Speculation {
    /// Creates a sequence's proposer.
    pub proposer: fn() -> Box<dyn Proposer>,
    /// The bounds of the draft model, which guesses where the proposer has no strong evidence; `None` if there is none.
    pub draft_model: Option<DraftBounds>,
    /// The most drafted tokens of one sequence in a step.
    pub draft_tokens_max: usize,
    /// The number of drafted tokens of one sequence in a step that are verified whether they pay off or not, if they are proposed.
    pub draft_tokens_min: usize,
    /// The most rows of a step with drafted tokens: those of decoding sequences and the drafted ones together.
    pub rows_max: usize,
}

/// A token that a draft model guessed, and the class of its [`Confidence`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Guess {
    pub(crate) token: Token,
    pub(crate) class: usize,
}

/// One sequence's proposer, its current proposals and those of the draft model, and the value of earlier ones.
#[derive(Debug)]
pub(crate) struct Drafter {
    proposer: Box<dyn Proposer>,
    /// The number of the sequence's tokens when the proposals were made: they are for the places after these.
    made_at: usize,
    /// The proposer's proposal.
    proposal: Vec<Token>,
    evidence: usize,
    acceptance: Acceptance,
    /// The draft model's guesses, which take precedence.
    guesses: Vec<Guess>,
    confidence: Confidence,
}

impl Drafter {
    /// Creates a drafter. `confidence` is the worker's in the draft model.
    pub(crate) fn new(speculation: &Speculation, confidence: Confidence) -> Self {
        Self {
            proposer: (speculation.proposer)(),
            made_at: 0,
            proposal: Vec::new(),
            evidence: 0,
            acceptance: Acceptance::default(),
            guesses: Vec::new(),
            confidence,
        }
    }

    /// Proposes up to `most` tokens that may follow `tokens`, none of them in `ends`, unless that is done already.
    pub(crate) fn propose(&mut self, tokens: &[Token], most: usize, ends: &[Token]) {
        if self.made_at == tokens.len() {
            return;
        }
        self.forget();
        self.made_at = tokens.len();
        self.evidence = if most > 0 { self.proposer.propose(tokens, most, &mut self.proposal) } else { 0 };
        // A draft stops before a stop token: no token after one is needed, and the stop token itself is drawn anyway.
        let end = self.proposal.iter().position(|token| ends.contains(token)).unwrap_or(self.proposal.len());
        self.proposal.truncate(end);
    }

    /// Takes the draft model's guesses for the same places.
    pub(crate) fn take_guesses(&mut self, guesses: Vec<Guess>) {
        self.guesses = guesses;
    }

    /// The probability that each proposed token is drawn if those before it are.
    pub(crate) fn chances(&self) -> Vec<f64> {
        if self.guesses.is_empty() {
            return (0..self.proposal.len()).map(|place| self.acceptance.of(self.evidence + place)).collect();
        }
        self.guesses.iter().map(|guess| self.confidence.of(guess.class)).collect()
    }

    /// Whether a draft model's guesses are likely to be better than the proposer's, which cost nothing.
    pub(crate) fn wants_guesses(&self) -> bool {
        let chance = if self.proposal.is_empty() { 0.0 } else { self.acceptance.of(self.evidence) };
        self.guesses.is_empty() && chance < self.confidence.next()
    }

    pub(crate) fn confidence(&self) -> Confidence {
        self.confidence
    }

    /// The first `len` proposed tokens.
    pub(crate) fn draft(&self, len: usize) -> Vec<Token> {
        if self.guesses.is_empty() {
            return self.proposal[..len].to_vec();
        }
        self.guesses[..len].iter().map(|guess| guess.token).collect()
    }

    /// Learns from the tokens that the sequence has drawn. All proposals are compared, whether they were verified or not, so a useless
    /// proposer costs nothing until it would be useful. Returns the outcomes of the draft model's guesses, by class.
    pub(crate) fn learn(&mut self, drawn: &[Token]) -> Vec<(usize, bool)> {
        for (place, (proposed, drawn)) in self.proposal.iter().zip(drawn).enumerate() {
            self.acceptance.note(self.evidence + place, proposed == drawn);
            if proposed != drawn {
                break;
            }
        }
        let mut outcomes = Vec::new();
        for (guess, drawn) in self.guesses.iter().zip(drawn) {
            self.confidence.note(guess.class, guess.token == *drawn);
            outcomes.push((guess.class, guess.token == *drawn));
            if guess.token != *drawn {
                break;
            }
        }
        self.forget();
        outcomes
    }

    fn forget(&mut self) {
        self.made_at = 0;
        self.proposal.clear();
        self.guesses.clear();
    }
}

/// The share of proposed tokens that were drawn, by the evidence for them: long repetitions continue more often than short ones.
#[derive(Clone, Copy, Debug)]
struct Acceptance([f64; CLASSES]);

/// The number of classes of evidence: 0 to 1, 2 to 3, 4 to 7, 8 to 15 tokens, and more.
const CLASSES: usize = 5;
/// The share of the newest outcome in the moving averages.
const WEIGHT: f64 = 0.1;

impl Default for Acceptance {
    /// The shares at the start of a sequence, which outcomes soon outweigh.
    fn default() -> Self {
        Self([0.1, 0.3, 0.5, 0.7, 0.8])
    }
}

impl Acceptance {
    fn of(&self, evidence: usize) -> f64 {
        self.0[class(evidence)]
    }

    fn note(&mut self, evidence: usize, accepted: bool) {
        let share = &mut self.0[class(evidence)];
        *share += WEIGHT * (f64::from(u8::from(accepted)) - *share);
    }
}

fn class(evidence: usize) -> usize {
    (evidence.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A proposer of the numbers after the last one.
    #[derive(Debug)]
    struct Counting;

    impl Proposer for Counting {
        fn propose(&mut self, tokens: &[Token], most: usize, proposal: &mut Vec<Token>) -> usize {
            let last = tokens.last().copied().unwrap_or_default();
            proposal.extend(last + 1..=last + most as Token);
            4
        }
    }

    fn drafter() -> Drafter {
        let speculation =
            Speculation { proposer: || Box::new(Counting), draft_model: None, draft_tokens_max: 8, draft_tokens_min: 0, rows_max: 8 };
        Drafter::new(&speculation, Confidence::default())
    }

    fn chances(drafter: &mut Drafter, most: usize, ends: &[Token]) -> Vec<f64> {
        drafter.forget();
        drafter.propose(&[3], most, ends);
        drafter.chances()
    }

    #[test]
    fn a_proposal_ends_before_the_sequence_would() {
        let mut drafter = drafter();
        assert_eq!(chances(&mut drafter, 4, &[6, 5]).len(), 1);
        assert_eq!(drafter.draft(1), [4]);
        assert!(chances(&mut drafter, 4, &[4]).is_empty());
        assert!(chances(&mut drafter, 0, &[]).is_empty());
    }

    #[test]
    fn what_was_not_verified_teaches_as_much() {
        let mut drafter = drafter();
        let first = |drafter: &mut Drafter| chances(drafter, 8, &[])[0];
        let before = first(&mut drafter);
        drafter.learn(&[4]);
        let better = first(&mut drafter);
        assert!(better > before);
        drafter.learn(&[9]);
        assert!(first(&mut drafter) < better);
        // Longer evidence belongs to a different class: the first four places and the next ones differ.
        drafter.learn(&[4, 5, 6, 7, 9, 9]);
        let likely = chances(&mut drafter, 8, &[]);
        assert!(likely[0] > 0.6 && likely[4] < 0.7, "{likely:?}");
    }

    #[test]
    fn a_draft_model_goes_first_where_it_was_asked() {
        let mut drafter = drafter();
        drafter.propose(&[3], 8, &[]);
        assert!(drafter.wants_guesses(), "four tokens of evidence are right in half of the cases");
        drafter.take_guesses(vec![Guess { token: 4, class: 5 }, Guess { token: 7, class: 2 }]);
        assert_eq!((drafter.chances().len(), drafter.draft(2)), (2, vec![4, 7]));
        drafter.propose(&[3], 8, &[]);
        assert!(!drafter.wants_guesses() && drafter.draft(1) == [4], "made once for each token");
        assert_eq!(drafter.learn(&[4, 5, 6]), [(5, true), (2, false)]);
        drafter.propose(&[3, 4, 5, 6], 2, &[]);
        assert_eq!(drafter.draft(2), [7, 8]);
        (0..20).for_each(|_| drop((drafter.forget(), drafter.propose(&[3], 1, &[]), drafter.learn(&[4]))));
        drafter.propose(&[3], 1, &[]);
        assert!(!drafter.wants_guesses(), "the proposer has been right");
    }
}
