//! The invariants of the scheduler between calls.

use super::{PUT_BLOCKS, Scheduler};

impl Scheduler {
    /// Checks all invariants. For tests.
    pub fn check_integrity(&self) {
        self.residency.check_integrity(self.jobs.values().map(|job| &job.kv));
        for job in self.jobs.values() {
            job.check_integrity(self.residency.states());
        }
        self.shares.check_integrity(self.jobs.values().map(|job| &job.order.urgency));
        self.pace.check_integrity();
        assert!(self.running() <= self.limits.admitted_max);
        let states = self.jobs.len() * self.residency.states().blocks;
        assert!(self.putting < self.limits.putting_max + PUT_BLOCKS + states);
        assert!(self.jobs.values().map(|job| job.putting).sum::<usize>() <= self.putting);
    }
}
