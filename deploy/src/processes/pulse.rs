//! Detects a process whose event loop has stopped reporting heartbeats. Time is an argument.

use std::time::{Duration, Instant};

/// The silence after which an event loop counts as hung: a multiple of the longest pause seen on an overloaded machine.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(30);
/// The most silence that is counted between two checks. If more time has passed, this process itself was paused.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The heartbeats of one process.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    beats: u64,
    looked: Option<Instant>,
    silence: Duration,
}

impl Pulse {
    /// Takes the number of beats since the process started, and returns whether it has been silent for too long. A process that has not
    /// sent a beat yet is still starting.
    pub(super) fn is_lost(&mut self, now: Instant, beats: u64) -> bool {
        let passed = self.looked.replace(now).map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked));
        self.silence = if beats == self.beats { self.silence + passed.min(LOOK_MAX) } else { Duration::ZERO };
        self.beats = beats;
        beats > 0 && self.silence > SILENCE_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_beat_once_and_is_silent_is_lost_and_one_that_starts_is_not() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let (mut starting, mut beating, mut silent) = (Pulse::default(), Pulse::default(), Pulse::default());
        for s in 0..=30 {
            assert!(!starting.is_lost(at(s), 0) && !beating.is_lost(at(s), 1 + s) && !silent.is_lost(at(s), 1), "{s}");
        }
        assert!(silent.is_lost(at(31), 1));
        assert!(!silent.is_lost(at(32), 2), "it is back");
    }

    #[test]
    fn the_supervisors_own_pause_is_no_silence() {
        let start = Instant::now();
        let mut pulse = Pulse::default();
        assert!(!pulse.is_lost(start, 1));
        assert!(!pulse.is_lost(start + Duration::from_secs(3600), 1));
    }
}
