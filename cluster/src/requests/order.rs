//! Which of the waiting sequences goes next.
//!
//! 1. Those that had a place before and lost it: their clients are reading already.
//! 2. The higher priority.
//! 3. Those that others have overtaken too often, or that have waited too long, the oldest first: nobody waits forever.
//! 4. The tenant that was served least, and of its sequences the one that is due first.

use std::{cmp::Ordering, time::Duration};

/// Sequences of the same priority or a lower one that may go before one that came earlier.
pub(crate) const OVERTAKEN_MAX: u32 = 64;
/// After this long in the queue it is its turn, as far as its priority goes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

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
    /// Its place by arrival.
    pub(crate) arrival: usize,
}

impl Turn {
    /// It goes before the others of its priority, and none of them passes if it does not fit.
    pub(crate) fn is_overdue(&self) -> bool {
        self.overtaken >= OVERTAKEN_MAX || self.waited >= PATIENCE
    }

    pub(crate) fn compare(&self, other: &Self) -> Ordering {
        let urgent = |turn: &Self| (!turn.resumed, u8::MAX - turn.priority, !turn.is_overdue());
        urgent(self).cmp(&urgent(other)).then_with(|| {
            let by_arrival = self.arrival.cmp(&other.arrival);
            if self.resumed || self.is_overdue() {
                return by_arrival;
            }
            let due = |turn: &Self| turn.due.unwrap_or(Duration::MAX);
            self.served.total_cmp(&other.served).then(due(self).cmp(&due(other))).then(by_arrival)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of `priority / tenant's tokens / due in ms / overtaken / waited in s`, in the order in which they came; `!` for one that
    /// had a place. Then the order in which they go.
    #[test]
    fn sequences_go_by_priority_then_by_tenant_then_by_what_is_due_and_nobody_waits_forever() {
        let table = "
            1/0/900/0/0 1/0/300/0/0 1/0/-/0/0 1/0/600/0/0           | 1 3 0 2
            0/0/1/0/0 1/0/-/0/0 2/0/-/0/0                           | 2 1 0
            1/500/100/0/0 1/20/900/0/0 1/500/50/0/0 1/20/800/0/0    | 3 1 2 0
            1/0/100/0/0 1/0/-/64/0 1/900/-/0/10                     | 1 2 0
            0/0/-/64/60 1/900/-/0/0                                 | 1 0
            2/0/1/0/0 !0/900/-/0/0 !1/0/-/0/0                       | 2 1 0
            1/0/-/0/0 1/0/-/0/0 1/0/-/0/0                           | 0 1 2
            ";
        for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let (sequences, expected) = row.split_once('|').unwrap();
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
                    due: due.parse().ok().map(Duration::from_millis),
                    overtaken: overtaken.parse().unwrap(),
                    waited: Duration::from_secs(waited.parse().unwrap()),
                    arrival,
                }
            };
            let mut turns: Vec<Turn> = sequences.split_whitespace().enumerate().map(turn).collect();
            turns.sort_by(Turn::compare);
            let got: Vec<String> = turns.iter().map(|turn| turn.arrival.to_string()).collect();
            assert_eq!(got.join(" "), expected.trim(), "{row}");
        }
    }
}
