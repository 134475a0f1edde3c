//! `tidemill up --autoscale`: as many workers as the coordinators want. A new worker is a separate process; one that is given up drains and
//! ends by itself, and keeps its place until then.

use std::time::{Duration, Instant};

/// The fewest and the most workers of each model, by role.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ranges {
    pub prefill: (usize, usize),
    pub decode: (usize, usize),
}

/// Parses the numbers of `prefill=1..4,decode=1..4`. The coordinator parses the rest.
pub(super) fn parse_ranges(text: &str) -> Result<Ranges, String> {
    let range = |role: &str| {
        let found = text.split(',').find_map(|part| part.trim().strip_prefix(role)?.strip_prefix('='));
        let bounds = found.and_then(|range| range.split_once(".."));
        let bounds = bounds.and_then(|(floor, ceiling)| Some((floor.trim().parse::<usize>().ok()?, ceiling.trim().parse::<usize>().ok()?)));
        bounds.filter(|(floor, ceiling)| floor <= ceiling).ok_or_else(|| format!("write {role}=1..4 for one to four {role} workers"))
    };
    Ok(Ranges { prefill: range("prefill")?, decode: range("decode")? })
}

/// The workers of one role and model: their places, whether occupied or not.
#[derive(Debug)]
pub(super) struct Fleet {
    pub model: String,
    pub role: &'static str,
    /// The flags with which each of them is started.
    pub flags: Vec<String>,
    /// The number of processes of each worker.
    pub stages: usize,
    /// The flags for each process's share of the machine, those of a place's stages one after the other.
    pub shares: Vec<Vec<String>>,
    /// The number of the first place; the others follow.
    pub first: usize,
    /// The time until which a worker that ended by itself is not replaced.
    pub rests_until: Option<Instant>,
}

/// The time without replacements after a worker has ended unexpectedly.
pub(super) const REST: Duration = Duration::from_secs(60);

/// A change of a fleet, by the numbers of its workers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Change {
    pub start: Vec<usize>,
    pub dismiss: Vec<usize>,
}

/// The words between a worker's name and the number of a later stage.
const STAGE: &str = "-stage-";

/// Whether a process with this name holds a later stage of `worker`.
pub(super) fn is_stage_of(name: &str, worker: &str) -> bool {
    name.split_once(STAGE).is_some_and(|(head, _)| head == worker)
}

impl Fleet {
    pub(super) fn name(&self, number: usize) -> String {
        format!("{}-{number}", self.role)
    }

    /// The name of the process with a worker's later stage, counted from 0 for the head.
    pub(super) fn stage_name(&self, number: usize, stage: usize) -> String {
        format!("{}{STAGE}{}", self.name(number), stage + 1)
    }

    /// The flags for the share of a worker's stage.
    pub(super) fn share(&self, number: usize, stage: usize) -> &[String] {
        &self.shares[(number - self.first) * self.stages + stage]
    }

    pub(super) fn numbers(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.shares.len() / self.stages
    }

    /// The change that is needed: `running` workers are there and stay, `leaving` ones still occupy their places.
    pub(super) fn change(&self, now: Instant, wanted: usize, running: &[usize], leaving: &[usize]) -> Change {
        let wanted = wanted.min(self.numbers().len());
        let rests = self.rests_until.is_some_and(|until| now < until);
        let more = if rests { 0 } else { wanted.saturating_sub(running.len()) };
        let free = self.numbers().filter(|number| !running.contains(number) && !leaving.contains(number));
        let mut newest = running.to_vec();
        newest.sort_unstable_by(|a, b| b.cmp(a));
        newest.truncate(running.len().saturating_sub(wanted));
        Change { start: free.take(more).collect(), dismiss: newest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_and_what_is_missing_is_named() {
        let ranges = Ranges { prefill: (0, 2), decode: (1, 4) };
        assert_eq!(parse_ranges("decode=1..4, prefill=0..2,cooldown_s=10"), Ok(ranges));
        for (text, words) in
            [("decode=1..4", "prefill=1..4"), ("prefill=1..4,decode=4", "decode=1..4"), ("prefill=4..1,decode=1..1", "prefill")]
        {
            assert!(parse_ranges(text).unwrap_err().contains(words), "{text}");
        }
    }

    #[test]
    fn the_newest_leave_and_no_place_has_two() {
        let mut fleet = Fleet {
            model: "m".into(),
            role: "decode",
            flags: Vec::new(),
            stages: 2,
            shares: vec![Vec::new(); 8],
            first: 4,
            rests_until: None,
        };
        assert_eq!(fleet.stage_name(5, 1), "decode-5-stage-2");
        assert!(
            is_stage_of("decode-5-stage-2", "decode-5")
                && !is_stage_of("decode-5-stage-2", "decode-51")
                && !is_stage_of("decode-5", "decode-5")
        );
        let now = Instant::now();
        let change = |fleet: &Fleet, wanted, running: &[usize], leaving: &[usize]| {
            let Change { start, dismiss } = fleet.change(now, wanted, running, leaving);
            (start, dismiss)
        };
        assert_eq!(change(&fleet, 2, &[4], &[]), (vec![5], vec![]));
        assert_eq!(change(&fleet, 9, &[4], &[5]), (vec![6, 7], vec![]), "a leaving one has its place");
        assert_eq!(change(&fleet, 1, &[4, 5, 6], &[]), (vec![], vec![6, 5]));
        assert_eq!(change(&fleet, 2, &[5, 4], &[7]), (vec![], vec![]));
        fleet.rests_until = Some(now + REST);
        assert_eq!(change(&fleet, 4, &[4, 5], &[]), (vec![], vec![]), "what ends by itself is not started again at once");
        assert_eq!(change(&fleet, 1, &[4, 5], &[]), (vec![], vec![5]));
    }
}
