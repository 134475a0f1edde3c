//! The accuracy of a draft model's guesses, by the probability that the model itself gave them.

use super::WEIGHT;

/// Upper ends of all classes but the last.
const PROBABILITIES: [f32; CLASSES - 1] = [0.3, 0.5, 0.7, 0.85, 0.95];
const CLASSES: usize = 6;

/// The share of guesses that were drawn, by class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confidence {
    by_class: [f64; CLASSES],
    all: f64,
}

impl Default for Confidence {
    /// The shares at a worker's start, which outcomes soon outweigh.
    fn default() -> Self {
        Self { by_class: [0.2, 0.4, 0.55, 0.7, 0.85, 0.95], all: 0.6 }
    }
}

impl Confidence {
    /// The class of a guess with this log-probability.
    pub(crate) fn class(logprob: f32) -> usize {
        let probability = logprob.exp();
        PROBABILITIES.iter().filter(|&&end| probability >= end).count()
    }

    /// The probability that a guess of this class is right.
    pub(crate) fn of(&self, class: usize) -> f64 {
        self.by_class[class]
    }

    /// The probability that the next guess is right, before it is made.
    pub(crate) fn next(&self) -> f64 {
        self.all
    }

    pub(crate) fn note(&mut self, class: usize, drawn: bool) {
        for share in [&mut self.by_class[class], &mut self.all] {
            *share += WEIGHT * (f64::from(u8::from(drawn)) - *share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_is_sure_of_is_trusted_until_it_is_wrong() {
        let mut confidence = Confidence::default();
        let (low, high) = (Confidence::class(0.1_f32.ln()), Confidence::class(0.99_f32.ln()));
        assert_eq!((low, high, Confidence::class(f32::NAN)), (0, CLASSES - 1, 0));
        assert!(confidence.of(low) < confidence.next() && confidence.next() < confidence.of(high));
        (0..50).for_each(|_| confidence.note(high, false));
        assert!(confidence.of(high) < 0.1 && confidence.next() < 0.1 && confidence.of(low) == Confidence::default().of(low));
    }
}
