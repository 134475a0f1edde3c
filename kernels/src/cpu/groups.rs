//! Groups of threads that compute side by side, each on cores of its own and with memory that its threads touched first, and that meet at a
//! barrier where one needs what another has computed.

use crate::cpu::{
    Cpu, Isa, KernelError,
    threads::{Backoff, ThreadPool, affinity, disjoint::Disjoint},
};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The threads that lead groups, one for each; the first group's is the caller.
pub struct Groups {
    leaders: ThreadPool,
    count: usize,
}

impl Groups {
    /// Creates `count` groups of `threads` threads each. If the process may run on exactly that many cores in all, each group has
    /// neighbouring ones, of one memory node where nodes have enough, and each thread but the caller's is pinned to one.
    pub fn new(isa: Option<Isa>, count: usize, threads: usize) -> Result<(Self, Vec<Cpu>), KernelError> {
        let cores = affinity::cores_by_node();
        let cores = if cores.len() == count * threads { cores } else { Vec::new() };
        let of_group = |group: usize| cores.get(group * threads..(group + 1) * threads).unwrap_or_default();
        let groups = (0..count).map(|group| Cpu::on_cores(isa, threads, of_group(group))).collect::<Result<Vec<_>, _>>()?;
        let firsts: Vec<_> = groups.iter().map(|group| group.first_core).collect();
        let start = move |worker: usize| firsts[worker + 1].into_iter().for_each(affinity::stay_on);
        let leaders = ThreadPool::new(count - 1, start).map_err(|source| KernelError::Threads { threads: count, source })?;
        Ok((Self { leaders, count }, groups))
    }

    /// Runs `task` for each member, all at the same time, each on the thread that leads its group. A panic resumes in the caller once no task
    /// runs any more, so a task that waits for others must not wait for one that has panicked (see [`Barrier::fail`]).
    pub fn run<T: Send>(&mut self, members: &mut [T], task: impl Fn(&mut T) + Sync) {
        assert_eq!(members.len(), self.count, "a member for each group");
        let members = Disjoint::new(members);
        // A thread takes its own task first, and another's only after it, which ends after all have met. So each has its own.
        // SAFETY: each task has a member of its own.
        self.leaders.for_each(self.count, &|index| unsafe { members.part(index..index + 1) }.iter_mut().for_each(&task));
    }
}

/// A place where threads wait for each other, again and again.
pub struct Barrier {
    threads: usize,
    arrived: AtomicUsize,
    /// The number of times that all have met.
    met: AtomicUsize,
    has_failed: AtomicBool,
}

/// A thread at a barrier failed, so that the others would wait for ever.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("another of the threads that meet here has failed")]
pub struct Failed;

impl Barrier {
    pub fn new(threads: usize) -> Self {
        Self { threads, arrived: AtomicUsize::new(0), met: AtomicUsize::new(0), has_failed: AtomicBool::new(false) }
    }

    /// Waits for all threads. What each wrote before, all may read afterwards.
    pub fn wait(&self) -> Result<(), Failed> {
        let met = self.met.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.met.store(met.wrapping_add(1), Ordering::Release);
        }
        let mut backoff = Backoff::default();
        while self.met.load(Ordering::Acquire) == met {
            if self.has_failed.load(Ordering::Acquire) {
                return Err(Failed);
            }
            // After the pause that a worker parks at, this goes on yielding: a step is under way.
            backoff.wait();
        }
        Ok(())
    }

    /// Lets all waits fail, from now on.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashSet, panic, sync::Mutex, thread};

    #[test]
    fn each_group_has_its_thread_and_all_read_what_all_wrote() {
        let (mut groups, cpus) = Groups::new(None, 3, 2).unwrap();
        assert!(cpus.len() == 3 && cpus.iter().all(|cpu| cpu.threads() == 2));
        let (barrier, written) = (Barrier::new(3), [const { AtomicUsize::new(0) }; 3]);
        let mut threads = vec![HashSet::new(); 3];
        for _ in 0..50 {
            let mut members: Vec<_> = threads.iter_mut().enumerate().collect();
            groups.run(&mut members, |(member, threads)| {
                threads.insert(thread::current().id());
                for round in 1..=20 {
                    written[*member].store(round, Ordering::Relaxed);
                    barrier.wait().unwrap();
                    assert!(written.iter().all(|written| written.load(Ordering::Relaxed) == round));
                    barrier.wait().unwrap();
                }
            });
        }
        assert!(threads.iter().all(|threads| threads.len() == 1), "a group's thread stays the same");
        assert_eq!(threads.iter().flatten().collect::<HashSet<_>>().len(), 3);
    }

    #[test]
    fn who_waits_for_one_that_failed_is_told() {
        let (mut groups, _) = Groups::new(None, 3, 1).unwrap();
        let (barrier, waits, at_work) = (Barrier::new(3), Mutex::new(Vec::new()), AtomicUsize::new(0));
        let run = panic::AssertUnwindSafe(|| {
            groups.run(&mut [0, 1, 2], |member| {
                at_work.fetch_add(1, Ordering::Relaxed);
                if *member == 1 {
                    // A panic keeps tasks that have not begun from running at all.
                    while at_work.load(Ordering::Relaxed) < 3 {
                        thread::yield_now();
                    }
                    barrier.fail();
                    panic!("a member fails");
                }
                waits.lock().unwrap().push(barrier.wait());
            });
        });
        assert!(panic::catch_unwind(run).is_err());
        assert_eq!(waits.into_inner().unwrap(), [Err(Failed); 2]);
    }
}
