//! Turns that are left out in large steps. A step is decided before it is taken: when more than three quarters are full, so many of the
//! oldest turns are marked that one quarter remains. Then the rest is filled, and the marked turns go at the step, which leaves half.
//!
//! ```text
//!   turn   given        (eight fit)
//!     7    1234567      seven are more than three quarters: five of them will go
//!     8    12345678
//!     9         6789    ◄ the step
//! ```

use super::limits::Limits;

/// A history's position between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// The number of oldest turns that are not given.
    pub left_out: usize,
    /// The number that the next step will leave out, once it is decided and all turns have ended.
    pub ahead: Option<usize>,
}

/// Returns the steps of a history. `turns` are the tokens of each, the oldest first. The last one is always given.
pub fn steps(limits: Limits, turns: &[u64]) -> Steps {
    let (decides, stays) = (limits.quarters(3), limits.quarters(1));
    let (mut first, mut tokens, mut ahead) = (0, 0, None);
    // The number of oldest turns to drop so that those up to `end` are no more than what stays.
    let going = |mut first: usize, end: usize, mut tokens: u64| {
        while first < end && !stays.hold(end - first, tokens) {
            tokens -= turns[first];
            first += 1;
        }
        first
    };
    // The history is replayed turn by turn, since each step depends on the one before.
    for (last, turn) in turns.iter().enumerate() {
        if ahead.is_none() && !decides.hold(last - first, tokens) {
            ahead = Some(going(first, last, tokens));
        }
        if !limits.hold(last + 1 - first, tokens + turn) {
            let step = ahead.take().unwrap_or_else(|| going(first, last, tokens));
            tokens -= turns[first..step].iter().sum::<u64>();
            first = step;
            // A turn may be longer than the free room.
            while first < last && !limits.hold(last + 1 - first, tokens + turn) {
                tokens -= turns[first];
                first += 1;
            }
        }
        tokens += turn;
    }
    if ahead.is_none() && !decides.hold(turns.len() - first, tokens) {
        ahead = Some(going(first, turns.len(), tokens));
    }
    Steps { left_out: first, ahead: ahead.filter(|&ahead| ahead > first) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TURNS: Limits = Limits { turns: 8, tokens: 1_000_000 };

    #[test]
    fn a_step_is_decided_before_it_is_taken() {
        let at = |turns: usize| {
            let Steps { left_out, ahead } = steps(TURNS, &vec![10; turns]);
            (left_out, ahead)
        };
        assert_eq!([6, 7, 8, 9, 10].map(at), [(0, None), (0, Some(5)), (0, Some(5)), (5, None), (5, None)]);
        assert_eq!([12, 13, 14].map(at), [(5, Some(10)), (5, Some(10)), (10, None)]);
    }

    #[test]
    fn a_turn_that_fills_everything_at_once_makes_a_step_of_its_own() {
        let limits = Limits { turns: usize::MAX, tokens: 100 };
        assert_eq!(steps(limits, &[30, 30, 60]), Steps { left_out: 2, ahead: None });
        assert_eq!(steps(limits, &[30, 20, 20, 10]).ahead, Some(3));
        assert_eq!(steps(limits, &[30, 20, 20, 10, 95]), Steps { left_out: 4, ahead: Some(5) }, "more goes than was decided");
        assert_eq!(steps(limits, &[500]), Steps { left_out: 0, ahead: Some(1) });
        assert_eq!(steps(limits, &[]), Steps::default());
    }

    proptest! {
        #[test]
        fn what_was_decided_is_what_goes(turns in prop::collection::vec(1u64..40, 2..80), most in 4usize..20, tokens in 160u64..600) {
            let limits = Limits { turns: most, tokens };
            for count in 1..turns.len() {
                let (before, after) = (steps(limits, &turns[..count]), steps(limits, &turns[..count + 1]));
                if after.left_out > before.left_out {
                    // No turn is longer than a quarter, so every step is decided ahead.
                    prop_assert_eq!(Some(after.left_out), before.ahead);
                } else if let Some(ahead) = before.ahead {
                    prop_assert_eq!(after.ahead, Some(ahead), "it stays decided");
                }
            }
        }
    }
}
