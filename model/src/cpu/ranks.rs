//! Tensor parallelism: the ranks that a model is split over, and the exchange of their results.
//!
//! **The split.** Each row of each matrix belongs to one rank, which computes its output as a whole, one chain of additions as on a single
//! rank. A rank has the query heads of its KV heads, and an even part of the feed-forward layer's width, of the residual stream's and of the
//! vocabulary. What the next product needs of other ranks is gathered, not summed: so a number's bits do not depend on the number of ranks.
//! (Columns by rank, as in Megatron-LM (Shoeybi et al., 2019), would halve the gathers, and add partial sums in an order that depends on
//! it.)
//!
//! **The cost.** Four gathers in a layer: the heads' outputs, the residual stream, the activated numbers, the residual stream. For a row that
//! is `heads * head_dim + 2 * hidden + intermediate` numbers in f32 that each rank reads, of which all but its own part come from other
//! ranks. A norm over all heads together takes two gathers more. Norms are computed by each rank for itself.

use crate::{config::ModelConfig, error::ModelError, tensors::part_of};
use std::{
    any::Any,
    mem,
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicUsize, Ordering},
    },
};
use tidemill_kernels::{
    Cpu,
    cpu::groups::{Barrier, Failed},
};
use tidemill_proto::block::Shard;

/// Refuses what cannot be split over `ranks` ranks.
pub(super) fn check(config: &ModelConfig, ranks: usize) -> Result<(), ModelError> {
    if ranks == 1 {
        return Ok(());
    }
    let refuse = |problem: String| Err(ModelError::Ranks { ranks, problem });
    if config.recurrent.is_some() {
        return refuse("layers that keep a state are not split yet".into());
    }
    let (heads, kv_heads) = (config.heads, config.kv_heads);
    if config.latent.is_some() && !heads.is_multiple_of(ranks) {
        return refuse(format!("each rank has equally many of its {heads} heads"));
    }
    if config.latent.is_none() && !kv_heads.is_multiple_of(ranks) {
        return refuse(format!("its {heads} query heads share {kv_heads} KV heads, and each rank has equally many of these"));
    }
    let shared = config.experts.as_ref().and_then(|experts| experts.shared);
    match [config.hidden, config.intermediate, config.vocab].into_iter().chain(shared).min() {
        Some(narrowest) if narrowest < ranks => refuse(format!("a matrix has only {narrowest} rows")),
        _ => Ok(()),
    }
}

/// A rank's place among the others.
pub(crate) struct Rank {
    shard: Shard,
    exchange: Arc<Exchange>,
    /// The number of gathers so far. Every rank takes part in each.
    gathers: AtomicUsize,
}

/// The columns of a result that a rank computed, on their way to the other ranks, and those of all ranks; both `[rows, columns]`.
#[derive(Default)]
pub(super) struct Columns {
    pub(super) own: Vec<f32>,
    pub(super) all: Vec<f32>,
}

/// The state that the ranks of a group share.
pub(super) struct Exchange {
    barrier: Barrier,
    /// The part that each rank gives to the others, `[rows, its columns]`, in two places by turns: a rank that is late still reads one while
    /// others fill the next. None can be two gathers ahead, as all meet in each.
    parts: [Vec<RwLock<Vec<f32>>>; 2],
    /// The rank that failed first, and its message.
    failure: Mutex<Option<(usize, String)>>,
    #[cfg(test)]
    planted: Planted,
}

/// A bug that a test plants to see that it is found.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Planted {
    #[default]
    Nothing,
    /// Ranks do not wait for each other before they read.
    NoBarrier,
    /// The last rank puts its neighbours' parts in each other's places.
    WrongPlaces,
    /// The last rank panics in its third gather.
    Panic,
}

impl Exchange {
    pub(super) fn new(ranks: usize) -> Arc<Self> {
        Arc::new(Self::without_bugs(ranks))
    }

    fn without_bugs(ranks: usize) -> Self {
        let parts = || (0..ranks).map(|_| RwLock::default()).collect();
        Self {
            barrier: Barrier::new(ranks),
            parts: [parts(), parts()],
            failure: Mutex::default(),
            #[cfg(test)]
            planted: Planted::Nothing,
        }
    }

    #[cfg(test)]
    pub(super) fn with_bug(ranks: usize, planted: Planted) -> Arc<Self> {
        Arc::new(Self { planted, ..Self::without_bugs(ranks) })
    }

    /// The places of all ranks.
    pub(super) fn ranks(self: &Arc<Self>) -> Vec<Rank> {
        let count = self.parts[0].len() as u32;
        let rank = |index| Rank { shard: Shard { index, count }, exchange: self.clone(), gathers: AtomicUsize::new(0) };
        (0..count).map(rank).collect()
    }

    /// Ends the group: every rank that waits for this one fails, too.
    pub(super) fn fail(&self, rank: usize, panic: &(dyn Any + Send)) {
        if !panic.is::<Failed>() {
            let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
            let message = text.unwrap_or("it panicked").to_owned();
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((rank, message));
        }
        self.barrier.fail();
    }

