//! The gathers of a layer by themselves, for measuring them: ranks with buffers as wide as a model's, and nothing to compute in between.

use super::ranks::{Columns, Exchange, Rank};
use tidemill_kernels::{
    Cpu, Isa,
    cpu::{KernelError, groups::Groups},
};

/// Ranks that gather, as those of a [`RankedModel`](super::RankedModel) do between their products.
pub struct Gathers {
    groups: Groups,
    ranks: Vec<Member>,
}

struct Member {
    rank: Rank,
    cpu: Cpu,
    columns: Columns,
}

impl Gathers {
    /// Creates `ranks` ranks of `threads` threads each.
    pub fn new(isa: Option<Isa>, ranks: usize, threads: usize) -> Result<Self, KernelError> {
        let (groups, cpus) = Groups::new(isa, ranks, threads)?;
        let member = |(rank, cpu)| Member { rank, cpu, columns: Columns::default() };
        Ok(Self { groups, ranks: Exchange::new(ranks).ranks().into_iter().zip(cpus).map(member).collect() })
    }

    /// Gathers `rows` rows of each of these widths, one after the other, `times` times. A layer has four widths: that of all heads, of the
    /// residual stream, of the feed-forward layer, and of the residual stream again. The numbers are meaningless.
    pub fn run(&mut self, rows: usize, widths: &[usize], times: usize) {
        self.groups.run(&mut self.ranks, |Member { rank, cpu, columns: Columns { own, all } }| {
            for _ in 0..times {
                for &width in widths {
                    own.resize(rows * rank.own(width).len(), 0.0);
                    rank.gather(cpu, rows, own, all);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_the_columns_of_all() {
        for ranks in [1, 2, 3] {
            let mut gathers = Gathers::new(None, ranks, 1).unwrap();
            gathers.run(5, &[12, 7], 3);
            assert!(gathers.ranks.iter().all(|member| member.columns.all.len() == 5 * 7));
        }
    }
}
