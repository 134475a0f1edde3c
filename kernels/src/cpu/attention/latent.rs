//! The distribution among threads of query heads that share a latent.

use super::TASKS_PER_THREAD;

/// The number of groups that the query heads are cut into, so that all threads have work with few rows.
pub(super) fn head_groups(heads: usize, rows: usize, threads: usize) -> usize {
    let suits = |groups: &usize| heads.is_multiple_of(*groups) && heads / groups >= GROUP_MIN;
    let wanted = if threads == 1 { 1 } else { (TASKS_PER_THREAD * threads).div_ceil(rows.max(1)) };
    (1..=wanted.min(heads)).rev().find(suits).unwrap_or(1)
}

/// The fewest heads per group: each group packs the latent again, which costs about as much as multiplying it with four queries.
const GROUP_MIN: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            attention::{Attention, AttentionBuffers, attention},
            gemm::float::FloatActivations,
            kv::{KvMemory, KvRows, Span, write},
            testing::{cpus, numbers},
        },
        dtype::Dtype,
        kv::{KvLayout, KvStorage},
    };

    #[test]
    fn few_rows_are_cut_into_groups_of_heads_and_many_are_not() {
        assert_eq!(
            [(128, 1, 1), (128, 1, 2), (128, 1, 64), (128, 100, 8), (4, 1, 8), (0, 1, 2)].map(|(h, r, t)| head_groups(h, r, t)),
            [1, 8, 16, 1, 1, 1]
        );
    }

    /// Attention of `heads` query heads over one KV head of `layout`, with the rows cut at `cuts`.
    fn attend(cpu: &crate::Cpu, layout: KvLayout, heads: usize, positions: usize, cuts: &[usize], window: Option<usize>) -> Vec<f32> {
        let blocks = positions.div_ceil(16);
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let mut kv = KvMemory::new(layout, blocks);
        // The contents of an unwritten position must not matter.
        (0..blocks as u32).for_each(|id| kv.block_mut(id).fill(0xff));
        let k: Vec<f32> = numbers(positions * layout.head_dim, 1).into_iter().map(|x| 2.0 * x).collect();
        let q = numbers(positions * heads * layout.head_dim, 2);
        let mut all = Vec::new();
        let mut start = 0;
        for &end in cuts {
            // The rows are written here, so that later positions are not written yet, as in a model.
            let rows = start..end;
            let spans = [Span { blocks: &table, start, rows: rows.len() }];
            let k = &k[start * layout.head_dim..end * layout.head_dim];
            let v = if layout.latent.is_some() { &[] } else { k };
            write(cpu, &mut kv, 1, [KvRows { spans: &spans, k, v }].into_iter());
            let what = Attention { window, ..Attention::plain(1, heads) };
            let width = heads * layout.head_dim;
            let mut out = FloatActivations::default();
            attention(cpu, &kv, what, &spans, &q[rows.start * width..rows.end * width], &mut out, &mut AttentionBuffers::default());
            all.extend(out.to_rows());
            start = end;
        }
        all
    }

    #[test]
    fn a_latent_gives_the_bits_of_stored_values_in_any_cut() {
        for (dtype, head_dim, latent, heads, positions, window) in [
            (Dtype::F32, 40, 24, 3, 37, None),
            (Dtype::F32, 64, 34, 32, 290, None),
            (Dtype::F16, 24, 16, 16, 70, Some(30)),
            (Dtype::Bf16, 40, 24, 16, 300, None),
            (Dtype::Bf16, 72, 64, 5, 45, Some(20)),
            (Dtype::Bf16, 144, 128, 2, 33, None),
        ] {
            let layout = KvLayout { layers: 2, kv_heads: 1, head_dim, dtype: KvStorage::Float(dtype), latent: None };
            for cpu in cpus() {
                let stored = attend(&cpu, layout, heads, positions, &[positions], window);
                let expected: Vec<f32> = stored.chunks_exact(head_dim).flat_map(|head| &head[..latent]).copied().collect();
                let ones: Vec<usize> = (1..=positions).collect();
                for cuts in [&[positions][..], &[17, 18, positions], &ones] {
                    let found = attend(&cpu, KvLayout { latent: Some(latent), ..layout }, heads, positions, cuts, window);
                    assert!(
                        found == expected,
                        "{dtype:?} {head_dim} {latent} cut at {cuts:?} on {} with {} threads",
                        cpu.isa(),
                        cpu.threads()
                    );
                }
            }
        }
    }
}