    /// The rank that failed first, and its message.
    pub(super) fn failure(&self) -> Option<(usize, String)> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Rank {
    pub(super) fn shard(&self) -> Shard {
        self.shard
    }

    /// The part of `len` columns that belongs to this rank.
    pub(super) fn own(&self, len: usize) -> Range<usize> {
        part_of(self.shard, len)
    }

    /// Sets `part` to this rank's columns of `all`, `[rows, width]`.
    pub(super) fn keep_own(&self, all: &[f32], width: usize, part: &mut Vec<f32>) {
        let own = self.own(width);
        part.clear();
        all.chunks_exact(width).for_each(|row| part.extend_from_slice(&row[own.clone()]));
    }

    /// Gives `part`, `[rows, own columns]`, to the other ranks and sets `all` to the columns of all, `[rows, width]`. What is in `part`
    /// afterwards is meaningless.
    pub(super) fn gather(&self, cpu: &Cpu, rows: usize, part: &mut Vec<f32>, all: &mut Vec<f32>) {
        let parts = self.exchange_parts(part);
        self.assemble(cpu, rows, &parts, all);
    }

    /// The same for the first rank alone: `all` is empty on others.
    pub(super) fn gather_to_first(&self, cpu: &Cpu, rows: usize, part: &mut Vec<f32>, all: &mut Vec<f32>) {
        let parts = self.exchange_parts(part);
        match self.shard.index {
            0 => self.assemble(cpu, rows, &parts, all),
            _ => all.clear(),
        }
    }

    /// Gives a part to the others, and takes theirs, in the order of ranks. What is in `part` afterwards is meaningless.
    pub(super) fn exchange_parts(&self, part: &mut Vec<f32>) -> Vec<RwLockReadGuard<'_, Vec<f32>>> {
        let gathers = self.gathers.fetch_add(1, Ordering::Relaxed);
        let (exchange, index) = (&*self.exchange, self.shard.index as usize);
        let parts = &exchange.parts[gathers % 2];
        #[cfg(test)]
        self.plant(gathers);
        mem::swap(&mut *parts[index].write().unwrap_or_else(PoisonError::into_inner), part);
        self.meet();
        parts.iter().map(|part| part.read().unwrap_or_else(PoisonError::into_inner)).collect()
    }

    fn meet(&self) {
        #[cfg(test)]
        if self.exchange.planted == Planted::NoBarrier {
            return;
        }
        if let Err(failed) = self.exchange.barrier.wait() {
            std::panic::resume_unwind(Box::new(failed));
        }
    }

    /// Puts the ranks' columns beside each other.
    fn assemble(&self, cpu: &Cpu, rows: usize, parts: &[RwLockReadGuard<'_, Vec<f32>>], all: &mut Vec<f32>) {
        let parts: Vec<(&[f32], usize)> = parts.iter().map(|part| (&part[..], part.len() / rows)).collect();
        #[cfg(test)]
        let parts = self.misplaced(parts);
        let width = parts.iter().map(|(_, width)| width).sum();
        all.resize(rows * width, 0.0);
        let mut pieces: Vec<(usize, &mut [f32])> = all.chunks_mut(ROWS_TOGETHER * width).enumerate().collect();
        cpu.for_each_mut(&mut pieces, |(piece, rows)| {
            for (row, mut to) in (*piece * ROWS_TOGETHER..).zip(rows.chunks_exact_mut(width)) {
                for (part, width) in &parts {
                    let (own, others) = to.split_at_mut(*width);
                    own.copy_from_slice(&part[row * width..][..*width]);
                    to = others;
                }
            }
        });
    }

    #[cfg(test)]
    fn misplaced<T>(&self, mut parts: Vec<T>) -> Vec<T> {
        if self.exchange.planted == Planted::WrongPlaces && self.shard.index + 1 == self.shard.count {
            parts.reverse();
        }
        parts
    }

    #[cfg(test)]
    fn plant(&self, gathers: usize) {
        let is_last = self.shard.index + 1 == self.shard.count;
        match self.exchange.planted {
            // A rank that is late, so that the others do not happen to find what they did not wait for.
            Planted::NoBarrier if is_last => std::thread::sleep(std::time::Duration::from_micros(200)),
            Planted::Panic if is_last && gathers == 2 => panic!("the planted panic"),
            _ => {}
        }
    }
}

/// Rows that a thread puts together at a time.
const ROWS_TOGETHER: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathered_columns_lie_beside_each_other_in_any_round() {
        let cpu = Cpu::new(None, 1).unwrap();
        let ranks = Exchange::new(3).ranks();
        std::thread::scope(|scope| {
            for rank in &ranks {
                let cpu = &cpu;
                scope.spawn(move || {
                    for (round, (rows, width)) in [(1, 10), (17, 7), (3, 3), (2, 12)].into_iter().enumerate() {
                        let whole: Vec<f32> = (0..rows * width).map(|i| (1000 * round + i) as f32).collect();
                        let (mut part, mut all) = (Vec::new(), vec![0.5; 3]);
                        rank.keep_own(&whole, width, &mut part);
                        rank.gather(cpu, rows, &mut part, &mut all);
                        assert_eq!(all, whole);
                    }
                    let mut all = vec![0.5; 3];
                    rank.gather_to_first(cpu, 1, &mut vec![1.0], &mut all);
                    assert_eq!(all, if rank.shard().index == 0 { vec![1.0; 3] } else { vec![] });
                });
            }
        });
    }
}
