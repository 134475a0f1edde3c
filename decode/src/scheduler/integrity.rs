//! The invariants of the scheduler between calls.

use super::Scheduler;

impl Scheduler {
    /// Checks all invariants. For tests.
    pub fn check_integrity(&self) {
        self.residency.check_integrity(self.sequences.values().map(|state| &state.kv));
        for (id, state) in &self.sequences {
            let listed = (self.waiting.contains(id), self.admitted.contains(id));
            assert_eq!(listed, (!state.kv.is_admitted(), state.kv.is_admitted()), "in one list");
            if state.kv.is_admitted() {
                assert!(state.kv.table().len() >= state.blocks_needed() - 1, "only the newest token may still lack its block");
            }
            assert!(state.remaining() > 0, "a live sequence has a token to compute");
        }
        self.shares.check_integrity(self.sequences.values().map(|state| &state.job.urgency));
        self.pace.check_integrity();
        self.draft_model.iter().for_each(|model| model.check_integrity(|job| self.admitted.contains(&job)));
        assert_eq!(self.waiting.len() + self.admitted.len(), self.sequences.len());
        assert!(self.admitted.len() <= self.limits.sequences_max);
    }
}
