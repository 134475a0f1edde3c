//! An instruction set that this machine has, and threads to run on.

pub mod attention;
mod bf16;
mod dispatch;
mod element;
pub mod elementwise;
pub mod embedding;
mod exp;
pub mod gemm;
mod isa;
pub mod kv;
pub(crate) mod memory;
#[cfg(test)]
mod shapes;
mod simd;
#[cfg(test)]
mod testing;
mod threads;
pub mod vocab;

pub use isa::{Bf16Products, Isa};

use memory::{Arena, Memory};
use std::str::FromStr;
use threads::{ThreadPool, affinity, disjoint::Disjoint};

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("unknown instruction set {0:?}: use amx, avx512bf16, avx512, avx2, neon or portable")]
    UnknownIsa(String),
    #[error("this machine has no {0}: leave the instruction set unset to use the best it has ({best})", best = Isa::best())]
    IsaUnavailable(Isa),
    #[error("cannot start {threads} compute threads: {source}")]
    Threads { threads: usize, source: std::io::Error },
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Isa, KernelError> {
        Isa::ALL.into_iter().find(|isa| isa.to_string() == name).ok_or_else(|| KernelError::UnknownIsa(name.to_owned()))
    }
}

/// What kernels run on.
pub struct Cpu {
    isa: Isa,
    /// `None`: the calling thread alone.
    pool: Option<ThreadPool>,
    arena: Arena,
}

impl Cpu {
    /// `isa`: `None` picks the best. `threads`: at least 1, the caller's among them. Where the process may run on exactly as
    /// many cores, each thread but the caller's stays on one of its own.
    pub fn new(isa: Option<Isa>, threads: usize) -> Result<Cpu, KernelError> {
        let isa = isa.unwrap_or_else(Isa::best);
        if !isa.is_available() {
            return Err(KernelError::IsaUnavailable(isa));
        }
        let pool = match threads {
            0 | 1 => None,
            _ => {
                let cores = affinity::cores();
                let start = move |worker| {
                    if cores.len() == threads {
                        affinity::stay_on(cores[worker + 1]);
                    }
                };
                Some(ThreadPool::new(threads - 1, start).map_err(|source| KernelError::Threads { threads, source })?)
            }
        };
        Ok(Cpu { isa, pool, arena: Arena::default() })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.workers() + 1)
    }

    /// Zeros that are kept for long.
    pub(crate) fn memory(&self, len: usize) -> Memory<u8> {
        self.arena.memory(len)
    }

    /// Runs `task(0..tasks)`, in any order and in parallel.
    pub fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        match &self.pool {
            Some(pool) if tasks > 1 => pool.for_each(tasks, &task),
            _ => (0..tasks).for_each(task),
        }
    }

    /// Which of so many tasks the thread of task `index` mostly has next.
    pub(crate) fn after(&self, index: usize, tasks: usize) -> Option<usize> {
        let next = index + 1;
        (next < tasks && !self.pool.as_ref().is_some_and(|pool| pool.begins(next, tasks))).then_some(next)
    }

    /// Runs `task` for each of the items, in any order and in parallel. What it runs in parallel itself is on its own thread alone, but
    /// for a single item.
    pub fn for_each_mut<T: Send>(&self, items: &mut [T], task: impl Fn(&mut T) + Sync) {
        let count = items.len();
        let items = Disjoint::new(items);
        // SAFETY: each task has an item of its own.
        self.for_each(count, |index| unsafe { items.part(index..index + 1) }.iter_mut().for_each(&task));
    }

    /// Rows of `width` numbers that make a task worth another thread, for kernels that do little with each number.
    pub(crate) fn rows_per_task(&self, width: usize) -> usize {
        if self.pool.is_none() { usize::MAX } else { (NUMBERS_PER_TASK / width.max(1)).max(1) }
    }
}

/// Numbers of light work in a task: some microseconds, which is still more than handing it to another thread costs.
const NUMBERS_PER_TASK: usize = 1 << 13;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        assert!("sse9".parse::<Isa>().unwrap_err().to_string().contains("amx, avx512bf16, avx512, avx2, neon or portable"));
    }

    #[test]
    fn every_task_runs_once() {
        use std::sync::atomic::{AtomicU32, Ordering};
        for threads in [1, 3] {
            let cpu = Cpu::new(None, threads).unwrap();
            assert_eq!(cpu.threads(), threads);
            let runs: Vec<AtomicU32> = (0..100).map(|_| AtomicU32::new(0)).collect();
            cpu.for_each(100, |i| {
                runs[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }
}
