//! Truncation of a long history: the model is given the newest turns. Which of the oldest are left out follows from the history alone, so
//! that no state has to be kept between requests.
//!
//! A prompt's KV is found again as far as the prompt starts with the same text. So leaving out one more turn each time ([`Slide`]) loses
//! all but the system prompt's KV with every turn. [`Steps`] leaves out half of what fits at once, and then no more until it is full:
//!
//! ```text
//!   turn   slide     steps    (four fit)
//!     4    1234      1234
//!     5     2345        45    ◄ a new beginning
//!     6      3456       456
//!     7       4567      4567
//!     8        5678        78 ◄
//! ```
//!
//! The turns that a step will leave out are known when three quarters are full ([`Steps::ahead`](steps::Steps::ahead)), so that a summary
//! of them can be ready when the step comes.
//!
//! - [`steps`]: where steps are taken; [`summary`]: summaries of the turns that are left out, and when they are used
//! - [`ranking`]: the old messages and facts that are relevant to a new message, by their words ([`bm25`]) and their meaning
//! - [`blocks`]: text that is put into prompts
//! - [`summing`]: the queue of summaries to make
//!
//! [`Slide`]: Strategy::Slide
//! [`Steps`]: Strategy::Steps

pub mod blocks;
pub mod bm25;
pub mod limits;
pub mod ranking;
pub mod steps;
pub mod summary;
pub mod summing;

use limits::Limits;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// All turns are given; a history that does not fit is an error.
    #[default]
    None,
    /// The newest turns are given, as many as fit.
    Slide,
    /// Once the turns do not fit any more, half of what would fit is given.
    Steps,
    /// Like [`Steps`](Self::Steps), with a summary in place of the turns that are left out.
    Summary,
}

/// Returns the number of oldest turns that are left out. `turns` are the tokens of each, the oldest first. The last one always stays.
pub fn left_out(strategy: Strategy, limits: Limits, turns: &[u64]) -> usize {
    match strategy {
        Strategy::None => 0,
        Strategy::Steps | Strategy::Summary => steps::steps(limits, turns).left_out,
        Strategy::Slide => {
            let (mut first, mut tokens) = (0, 0);
            for (last, turn) in turns.iter().enumerate() {
                tokens += turn;
                while first < last && !limits.hold(last + 1 - first, tokens) {
                    tokens -= turns[first];
                    first += 1;
                }
            }
            first
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Strategy, *};
    use proptest::prelude::*;

    const FOUR: Limits = Limits { turns: 4, tokens: 1_000 };

    fn each(strategy: Strategy, limits: Limits, turns: &[u64]) -> Vec<usize> {
        (1..=turns.len()).map(|count| left_out(strategy, limits, &turns[..count])).collect()
    }

    #[test]
    fn steps_are_large_and_rare() {
        let turns = [10; 9];
        assert_eq!(each(Strategy::None, FOUR, &turns), [0; 9]);
        assert_eq!(each(Strategy::Slide, FOUR, &turns), [0, 0, 0, 0, 1, 2, 3, 4, 5]);
        assert_eq!(each(Strategy::Steps, FOUR, &turns), [0, 0, 0, 0, 3, 3, 3, 6, 6]);
    }

    #[test]
    fn tokens_count_as_turns_do() {
        let limits = Limits { turns: usize::MAX, tokens: 100 };
        assert_eq!(each(Strategy::Steps, limits, &[40, 40, 40, 10, 60]), [0, 0, 2, 2, 3]);
        assert_eq!(each(Strategy::Slide, limits, &[40, 40, 40, 10, 60]), [0, 0, 1, 1, 3]);
        assert_eq!(left_out(Strategy::Steps, limits, &[10, 500]), 1, "the newest turn stays, whatever its size");
        assert_eq!(left_out(Strategy::Steps, limits, &[]), 0);
    }

    proptest! {
        #[test]
        fn what_is_given_fits_and_its_beginning_stays(
            turns in prop::collection::vec(0u64..60, 1..80),
            most in 1usize..20,
            tokens in 1u64..400,
        ) {
            let limits = Limits { turns: most, tokens };
            for strategy in [Strategy::Slide, Strategy::Steps] {
                let each = each(strategy, limits, &turns);
                for (last, &first) in each.iter().enumerate() {
                    prop_assert!(first <= last, "the newest turn is given");
                    let given = &turns[first..=last];
                    prop_assert!(given.len() == 1 || limits.hold(given.len(), given.iter().sum()), "what is given fits");
                    let before = if last == 0 { 0 } else { each[last - 1] };
                    prop_assert!(before <= first, "what was left out stays out");
                    if before < first {
                        let all = &turns[before..=last];
                        prop_assert!(!limits.hold(all.len(), all.iter().sum()), "nothing is left out that fits");
                    }
                }
            }
        }
    }
}
