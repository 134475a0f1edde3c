//! What is fuzzed, and the limits of one case.

use crate::dice::Dice;
use std::time::Duration;

pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Made once in a process.
    pub(crate) open: fn() -> anyhow::Result<Box<dyn Subject>>,
    /// CPU time of one case, of this process. Wall time may be [`WALL_FACTOR`] times as much.
    pub(crate) cpu_max: Duration,
    /// Bytes that one case may allocate beyond what was there before it.
    pub(crate) bytes_max: usize,
    /// Cases of the short form.
    pub(crate) short: u64,
}

/// Other work may keep the machine busy.
pub(crate) const WALL_FACTOR: u32 = 30;

/// A target that is ready for cases.
pub(crate) trait Subject {
    /// Runs the case that the dice make. An error says which promise it broke.
    fn case(&mut self, dice: &mut Dice) -> Result<(), String>;
}

impl<F: FnMut(&mut Dice) -> Result<(), String>> Subject for F {
    fn case(&mut self, dice: &mut Dice) -> Result<(), String> {
        self(dice)
    }
}
