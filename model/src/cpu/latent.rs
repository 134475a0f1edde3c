//! Attention over a compressed latent (multi-head latent attention: DeepSeek-V2, 2024, section 2.1).
//!
//! **The arithmetic** is absorbed, for prompts as for decode steps. A head's query is multiplied by the key projection, and then multiplies
//! the latent itself; the value projection is applied after the attention:
//!
//! ```text
//! score  = (W_UK q)ᵀ latent + q_rotatedᵀ k_rotated
//! output = W_UV Σ weight latent
//! ```
//!
//! All heads share one key of `rank + rotated` numbers, whose first `rank` are the value. In the expanded form, which computes the keys and
//! values of every head from the latent, scores have different last bits: a row would depend on whether it was computed in a prompt or as a
//! step. `docs/models.md` gives the cost of this choice.
//!
//! Rows are processed in pieces, as a row's absorbed queries are many times larger than its other intermediate results.

use super::{
    band::Angles,
    projection::{Activations, Arithmetic, Projection, project},
};
use crate::{
    error::ModelError,
    latent::LatentConfig,
    norm::Norm,
    tensors::{LatentTensors, Linear},
};
use std::ops::Range;
use tidemill_kernels::{
    Cpu,
    cpu::{
        attention::{Attention, AttentionBuffers, attention},
        elementwise,
        gemm::{Output, Product, float::FloatActivations},
        kv::{KvMemory, Span},
    },
};

/// The packed projections of a layer with latent attention.
pub(crate) struct Latent {
    sizes: LatentConfig,
    /// The projection that compresses queries' input, and the norm after it.
    compress: Option<(Projection, Norm)>,
    /// `[heads, rotated and plain part, inputs]`
    query: Projection,
    /// `[rank, hidden]`
    latent: Projection,
    norm: Norm,
    /// `[rotated, hidden]`
    rotated: Projection,
    heads: Vec<Head>,
}

struct Head {
    /// The projection that absorbs a query's plain part, `[rank, plain]`: its result multiplies the latent.
    key: Projection,
    /// The projection from a weighted sum of latents to the head's output, `[value, rank]`.
    value: Projection,
}

/// Intermediate results, kept from layer to layer.
pub(super) struct LatentScratch {
    arithmetic: Arithmetic,
    compressed: Vec<f32>,
    normed: Activations,
    latent: Vec<f32>,
    rotated: Vec<f32>,
    heads: Vec<HeadScratch>,
    /// `[rows of a piece, heads, rank and rotated]`
    absorbed: Vec<f32>,
    /// `[rows of a piece, heads, rank]`
    sums: FloatActivations,
    /// `[rows, heads, value]`
    outputs: Vec<f32>,
}

/// Intermediate results of one head, for the rows of a piece.
struct HeadScratch {
    head: usize,
    gathered: Vec<f32>,
    input: Activations,
    output: Vec<f32>,
}

impl LatentScratch {
    pub(super) fn new(arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            compressed: Vec::new(),
            normed: Activations::new(arithmetic),
            latent: Vec::new(),
            rotated: Vec::new(),
            heads: Vec::new(),
            absorbed: Vec::new(),
            sums: FloatActivations::rows_apart(),
            outputs: Vec::new(),
        }
    }
}

impl Latent {
    pub(crate) fn pack(tensors: &LatentTensors, sizes: LatentConfig, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let LatentTensors { compress, query, latent, norm, rotated, heads } = tensors;
        let compress = compress.as_ref().map(|(down, norm)| Ok::<_, ModelError>((down.pack(cpu, arithmetic)?, norm.clone())));
        let pack = |[key, value]: &[Linear; 2]| {
            Ok::<_, ModelError>(Head { key: key.pack_transposed(cpu, arithmetic)?, value: value.pack(cpu, arithmetic)? })
        };
        Ok(Self {
            sizes,
            compress: compress.transpose()?,
            query: query.pack(cpu, arithmetic)?,
            latent: latent.pack(cpu, arithmetic)?,
            norm: norm.clone(),
            rotated: rotated.pack(cpu, arithmetic)?,
            heads: heads.iter().map(pack).collect::<Result<_, _>>()?,
        })
    }

