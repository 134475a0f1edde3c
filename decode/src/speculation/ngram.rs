//! Prompt look-up: proposes the tokens that followed an earlier occurrence of the last tokens, in the prompt or in the answer.
//!
//! Answers that repeat their input (code that is edited, documents that are quoted, a tool's result) are copied at one step per draft. No
//! second model is needed. Source: Saxena, "Prompt Lookup Decoding" (2023); the index is that of LZ77 compressors: a table from hashes of n
//! tokens to their last occurrence, one entry per slot, compared with the tokens themselves when it is read.

use super::Proposer;
use tidemill_proto::block::Token;

/// The lengths of the runs that are looked up, the longest first.
const LENGTHS: [usize; 2] = [5, 2];
/// The longest match that is counted; a longer one is no stronger evidence.
const EVIDENCE_MAX: usize = 16;
/// The most slots of a table: 512 KiB for each length.
const SLOTS_MAX: usize = 1 << 17;
const SLOTS_MIN: usize = 1 << 8;

#[derive(Debug)]
pub struct Ngram {
    tables: [Table; LENGTHS.len()],
}

impl Ngram {
    pub fn boxed() -> Box<dyn Proposer> {
        Box::new(Self { tables: LENGTHS.map(Table::new) })
    }
}

impl Proposer for Ngram {
    fn propose(&mut self, tokens: &[Token], most: usize, proposal: &mut Vec<Token>) -> usize {
        let Some(next) = self.tables.each_mut().into_iter().filter_map(|table| table.find(tokens)).next() else { return 0 };
        let first = proposal.len();
        for place in 0..most {
            // A repetition with a short period runs past the end of the tokens and continues in the proposal itself.
            let token = tokens.get(next + place).or_else(|| proposal.get(first + next + place - tokens.len()));
            proposal.extend(token.copied());
        }
        let same = tokens[..next].iter().rev().zip(tokens.iter().rev()).take(EVIDENCE_MAX);
        same.take_while(|(earlier, last)| earlier == last).count()
    }
}

/// The last ends of runs of `length` tokens.
#[derive(Debug)]
struct Table {
    length: usize,
    /// The index of the token after the run, or 0 for an empty slot. The number of slots is a power of two.
    slots: Vec<u32>,
    /// The index before which all runs that end are in the table.
    indexed: usize,
}

impl Table {
    fn new(length: usize) -> Self {
        Self { length, slots: Vec::new(), indexed: 0 }
    }

    /// The index after the latest earlier occurrence of the last tokens. Adds new runs to the table.
    fn find(&mut self, tokens: &[Token]) -> Option<usize> {
        if tokens.len() <= self.length {
            return None;
        }
        let wanted = (2 * tokens.len()).next_power_of_two().clamp(SLOTS_MIN, SLOTS_MAX);
        if self.slots.len() < wanted {
            (self.slots, self.indexed) = (vec![0; wanted], 0);
        }
        // No token follows the last run yet.
        for next in self.indexed.max(self.length)..tokens.len() {
            let slot = self.slot(&tokens[next - self.length..next]);
            self.slots[slot] = next as u32;
        }
        self.indexed = tokens.len();
        let last = &tokens[tokens.len() - self.length..];
        let next = self.slots[self.slot(last)] as usize;
        (next > 0 && tokens[next - self.length..next] == *last).then_some(next)
    }

    /// FNV-1a over the ids, its upper bits folded in.
    fn slot(&self, run: &[Token]) -> usize {
        let hash = run.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &token| (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3));
        (hash ^ (hash >> 32)) as usize & (self.slots.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn propose(proposer: &mut dyn Proposer, tokens: &[Token], most: usize) -> (Vec<Token>, usize) {
        let mut proposal = Vec::new();
        let evidence = proposer.propose(tokens, most, &mut proposal);
        (proposal, evidence)
    }

    #[test]
    fn what_followed_before_is_proposed_again() {
        let mut ngram = Ngram::boxed();
        assert_eq!(propose(&mut *ngram, &[1, 2, 3, 4, 1], 3), (vec![], 0));
        assert_eq!(propose(&mut *ngram, &[1, 2, 3, 4, 1, 2], 3), (vec![3, 4, 1], 2), "the latest tokens are part of it");
        assert_eq!(propose(&mut *ngram, &[1, 2, 3, 4, 1, 2, 9, 1, 2], 1), (vec![9], 2), "the latest occurrence counts");
        let longer = [7, 1, 2, 3, 4, 5, 8, 9, 4, 5, 6, 6, 1, 2, 3, 4, 5];
        assert_eq!(propose(&mut *Ngram::boxed(), &longer, 2), (vec![8, 9], 5), "a longer match goes before a later one");
    }

    #[test]
    fn a_short_period_goes_on() {
        assert_eq!(propose(&mut *Ngram::boxed(), &[5, 6, 5, 6, 5, 6], 5), (vec![5, 6, 5, 6, 5], 4));
        assert_eq!(propose(&mut *Ngram::boxed(), &[8; 40], 3), (vec![8; 3], EVIDENCE_MAX));
        assert_eq!(propose(&mut *Ngram::boxed(), &[8], 3), (vec![], 0));
    }

    proptest! {
        /// Compares with a scan, token by token, in a sequence long enough for tables to grow.
        #[test]
        fn the_index_finds_what_a_scan_finds(tokens in prop::collection::vec(0u32..12, 1..700), step in 1usize..9) {
            let mut ngram = Ngram::boxed();
            for len in (1..=tokens.len()).step_by(step) {
                let tokens = &tokens[..len];
                let scan = |length: usize| {
                    (length..len).rev().find(|&next| len > length && tokens[next - length..next] == tokens[len - length..])
                };
                let (proposal, evidence) = propose(&mut *ngram, tokens, 4);
                let Some(next) = scan(2) else {
                    prop_assert_eq!((proposal, evidence), (vec![], 0));
                    continue;
                };
                // A match whose slot another run has taken is not found.
                prop_assert!(proposal.is_empty() || proposal.len() == 4);
                if !proposal.is_empty() {
                    prop_assert!(evidence >= 2);
                    let follows = |next: usize| proposal[0] == tokens[next];
                    prop_assert!(follows(next) || scan(5).is_some_and(follows));
                }
            }
        }
    }
}
