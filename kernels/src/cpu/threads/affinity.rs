//! The cores that a process may run on, and pinning a thread to one. Supported on Linux only; elsewhere nothing is pinned.

#[cfg(target_os = "linux")]
mod linux {
    use nix::{
        sched::{CpuSet, sched_getaffinity, sched_setaffinity},
        unistd::Pid,
    };
    use std::fs;

    /// The calling thread; threads that it starts inherit its cores.
    const THIS_THREAD: Pid = Pid::from_raw(0);

    /// The cores that the calling thread may run on, ascending.
    pub(crate) fn cores() -> Vec<usize> {
        let Ok(set) = sched_getaffinity(THIS_THREAD) else { return Vec::new() };
        (0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect()
    }

    /// The same cores, those of each memory node together.
    pub(crate) fn cores_by_node() -> Vec<usize> {
        let mut cores = cores();
        cores.sort_by_cached_key(|&core| (node_of(core), core));
        cores
    }

    /// The memory node of a core; 0 if the system does not say.
    fn node_of(core: usize) -> usize {
        let entries = fs::read_dir(format!("/sys/devices/system/cpu/cpu{core}")).into_iter().flatten().flatten();
        let node = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok();
        entries.filter_map(node).next().unwrap_or(0)
    }

    /// Pins the calling thread to `core`, if possible: if the system refuses, the thread runs on any core.
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

    pub(crate) fn cores_by_node() -> Vec<usize> {
        Vec::new()
    }

    pub(crate) fn stay_on(_core: usize) {}
}

#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::{cores, cores_by_node, stay_on};
#[cfg(target_os = "linux")]
pub(crate) use linux::{cores, cores_by_node, stay_on};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn cores_by_node_are_the_same_cores() {
        let mut by_node = cores_by_node();
        by_node.sort_unstable();
        assert_eq!(by_node, cores());
    }

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
