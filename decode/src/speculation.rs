//! Speculation: a proposer guesses the tokens that follow, and one step verifies them. A step reads all weights whatever number of rows it
//! has, so rows that turn out right are tokens at a fraction of a step's time.
//!
//! ```text
//!   propose ──► how many pay ([`rows`]) ──► step of 1 + k rows: the sampler draws at each row, as long as the row before
//!      ▲                                    drew the token that was drafted ──► tokens ──► what the proposal was worth ──┐
//!      └──────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! No answer changes by it. A row has the same bits beside others (§5 of the architecture), and a draw depends on its row, the tokens before
//! it and (seed, position) alone. A token counts only if the sampler drew it; the proposal decides nothing but how many rows a step has.
//! This is speculative decoding (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023) where the
//! target's draw is known beforehand: its rule of acceptance becomes equality.
//!
//! - [`ngram`]: proposes what followed the last tokens before
//! - [`rows`]: how many drafted tokens a step has, and whose

pub mod ngram;
pub mod rows;

use std::fmt;
use tidemill_proto::block::Token;

/// Guesses the tokens that follow those of one sequence.
pub trait Proposer: fmt::Debug + Send {
    /// Appends up to `most` tokens that may follow `tokens`, all of the sequence's so far, to `proposal`. Those it saw before come first and
    /// are unchanged. Returns how strong the evidence is: the number of last tokens that it goes by.
    fn propose(&mut self, tokens: &[Token], most: usize, proposal: &mut Vec<Token>) -> usize;
}

/// How a worker speculates.
#[derive(Clone, Copy, Debug)]
pub struct Speculation {
    /// Makes a sequence's proposer.
    pub proposer: fn() -> Box<dyn Proposer>,
    /// Drafted tokens of one sequence in a step.
    pub draft_tokens_max: usize,
    /// Rows of a step with drafted tokens, at most: those of sequences that decode and the drafted ones together.
    pub rows_max: usize,
}

/// One sequence's proposer, what it proposes now, and what its proposals have been worth.
#[derive(Debug)]
pub(crate) struct Drafter {
    proposer: Box<dyn Proposer>,
    /// For the places after the last token.
    proposal: Vec<Token>,
    evidence: usize,
    acceptance: Acceptance,
}

impl Drafter {
    pub(crate) fn new(speculation: &Speculation) -> Self {
        Self { proposer: (speculation.proposer)(), proposal: Vec::new(), evidence: 0, acceptance: Acceptance::default() }
    }

    /// Proposes up to `most` tokens that may follow `tokens`, none of them in `ends`. Returns how likely each one is drawn if those before it
    /// are.
    pub(crate) fn propose(&mut self, tokens: &[Token], most: usize, ends: &[Token]) -> Vec<f64> {
        self.proposal.clear();
        self.evidence = if most > 0 { self.proposer.propose(tokens, most, &mut self.proposal) } else { 0 };
        // A draft stops before a stop token: no token after one is needed, and the stop token itself is drawn anyway.
        let end = self.proposal.iter().position(|token| ends.contains(token)).unwrap_or(self.proposal.len());
        self.proposal.truncate(end);
        (0..self.proposal.len()).map(|place| self.acceptance.of(self.evidence + place)).collect()
    }

    /// The first `len` tokens of the proposal.
    pub(crate) fn draft(&self, len: usize) -> &[Token] {
        &self.proposal[..len]
    }

    /// The sequence has drawn these tokens. All that they tell of the proposal is learnt, whether it was verified or not: so a proposer that
    /// was of no use costs nothing until it would be.
    pub(crate) fn learn(&mut self, drawn: impl Iterator<Item = Token>) {
        for (place, (&proposed, drawn)) in self.proposal.iter().zip(drawn).enumerate() {
            self.acceptance.note(self.evidence + place, proposed == drawn);
            if proposed != drawn {
                break;
            }
        }
        self.proposal.clear();
    }
}

/// Share of proposed tokens that were drawn, by the evidence for them: long repetitions go on more often than short ones.
#[derive(Clone, Copy, Debug)]
struct Acceptance([f64; CLASSES]);

/// Evidence of 0 to 1, 2 to 3, 4 to 7, 8 to 15 tokens, and more.
const CLASSES: usize = 5;
/// Share of the newest outcome in the moving averages.
const WEIGHT: f64 = 0.1;

impl Default for Acceptance {
    /// Only where a sequence begins: outcomes soon outweigh it.
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

    /// Proposes the numbers after the last one.
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
        Drafter::new(&Speculation { proposer: || Box::new(Counting), draft_tokens_max: 8, rows_max: 8 })
    }

    #[test]
    fn a_proposal_ends_before_the_sequence_would() {
        let mut drafter = drafter();
        assert_eq!(drafter.propose(&[3], 4, &[6, 5]).len(), 1);
        assert_eq!(drafter.draft(1), [4]);
        assert!(drafter.propose(&[3], 4, &[4]).is_empty());
        assert!(drafter.propose(&[3], 0, &[]).is_empty());
    }

    #[test]
    fn what_was_not_verified_teaches_as_much() {
        let mut drafter = drafter();
        let first = |drafter: &mut Drafter| drafter.propose(&[3], 8, &[])[0];
        let before = first(&mut drafter);
        drafter.learn([4].into_iter());
        let better = first(&mut drafter);
        assert!(better > before);
        drafter.learn([9].into_iter());
        assert!(first(&mut drafter) < better);
        // Longer evidence is of another class: the first four places and the next ones differ.
        drafter.learn([4, 5, 6, 7, 9, 9].into_iter());
        let likely = drafter.propose(&[3], 8, &[]);
        assert!(likely[0] > 0.6 && likely[4] < 0.7, "{likely:?}");
    }
}
