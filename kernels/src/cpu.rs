//! The operations on this machine's cores: an instruction set and threads.
//!
//! The arithmetic is stated once, for a virtual machine with 16 lanes of f32 (`simd`). AVX-512 holds the 16 lanes in
//! one register, AVX2 in two, NEON in four, portable code in an array; all give the same bits.
//!
//! Products and attention have their lanes along the outputs: each number is one chain of fused multiply-adds in ascending order
//! (`gemm::micro_kernel`). For bf16 weights, activations are also rounded to bf16, and the chain takes pairs of inputs, the odd one first
//! (`gemm::panel`): the order of AVX-512 BF16, at twice the rate, used if a test at start-up finds it exact (`simd::proof`). AMX adds in a
//! different order (`gemm::amx`), at many times the rate: it is the one exception, and machines of different order never share KV. Norms
//! and softmax sum lane by lane in ascending order, then add the lanes in one fixed tree.
//!
//! - `isa`: instruction sets; `dispatch`: running a kernel on one; `simd`: the 16-lane machine
//! - `threads`: the thread pool; [`groups`]: pools that compute side by side; `memory`: aligned memory in huge pages
//! - `element`, `bf16`, `exp`: numbers on 16 lanes; [`activation`]: the functions of feed-forward layers, and soft caps; `hadamard`:
//!   spreading outliers before rounding to 8 bits
//! - [`gemm`]: activations times weights
//! - [`attention`]: attention over paged K and V; [`kv`]: the memory that holds them
//! - [`convolution`]: short convolutions of channels; [`delta_rule`]: linear attention whose state a gated delta rule changes
//! - [`elementwise`], [`layer_norm`], [`embedding`], [`vocab`]: norms, rotary embedding and scaled sums; row look-up; a sampler's
//!   operations on logits

pub mod activation;
pub mod attention;
mod bf16;
pub mod convolution;
pub mod delta_rule;
mod dispatch;
mod element;
pub mod elementwise;
pub mod embedding;
mod exp;
pub mod gemm;
pub mod groups;
pub(crate) mod hadamard;
mod isa;
pub mod kv;
pub mod layer_norm;
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

/// An instruction set and threads, on which kernels run.
pub struct Cpu {
    isa: Isa,
    /// `None` if only the calling thread computes.
    pool: Option<ThreadPool>,
    arena: Arena,
    /// The core that its caller's thread belongs on, if its other threads are pinned and the caller is to be as well.
    first_core: Option<usize>,
}

impl Cpu {
    /// Creates a pool of `threads` threads, at least 1, the caller's included. `isa`: if `None`, the best is chosen. If the process may run
    /// on exactly that many cores, each thread but the caller's is pinned to one.
    pub fn new(isa: Option<Isa>, threads: usize) -> Result<Cpu, KernelError> {
        let cores = affinity::cores();
        let cpu = Self::on_cores(isa, threads, if cores.len() == threads { &cores } else { &[] })?;
        Ok(Cpu { first_core: None, ..cpu })
    }

    /// Creates a pool whose threads but the caller's are pinned to `cores` but the first, if there are any.
    fn on_cores(isa: Option<Isa>, threads: usize, cores: &[usize]) -> Result<Cpu, KernelError> {
        let isa = isa.unwrap_or_else(Isa::best);
        if !isa.is_available() {
            return Err(KernelError::IsaUnavailable(isa));
        }
        let others = cores.get(1..).unwrap_or_default().to_vec();
        let pool = match threads {
            0 | 1 => None,
            _ => {
                let start = move |worker: usize| others.get(worker).into_iter().for_each(|&core| affinity::stay_on(core));
                Some(ThreadPool::new(threads - 1, start).map_err(|source| KernelError::Threads { threads, source })?)
            }
        };
        Ok(Cpu { isa, pool, arena: Arena::default(), first_core: cores.first().copied() })
    }

    /// Pins the calling thread to the core of a [group's](groups) leader, if its other threads are pinned: what it touches first is then in the
    /// group's memory.
    pub fn lead(&self) {
        self.first_core.into_iter().for_each(affinity::stay_on);
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.workers() + 1)
    }

    /// Zeroed memory for long-lived data.
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

    /// The task that the thread of task `index` most likely runs next, out of `tasks`.
    pub(crate) fn after(&self, index: usize, tasks: usize) -> Option<usize> {
        let next = index + 1;
        (next < tasks && !self.pool.as_ref().is_some_and(|pool| pool.begins(next, tasks))).then_some(next)
    }

    /// Runs `task` for each item, in any order and in parallel. Loops inside `task` run on its own thread alone, unless
    /// there is only one item.
    pub fn for_each_mut<T: Send>(&self, items: &mut [T], task: impl Fn(&mut T) + Sync) {
        let count = items.len();
        let items = Disjoint::new(items);
        // SAFETY: each task has an item of its own.
        self.for_each(count, |index| unsafe { items.part(index..index + 1) }.iter_mut().for_each(&task));
    }

    /// Rows of `width` numbers that make a task worth another thread, for kernels with little work per number.
    pub(crate) fn rows_per_task(&self, width: usize) -> usize {
        if self.pool.is_none() { usize::MAX } else { (NUMBERS_PER_TASK / width.max(1)).max(1) }
    }
}

/// Numbers of light work per task: some microseconds, more than the cost of handing the task to another thread.
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
