//! Workers that computed wrongly, found by [`probes`](crate::probes), by another coordinator, or by an operator. They get no more work, and
//! sequences that are placed from then on read no block that was computed before: see [`Era`]. An operator's reset of the cache ends an era
//! as well.

use crate::{Cluster, Warning};
use std::{collections::BTreeSet, time::Duration};
use tidemill_proto::{block::Era, ids::Epoch, message::Role};

/// The number of workers remembered: they may register again after a lost link.
const KNOWN_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Distrusted {
    /// The most recent ones.
    workers: BTreeSet<Epoch>,
    /// The number of the operator's newest reset of the cache; 0 without one.
    reset: u64,
    era: Era,
}

impl Distrusted {
    pub(crate) fn contains(&self, worker: Epoch) -> bool {
        self.workers.contains(&worker)
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = Epoch> {
        self.workers.iter().copied()
    }

    pub(crate) fn era(&self) -> Era {
        self.era
    }

    fn add(&mut self, worker: Epoch) {
        if self.workers.insert(worker) {
            if self.workers.len() > KNOWN_MAX {
                self.workers.pop_first();
            }
            self.begin_era();
        }
    }

    fn begin_era(&mut self) {
        self.era = Era::after(self.workers()).reset(self.reset);
    }
}

impl Cluster {
    /// Takes the worker out of service: it gets no new work, and its sequences move to other workers, even if it is not a member now and
    /// returns later. Sequences that move or have no place yet begin a new era. Sequences on other workers continue with the blocks that
    /// they have read.
    pub fn distrust(&mut self, now: Duration, worker: Epoch) {
        self.distrusted.add(worker);
        let Some(member) = self.membership.distrust(worker) else { return };
        let (name, role) = (member.name.clone(), member.role());
        self.warn(Warning::Unhealthy { worker, name });
        self.load.touch(worker);
        self.members_changed(now);
        match role {
            Role::Decode => self.leave_decode_worker(now, worker),
            Role::Prefill => self.leave_prefill_worker(now, worker),
            Role::Kvpool => {}
        }
        self.place_queued(now);
    }

    /// Ends the era at an operator's wish: sequences that move or have no place yet read no block of before, and neither does a cached answer
    /// count. The coordinators agree on `number`, which differs from reset to reset; 0 takes all resets back.
    pub fn reset_cache(&mut self, number: u64) {
        if std::mem::replace(&mut self.distrusted.reset, number) != number {
            self.distrusted.begin_era();
        }
    }

    /// All workers that computed wrongly, in ascending order.
    pub fn distrusted(&self) -> impl Iterator<Item = Epoch> {
        self.distrusted.workers()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Action,
        membership::tests::{engine, model, register},
        tests::{request, settings},
    };
    use tidemill_proto::{
        frame::Version,
        ids::RequestId,
        message::{DecodeJob, PrefillJob, RoleInfo, ToWorker},
    };

    const NOW: Duration = Duration::from_secs(1000);

    type Sent<Job> = Vec<(Epoch, Job)>;

    fn sent(cluster: &mut Cluster) -> (Sent<PrefillJob>, Sent<DecodeJob>) {
        cluster.check_integrity();
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        while let Some(action) = cluster.poll_action() {
            match action {
                Action::Send { worker, message: ToWorker::Prefill(job) } => prefill.push((worker, job)),
                Action::Send { worker, message: ToWorker::Decode(job) } => decode.push((worker, job)),
                _ => {}
            }
        }
        (prefill, decode)
    }

    /// A pool node, two prefill workers and a decode worker.
    fn cluster() -> (Cluster, [Epoch; 2]) {
        let mut cluster = Cluster::new(settings(), model());
        let mut join = |name: &str, role| cluster.register(NOW, register(name, role)).unwrap();
        join("k", RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() });
        let prefill = ["p", "q"].map(|name| join(name, RoleInfo::Prefill(engine(1))));
        join("d", RoleInfo::Decode(engine(1)));
        (cluster, prefill)
    }

    #[test]
    fn what_waits_for_a_bad_workers_blocks_begins_anew_under_another_salt() {
        let (mut cluster, prefill) = cluster();
        let id = cluster.submit(NOW, request(40, 2)).unwrap();
        let (jobs, sequences) = sent(&mut cluster);
        let (bad, first) = &jobs[0];
        assert!(first.salt.is_empty() && sequences.iter().all(|(_, job)| job.salt.is_empty()));
        let good = prefill.into_iter().find(|worker| worker != bad).unwrap();

        cluster.distrust(NOW, *bad);
        let (jobs, sequences) = sent(&mut cluster);
        let salt = Era::after([*bad]).salt(b"");
        let expected: Vec<(Epoch, RequestId, &[u8])> = vec![(good, id, &salt)];
        assert_eq!(jobs.iter().map(|(worker, job)| (*worker, job.request, &*job.salt)).collect::<Vec<_>>(), expected);
        assert!(sequences.len() == 2 && sequences.iter().all(|(_, job)| job.salt == salt && job.expected_blocks == 2), "{sequences:?}");
        assert_eq!(cluster.origin().map(|origin| origin.era), Some(Era::after([*bad])));
    }

    #[test]
    fn a_reset_hides_all_blocks_and_each_has_an_era_of_its_own() {
        let (mut cluster, prefill) = cluster();
        let salt = |cluster: &mut Cluster| {
            cluster.submit(NOW, request(40, 1)).unwrap();
            sent(cluster).1.pop().map(|(_, job)| job.salt).unwrap()
        };
        let mut salts = vec![salt(&mut cluster)];
        for number in [7, 8] {
            cluster.reset_cache(number);
            salts.push(salt(&mut cluster));
        }
        cluster.distrust(NOW, prefill[0]);
        salts.push(salt(&mut cluster));
        let distinct: BTreeSet<_> = salts.iter().collect();
        assert_eq!(distinct.len(), salts.len(), "{salts:?}");
        assert_eq!(cluster.origin().map(|origin| origin.era), Some(Era::after([prefill[0]]).reset(8)));
    }

    #[test]
    fn a_worker_that_is_away_is_distrusted_all_the_same() {
        let (mut cluster, [bad, good]) = cluster();
        cluster.worker_down(NOW, bad);
        cluster.distrust(NOW, bad);
        cluster.distrust(NOW, bad);
        assert_eq!(cluster.distrusted().collect::<Vec<_>>(), [bad]);
        cluster.admit(NOW, bad, register("p", RoleInfo::Prefill(engine(1))), Version::NEWEST).unwrap();
        for _ in 0..3 {
            cluster.submit(NOW, request(40, 1)).unwrap();
            let (jobs, _) = sent(&mut cluster);
            assert!(jobs.iter().all(|(worker, _)| *worker == good));
        }
    }
}
