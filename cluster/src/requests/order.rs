//! Which of the waiting sequences goes next.
//!
//! 1. Those that had a place before and lost it: their clients are reading already.
//! 2. The higher priority.
//! 3. At every [`OVERDUE_EVERY`]th place: those that others have overtaken too often, or that have waited too long, the oldest first.
//!    So nobody waits forever. It is not so at every place, since in an overload everyone would soon have waited too long, and the
//!    queue would serve late ones only.
//! 4. The tenant that was served least; of its sequences those that can be in time, and of these the one that is due first.

use std::{cmp::Ordering, time::Duration};

/// Sequences of the same priority or a lower one that may go before one that came earlier.
pub(crate) const OVERTAKEN_MAX: u32 = 64;
/// After this long in the queue a sequence is overdue.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Places of which one goes to a sequence that is overdue.
pub(crate) const OVERDUE_EVERY: u64 = 4;

/// What decides about one waiting sequence. The least goes first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// A worker that sent it back gets a moment to find room.
    pub(crate) rests: bool,
    pub(crate) resumed: bool,
    pub(crate) priority: u8,
    pub(crate) overtaken: u32,
    pub(crate) waited: Duration,
    pub(crate) tenant: u64,
    /// Tokens that its tenant was served.
    pub(crate) served: f64,
    pub(crate) due: Option<Duration>,
    /// That moment has passed.
    pub(crate) late: bool,
    /// Its place by arrival.
    pub(crate) arrival: usize,
}

impl Turn {
    /// At its place, it goes before the others of its priority, and none of them passes if it does not fit.
    pub(crate) fn is_overdue(&self) -> bool {
        self.overtaken >= OVERTAKEN_MAX || self.waited >= PATIENCE
    }

    /// `overdue_first`: the place is one for those.
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

    /// Rows of `priority / tenant's tokens / due in ms / overtaken / waited in s`, in the order in which they came; `!` for one that
    /// had a place, and negative for what was due before. Then the order in which they go, and at a place for the overdue.
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
