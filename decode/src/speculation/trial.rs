//! Whether steps with guesses yield more tokens per second than steps without, as measured on both.
//!
//! The rules of [`rows`](super::rows) and of the draft model estimate the cost of a guess. Estimates can stay wrong as long as each step
//! is like the one before, because nothing contradicts them then: rows beyond a kernel's tile cost more than those within it, and catching
//! up with prompts costs time that belongs to no row. So both kinds of step are tried now and then, and the one that yielded more is kept.
//! The longer it has won, the rarer the trials, and the less they cost.

/// The number of classes of steps, which are compared with steps of their own class: one sequence, two, up to 4, up to 8, and so on. The
/// last class has all others.
const CLASSES: usize = 8;
/// The share of a sum that is kept at the next step: about the last 30 steps count.
const KEPT: f64 = 0.97;
/// The steps of a trial with guesses and of one without. The former has more, because the yield of guesses varies.
const TRIAL_STEPS: (u32, u32) = (8, 2);
/// The fewest steps between two trials, as at first. Each trial that changes nothing doubles them.
const WAIT_MIN: u32 = 8;
/// The most steps between two trials.
const WAIT_MAX: u32 = 512;
/// The maximum while guesses win: a trial of plain steps costs little then, and the answers that a batch asks for may change.
const WAIT_OF_PLAIN_MAX: u32 = 64;
/// The factor by which the other kind of step must yield more to be preferred.
const LEAD: f64 = 1.02;

/// The trials of one worker.
#[derive(Debug, Default)]
pub(crate) struct Trials([Trial; CLASSES]);

/// The trials of steps with a similar number of sequences.
#[derive(Debug)]
struct Trial {
    guessing: Yield,
    plain: Yield,
    /// Whether steps with guesses have yielded more, as far as is known.
    guesses_win: bool,
    /// The remaining steps of the trial in progress.
    trial_left: u32,
    /// Steps until the next trial.
    wait_left: u32,
    wait: u32,
}

impl Default for Trial {
    fn default() -> Self {
        let (guessing, plain) = (Yield::default(), Yield::default());
        Self { guessing, plain, guesses_win: true, trial_left: 0, wait_left: WAIT_MIN, wait: WAIT_MIN }
    }
}

/// Tokens and milliseconds of the last steps of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Yield {
    tokens: f64,
    ms: f64,
}

impl Yield {
    fn note(&mut self, tokens: usize, ms: f64) {
        *self = Self { tokens: KEPT * self.tokens + tokens as f64, ms: KEPT * self.ms + ms };
    }

    /// Tokens per millisecond; `None` without such a step.
    fn rate(&self) -> Option<f64> {
        (self.ms > 0.0).then(|| self.tokens / self.ms)
    }
}

impl Trials {
    /// Whether the next step of this many sequences may have guesses.
    pub(crate) fn may_guess(&self, sequences: usize) -> bool {
        let trial = &self.0[class(sequences)];
        trial.guesses_win != (trial.trial_left > 0)
    }

    /// Notes that a step of this many sequences, with guesses or without, yielded `tokens` in `ms`.
    pub(crate) fn note(&mut self, sequences: usize, guessed: bool, tokens: usize, ms: f64) {
        self.0[class(sequences)].note(guessed, tokens, ms);
    }
}

impl Trial {
    fn note(&mut self, guessed: bool, tokens: usize, ms: f64) {
        let kind = if guessed { &mut self.guessing } else { &mut self.plain };
        kind.note(tokens, ms);
        if self.trial_left > 0 {
            self.trial_left -= 1;
            if self.trial_left == 0 {
                self.judge();
            }
            return;
        }
        self.wait_left -= 1;
        if self.wait_left == 0 {
            // An old yield of the other kind is no longer meaningful.
            let (guessing, plain) = TRIAL_STEPS;
            (self.trial_left, *self.other()) = (if self.guesses_win { plain } else { guessing }, Yield::default());
        }
    }

    /// The yield of the kind that has yielded less.
    fn other(&mut self) -> &mut Yield {
        if self.guesses_win { &mut self.plain } else { &mut self.guessing }
    }

    fn judge(&mut self) {
        let winner = if self.guesses_win { self.guessing } else { self.plain };
        let turns = winner.rate().zip(self.other().rate()).is_some_and(|(winner, other)| other > LEAD * winner);
        (self.guesses_win, self.wait) = if turns {
            (!self.guesses_win, WAIT_MIN)
        } else {
            (self.guesses_win, (2 * self.wait).min(if self.guesses_win { WAIT_OF_PLAIN_MAX } else { WAIT_MAX }))
        };
        self.wait_left = self.wait;
    }
}

fn class(sequences: usize) -> usize {
    (sequences.max(1).next_power_of_two().ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of 16 sequences. Returns milliseconds per token, and the share of steps with guesses.
    fn run(trials: &mut Trials, steps: usize, plain_ms: f64, guessing_ms: f64, right: usize) -> (f64, f64) {
        let (mut tokens, mut ms, mut guessed) = (0, 0.0, 0);
        for _ in 0..steps {
            let (brought, took) = if trials.may_guess(16) { (16 + right, guessing_ms) } else { (16, plain_ms) };
            trials.note(16, brought > 16, brought, took);
            (tokens, ms, guessed) = (tokens + brought, ms + took, guessed + usize::from(brought > 16));
        }
        (ms / tokens as f64, guessed as f64 / steps as f64)
    }

    #[test]
    fn guesses_that_cost_more_than_they_bring_are_hardly_made() {
        let mut trials = Trials::default();
        // Twice the time for 1.5 times the tokens.
        let (ms, share) = run(&mut trials, 5000, 90.0, 180.0, 8);
        assert!(ms / (90.0 / 16.0) < 1.03 && share < 0.05, "{ms} {share}");
        assert!(trials.may_guess(1) && trials.may_guess(8), "others have their own trials");
    }

    #[test]
    fn guesses_that_pay_are_made_nearly_always() {
        let (ms, share) = run(&mut Trials::default(), 5000, 90.0, 120.0, 16);
        assert!(ms / (120.0 / 32.0) < 1.03 && share > 0.95, "{ms} {share}");
    }

    #[test]
    fn what_changes_is_noticed() {
        let mut trials = Trials::default();
        run(&mut trials, 5000, 90.0, 180.0, 8);
        let (_, share) = run(&mut trials, 2000, 90.0, 100.0, 14);
        assert!(share > 0.7, "{share}");
        let (_, share) = run(&mut trials, 2000, 90.0, 180.0, 2);
        assert!(share < 0.5, "{share}");
    }

    #[test]
    fn without_proposals_all_steps_are_plain() {
        let mut trials = Trials::default();
        for _ in 0..1000 {
            trials.note(16, false, 16, 90.0);
        }
        assert!(trials.may_guess(16) || trials.0[class(16)].trial_left > 0);
    }
}
