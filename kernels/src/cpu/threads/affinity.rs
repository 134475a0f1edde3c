//! Which cores a process may run on, and keeping a thread on one. Elsewhere than on Linux nothing is known, and nothing done.

#[cfg(target_os = "linux")]
mod linux {
    use nix::{
        sched::{CpuSet, sched_getaffinity, sched_setaffinity},
        unistd::Pid,
    };

    /// Of the calling thread, which is what it hands on to threads that it starts.
    const THIS_THREAD: Pid = Pid::from_raw(0);

    /// The cores that the calling thread may run on, ascending.
    pub(crate) fn cores() -> Vec<usize> {
        let Ok(set) = sched_getaffinity(THIS_THREAD) else { return Vec::new() };
        (0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect()
    }

    /// Keeps the calling thread on `core`. A wish: where the system refuses it, the thread runs on any.
    pub(crate) fn stay_on(core: usize) {
        let mut set = CpuSet::new();
        if set.set(core).is_ok() {
            let _ = sched_setaffinity(THIS_THREAD, &set);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    pub(crate) fn cores() -> Vec<usize> {
        Vec::new()
    }

    pub(crate) fn stay_on(_core: usize) {}
}

#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::{cores, stay_on};
#[cfg(target_os = "linux")]
pub(crate) use linux::{cores, stay_on};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let all = cores();
        assert!(!all.is_empty());
        for core in all {
            let seen = std::thread::spawn(move || {
                stay_on(core);
                cores()
            });
            assert_eq!(seen.join().unwrap(), [core]);
        }
    }
}
