//! The order in which waiting sequences get their places.
//!
//! 1. Sequences that had a place before and lost it: their clients are already reading.
//! 2. The higher priority.
//! 3. At every [`OVERDUE_EVERY`]th place: sequences that were overtaken too often or have waited too long, the oldest first. So no sequence
//!    waits forever. Not at every place, since in an overload all would soon have waited too long, and the queue would serve only late ones.
//! 4. The tenant that was served least; among its sequences those that can be in time, and among these the one that is due first.

use std::{cmp::Ordering, time::Duration};

/// The number of sequences of the same or a lower priority that may overtake one.
pub(crate) const OVERTAKEN_MAX: u32 = 64;
/// The time in the queue after which a sequence is overdue.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// One of this many places goes to an overdue sequence.
pub(crate) const OVERDUE_EVERY: u64 = 4;

/// The sort key of a waiting sequence. The least goes first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// Whether a worker has just sent it back: it rests for a moment, in which the worker may find room.
    pub(crate) rests: bool,
    pub(crate) resumed: bool,
    pub(crate) priority: u8,
    pub(crate) overtaken: u32,
    pub(crate) waited: Duration,
    pub(crate) tenant: u64,
    /// The tokens served to its tenant.
    pub(crate) served: f64,
    pub(crate) due: Option<Duration>,
    /// Whether `due` has passed.
    pub(crate) late: bool,
    /// Its position by arrival.
    pub(crate) arrival: usize,
}

impl Turn {
    /// Whether it is overdue. At a place for overdue sequences it goes before others of its priority, and if it does not fit, none of them
    /// passes.
    pub(crate) fn is_overdue(&self) -> bool {
        self.overtaken >= OVERTAKEN_MAX || self.waited >= PATIENCE
    }

    /// Compares two turns. `overdue_first` holds for a place that is meant for overdue sequences.
    pub(crate) fn compare(&self, other: &Self, overdue_first: bool) -> Ordering {
        let favoured = |turn: &Self| turn.resumed || (overdue_first && turn.is_overdue());
        let urgent = |turn: &Self| (!turn.resumed, u8::MAX - turn.priority, !favoured(turn));
        urgent(self).cmp(&urgent(other)).then_with(|| {
            let by_arrival = self.arrival.cmp(&other.arrival);
            if favoured(self) {
                return by_arrival;
            }
            let due = |turn: &Self| (turn.late, turn.due.unwrap_or(Duration::MAX));
            self.served.total_cmp(&other.served).then(due(self).cmp(&due(other))).then(by_arrival)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of `priority / tenant's tokens / due in ms / overtaken / waited in s`, in order of arrival; `!` marks a sequence that had a
    /// place, and a negative due time is past. Then the order of places, and the order at a place for overdue sequences.
    #[test]
    fn sequences_go_by_priority_then_by_tenant_then_by_what_is_due_and_nobody_waits_forever() {
        let table = "
            1/0/900/0/0 1/0/300/0/0 1/0/-/0/0 1/0/600/0/0           | 1 3 0 2 | 1 3 0 2
            1/0/-5/0/0 1/0/300/0/0 1/0/-9/0/0 1/0/600/0/0           | 1 3 0 2 | 1 3 0 2
            0/0/1/0/0 1/0/-/0/0 2/0/-/0/0                           | 2 1 0   | 2 1 0
            1/500/100/0/0 1/20/900/0/0 1/500/50/0/0 1/20/800/0/0    | 3 1 2 0 | 3 1 2 0
            1/0/100/0/0 1/0/-/64/0 1/900/-/0/10                     | 0 1 2   | 1 2 0
            0/0/-/64/60 1/900/-/0/0                                 | 1 0     | 1 0
            2/0/1/0/0 !0/900/-/0/0 !1/0/-/0/0                       | 2 1 0   | 2 1 0
            1/0/-/0/0 1/0/-/0/0 1/0/-/0/0                           | 0 1 2   | 0 1 2
            ";
        for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let cells: Vec<&str> = row.split('|').collect();
            let [sequences, in_time, overdue] = cells[..] else { panic!("{row}") };
            let turn = |(arrival, item): (usize, &str)| {
                let (resumed, item) = item.strip_prefix('!').map_or((false, item), |item| (true, item));
                let cells: Vec<&str> = item.split('/').collect();
                let [priority, served, due, overtaken, waited] = cells[..] else { panic!("{item}") };
                Turn {
                    rests: false,
                    tenant: 0,
                    resumed,
                    priority: priority.parse().unwrap(),
                    served: served.parse().unwrap(),
                    due: due.parse().ok().map(|ms: i64| Duration::from_millis(ms.unsigned_abs())),
                    late: due.len() > 1 && due.starts_with('-'),
                    overtaken: overtaken.parse().unwrap(),
                    waited: Duration::from_secs(waited.parse().unwrap()),
                    arrival,
                }
            };
            let mut turns: Vec<Turn> = sequences.split_whitespace().enumerate().map(turn).collect();
            for (overdue_first, expected) in [(false, in_time), (true, overdue)] {
                turns.sort_by(|a, b| a.compare(b, overdue_first));
                let got: Vec<String> = turns.iter().map(|turn| turn.arrival.to_string()).collect();
                assert_eq!(got.join(" "), expected.trim(), "{row}");
            }
        }
    }
}