    /// Bytes that one pass over the weights reads.
    pub(crate) fn bytes(&self) -> usize {
        let Self { compress, query, latent, rotated, heads, .. } = self;
        let compress = compress.as_ref().map_or(0, |(down, _)| down.bytes());
        let heads: usize = heads.iter().map(|Head { key, value }| key.bytes() + value.bytes()).sum();
        compress + query.bytes() + latent.bytes() + rotated.bytes() + heads
    }

    /// Sets `keys` to the keys that the rows of `input` store: `[rows, rank and rotated]`.
    pub(super) fn keys(&self, cpu: &Cpu, input: &Activations, angles: &Angles, keys: &mut Vec<f32>, scratch: &mut LatentScratch) {
        let LatentConfig { rank, rotated: turning, .. } = self.sizes;
        let LatentScratch { latent, rotated, .. } = scratch;
        let rows = input.rows();
        latent.resize(rows * rank, 0.0);
        rotated.resize(rows * turning, 0.0);
        let products = [(&self.latent, &mut *latent), (&self.rotated, &mut *rotated)];
        project(cpu, input, products.map(|(weights, to)| Product { weights, output: Output::Set(to) }));
        self.norm.apply(cpu, latent);
        elementwise::rotate(cpu, rotated, rows, turning, &angles.cos, &angles.sin);
        keys.clear();
        for (latent, rotated) in latent.chunks_exact(rank).zip(rotated.chunks_exact(turning)) {
            keys.extend_from_slice(latent);
            keys.extend_from_slice(rotated);
        }
    }

    /// Sets `queries` to `[rows, heads, rotated and plain]`, from the rows of `input`.
    pub(super) fn queries(&self, cpu: &Cpu, input: &Activations, angles: &Angles, queries: &mut Vec<f32>, scratch: &mut LatentScratch) {
        let rows = input.rows();
        queries.resize(rows * self.heads.len() * self.sizes.query_dim(), 0.0);
        let input = match &self.compress {
            None => input,
            Some((down, norm)) => {
                let LatentScratch { compressed, normed, .. } = scratch;
                compressed.resize(rows * norm.weight.len(), 0.0);
                project(cpu, input, [Product { weights: down, output: Output::Set(compressed) }]);
                normed.norm_from(cpu, compressed, norm);
                normed
            }
        };
        project(cpu, input, [Product { weights: &self.query, output: Output::Set(queries) }]);
        elementwise::rotate(cpu, queries, rows, self.sizes.query_dim(), &angles.cos, &angles.sin);
    }

