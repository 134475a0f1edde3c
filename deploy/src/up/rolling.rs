//! A rolling restart: one process after another drains, ends and is restarted, so that clients notice nothing.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// A rolling restart's state: the names of the processes that are still to be restarted, and the one being restarted.
#[derive(Debug, Default)]
pub(super) struct Rolling {
    left: VecDeque<String>,
    /// The process being restarted.
    now: Option<Turn>,
}

#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub name: String,
    pub old_pid: u32,
    began: Instant,
}

impl Rolling {
    /// Starts a restart of all these processes, in this order. Replaces what an earlier call has left to do.
    pub(super) fn begin(&mut self, names: impl IntoIterator<Item = String>) {
        self.left = names.into_iter().collect();
    }

    /// The process being restarted.
    pub(super) fn turn(&self) -> Option<&Turn> {
        self.now.as_ref()
    }

    /// Takes the next name, if no process is being restarted. The caller asks that process to end, and calls [`started`](Self::started).
    pub(super) fn next(&mut self) -> Option<String> {
        if self.now.is_some() { None } else { self.left.pop_front() }
    }

    pub(super) fn started(&mut self, name: String, old_pid: u32, now: Instant) {
        self.now = Some(Turn { name, old_pid, began: now });
    }

    /// Records that the new process serves. Returns whether it was the last one.
    pub(super) fn done(&mut self) -> bool {
        self.now = None;
        self.left.is_empty()
    }

    /// Cancels the rolling restart if a process has not come back in time, and returns its name. The others stay as they are.
    pub(super) fn overdue(&mut self, now: Instant, within: Duration) -> Option<String> {
        let turn = self.now.take_if(|turn| now.duration_since(turn.began) > within)?;
        self.left.clear();
        Some(turn.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_after_the_other_and_no_further_than_one_that_does_not_come_back() {
        let (start, within) = (Instant::now(), Duration::from_secs(10));
        let mut rolling = Rolling::default();
        rolling.begin(["a", "b", "c"].map(str::to_owned));
        let first = rolling.next().unwrap();
        rolling.started(first, 1, start);
        assert_eq!(rolling.next(), None, "one at a time");
        assert!(!rolling.done());
        let second = rolling.next().unwrap();
        assert_eq!(second, "b");
        rolling.started(second, 2, start);
        assert_eq!(rolling.overdue(start + within, within), None);
        assert_eq!(rolling.overdue(start + within + Duration::from_millis(1), within), Some("b".into()));
        assert_eq!((rolling.next(), rolling.turn().is_none()), (None, true), "c is left alone");
    }
}
