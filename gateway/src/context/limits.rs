//! The part of a dialog that fits.

/// The turns and tokens that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub turns: usize,
    /// The maximum number of tokens of all turns that are given.
    pub tokens: u64,
}

impl Limits {
    pub(super) fn hold(self, turns: usize, tokens: u64) -> bool {
        turns <= self.turns && tokens <= self.tokens
    }

    /// Returns this many quarters of both limits.
    pub(super) fn quarters(self, quarters: u64) -> Self {
        let part = |whole: u64| whole / 4 * quarters + whole % 4 * quarters / 4;
        Self { turns: part(self.turns as u64) as usize, tokens: part(self.tokens) }
    }
}