    /// Returns the outputs of all heads, `[rows, heads, value]`, in the scratch's memory.
    #[expect(clippy::too_many_arguments, reason = "those of attention, and where its parts go")]
    pub(super) fn attend<'a>(
        &self,
        cpu: &Cpu,
        kv: &KvMemory,
        what: Attention,
        spans: &[Span<'_>],
        queries: &[f32],
        buffers: &mut AttentionBuffers,
        scratch: &'a mut LatentScratch,
    ) -> &'a mut Vec<f32> {
        let LatentConfig { rank, plain, rotated, value, .. } = self.sizes;
        let (heads, query_dim) = (self.heads.len(), self.sizes.query_dim());
        let LatentScratch { arithmetic, heads: of_heads, absorbed, sums, outputs, .. } = scratch;
        let new_head = |head| HeadScratch { head, gathered: Vec::new(), input: Activations::new(*arithmetic), output: Vec::new() };
        of_heads.extend((of_heads.len()..heads).map(new_head));
        let rows: usize = spans.iter().map(|span| span.rows).sum();
        outputs.resize(rows * heads * value, 0.0);
        for first in (0..rows).step_by(PIECE_ROWS) {
            let piece = first..(first + PIECE_ROWS).min(rows);
            let queries = &queries[piece.start * heads * query_dim..piece.end * heads * query_dim];
            cpu.for_each_mut(of_heads, |scratch| {
                scratch.gathered.clear();
                let parts = queries.chunks_exact(query_dim).skip(scratch.head).step_by(heads);
                parts.for_each(|query| scratch.gathered.extend_from_slice(&query[rotated..]));
                scratch.multiply(cpu, plain, &self.heads[scratch.head].key, rank);
            });
            absorbed.resize(piece.len() * heads * self.sizes.stored_dim(), 0.0);
            let of_row = |row: usize| queries[row * heads * query_dim..(row + 1) * heads * query_dim].chunks_exact(query_dim);
            for_each_row(cpu, absorbed, piece.len(), |row, absorbed| {
                for ((to, query), of_head) in absorbed.chunks_exact_mut(rank + rotated).zip(of_row(row)).zip(&*of_heads) {
                    let (latent, turning) = to.split_at_mut(rank);
                    latent.copy_from_slice(&of_head.output[row * rank..(row + 1) * rank]);
                    turning.copy_from_slice(&query[..rotated]);
                }
            });
            attention(cpu, kv, what, &part_of(spans, &piece), absorbed, sums, buffers);
            let sums = &*sums;
            cpu.for_each_mut(of_heads, |scratch| {
                scratch.gathered.clear();
                sums.append_columns(scratch.head * rank..(scratch.head + 1) * rank, &mut scratch.gathered);
                scratch.multiply(cpu, rank, &self.heads[scratch.head].value, value);
            });
            let outputs = &mut outputs[piece.start * heads * value..piece.end * heads * value];
            for_each_row(cpu, outputs, piece.len(), |row, outputs| {
                for (to, of_head) in outputs.chunks_exact_mut(value).zip(&*of_heads) {
                    to.copy_from_slice(&of_head.output[row * value..(row + 1) * value]);
                }
            });
        }
        outputs
    }
}

impl HeadScratch {
    /// Multiplies the gathered rows of `inputs` numbers.
    fn multiply(&mut self, cpu: &Cpu, inputs: usize, weights: &Projection, outputs: usize) {
        self.output.resize(self.gathered.len() / inputs * outputs, 0.0);
        self.input.copy_from(cpu, &self.gathered, inputs);
        project(cpu, &self.input, [Product { weights, output: Output::Set(&mut self.output) }]);
    }
}

/// Rows of a piece. The absorbed queries and the sums of 64 rows take 34 MiB for DeepSeek-V3's 128 heads.
const PIECE_ROWS: usize = 64;

/// Calls `task` with each of the `rows` rows of `numbers` and its index, in parallel.
fn for_each_row(cpu: &Cpu, numbers: &mut [f32], rows: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
    let width = numbers.len() / rows;
    let mut rows: Vec<_> = numbers.chunks_exact_mut(width).enumerate().collect();
    cpu.for_each_mut(&mut rows, |(row, numbers)| task(*row, numbers));
}

/// The spans of rows `rows` of all spans.
fn part_of<'a>(spans: &[Span<'a>], rows: &Range<usize>) -> Vec<Span<'a>> {
    let mut first = 0;
    let part = |span: &Span<'a>| {
        let (start, end) = (rows.start.max(first), rows.end.min(first + span.rows));
        let skipped = start - first.min(start);
        first += span.rows;
        (start < end).then(|| Span { start: span.start + skipped, rows: end - start, ..*span })
    };
    spans.iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_some_rows_spans_cuts_those_at_its_ends() {
        let spans = [(3, 4), (0, 1), (20, 6)].map(|(start, rows)| Span { blocks: &[], start, rows });
        let part = |rows| part_of(&spans, &rows).iter().map(|span| (span.start, span.rows)).collect::<Vec<_>>();
        assert_eq!(part(0..11), [(3, 4), (0, 1), (20, 6)]);
        assert_eq!(part(2..7), [(5, 2), (0, 1), (20, 2)]);
        assert_eq!(part(9..11), [(24, 2)]);
        assert_eq!(part(4..5), [(0, 1)]);
    }
}
