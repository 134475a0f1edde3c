//! Targets of fuzzing, and the limits of one case.

use crate::dice::Dice;
use std::time::Duration;

pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Creates the subject, once per process.
    pub(crate) open: fn() -> anyhow::Result<Box<dyn Subject>>,
    /// The CPU time of one case in this process. Wall time may be [`WALL_FACTOR`] times as much.
    pub(crate) cpu_max: Duration,
    /// The bytes that one case may allocate in addition to those allocated before it.
    pub(crate) bytes_max: usize,
    /// The number of cases in the short form.
    pub(crate) short: u64,
}

/// The factor of wall time, as other work may keep the machine busy.
pub(crate) const WALL_FACTOR: u32 = 30;

/// A target that is ready for cases.
pub(crate) trait Subject {
    /// Runs the case that the dice determine. An error names the broken promise.
    fn case(&mut self, dice: &mut Dice) -> Result<(), String>;
}

impl<F: FnMut(&mut Dice) -> Result<(), String>> Subject for F {
    fn case(&mut self, dice: &mut Dice) -> Result<(), String> {
        self(dice)
    }
}
