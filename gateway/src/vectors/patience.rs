//! Requests wait for the encoder only while it answers in time.
//!
//! A request waits for its question's vector until a deadline. The first that waits in vain ends the waiting for all: for a pause, no question
//! is read. After it one question is read whose request does not wait. If it is read in time, requests wait again; if not, the pause is twice
//! as long.

use std::time::Duration;

/// The first pause after a question that was not read in time.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The fate of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Its request waits until it is read.
    Awaited,
    /// It is read to see whether the encoder is in time again. Its request does not wait.
    Trial,
    /// It is not read.
    Skipped,
}

/// The trust in an encoder to answer in time.
#[derive(Debug, Default)]
pub struct Patience {
    pause: Option<Pause>,
}

#[derive(Debug)]
struct Pause {
    length: Duration,
    ends: Duration,
    /// Whether a question is being read for trial.
    tries: bool,
}

impl Patience {
    pub fn ask(&mut self, now: Duration) -> Reading {
        match &mut self.pause {
            None => Reading::Awaited,
            Some(pause) if pause.tries || now < pause.ends => Reading::Skipped,
            Some(pause) => {
                pause.tries = true;
                Reading::Trial
            }
        }
    }

    /// Takes the outcome of a question that was read.
    pub fn settle(&mut self, reading: Reading, in_time: bool, now: Duration) {
        match (&self.pause, reading) {
            (Some(_), Reading::Trial) if in_time => self.pause = None,
            (Some(pause), Reading::Trial) => self.pause_for((pause.length * 2).min(PAUSE_MAX), now),
            // Others that waited at the same time say nothing new.
            (None, Reading::Awaited) if !in_time => self.pause_for(PAUSE_MIN, now),
            _ => {}
        }
    }

    /// Whether requests wait for the encoder at present.
    pub fn is_in_time(&self) -> bool {
        self.pause.is_none()
    }

    fn pause_for(&mut self, length: Duration, now: Duration) {
        self.pause = Some(Pause { length, ends: now + length, tries: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn one_request_in_vain_ends_the_waiting_for_all() {
        let mut patience = Patience::default();
        assert_eq!([patience.ask(at(0)), patience.ask(at(0))], [Reading::Awaited; 2]);
        patience.settle(Reading::Awaited, true, at(10));
        assert_eq!(patience.ask(at(10)), Reading::Awaited);
        assert!(patience.is_in_time());
        patience.settle(Reading::Awaited, false, at(100));
        assert!(!patience.is_in_time());
        patience.settle(Reading::Awaited, false, at(101));
        assert_eq!(patience.ask(at(1099)), Reading::Skipped);
        assert_eq!([patience.ask(at(1100)), patience.ask(at(1100))], [Reading::Trial, Reading::Skipped], "one at a time");
        patience.settle(Reading::Trial, false, at(1200));
        assert_eq!([patience.ask(at(3199)), patience.ask(at(3200))], [Reading::Skipped, Reading::Trial], "twice as long");
        patience.settle(Reading::Trial, true, at(3210));
        assert_eq!(patience.ask(at(3210)), Reading::Awaited);
    }

    #[test]
    fn a_pause_has_a_longest() {
        let (mut patience, mut now) = (Patience::default(), Duration::ZERO);
        patience.settle(Reading::Awaited, false, now);
        for _ in 0..20 {
            now += PAUSE_MAX;
            assert_eq!(patience.ask(now), Reading::Trial);
            patience.settle(Reading::Trial, false, now);
        }
        assert_eq!(patience.ask(now + PAUSE_MAX), Reading::Trial);
    }

    #[test]
    fn a_late_answer_from_before_the_pause_does_not_end_it() {
        let mut patience = Patience::default();
        patience.settle(Reading::Awaited, false, at(0));
        patience.settle(Reading::Awaited, true, at(1));
        assert_eq!(patience.ask(at(2)), Reading::Skipped);
    }
}
