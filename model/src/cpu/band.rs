//! Bands: the rows of a batch that go through the layers together, and the buffers that they use.

use super::{
    experts::ExpertScratch,
    latent::LatentScratch,
    projection::{Activations, Arithmetic},
    ranks::Columns,
};
use std::sync::{Mutex, MutexGuard, TryLockError};
use tidemill_kernels::cpu::{
    attention::AttentionBuffers,
    gemm::float::FloatActivations,
    kv::{KvRows, Span},
};
use tidemill_proto::block::Token;

/// Buffers kept from batch to batch, so that a step allocates nothing.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) bands: Vec<Band<'static>>,
    /// The rows with logits.
    pub(super) tail: Band<'static>,
    /// One scratch per thread.
    pub(super) scratch: Vec<Mutex<Scratch>>,
    pub(super) logits: Vec<f32>,
    /// The rows that the next stage needs, or that the last one gives back, in a model whose layers are in several stages.
    pub(super) rows: Vec<f32>,
    /// The rows with logits, after the final norm, in f32; filled only if a chunk wants its hidden state.
    pub(super) hidden: Vec<f32>,
    /// The chunks' states.
    pub(super) states: Vec<f32>,
}

/// A band: rows that go through the layers together. Numbers are `[rows, their width]`.
#[derive(Default)]
pub(super) struct Band<'a> {
    pub(super) spans: Vec<Span<'a>>,
    pub(super) tokens: Vec<Token>,
    /// Indices of the rows with logits, ascending.
    pub(super) followed: Vec<usize>,
    /// The residual stream.
    pub(super) x: Vec<f32>,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    /// The gates of the attention's outputs, or a delta rule's rates and decays.
    pub(super) gates: Vec<f32>,
    /// A delta rule's queries, keys and values.
    pub(super) mixed: Vec<f32>,
    /// The angles of the rows, for each of the model's ropes.
    pub(super) angles: Vec<Angles>,
}

/// Cosines and sines, `[rows, pairs]`.
#[derive(Default)]
pub(super) struct Angles {
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

/// Intermediate results of a band within a layer.
pub(super) struct Scratch {
    pub(super) normed: Activations,
    /// The layer's input, normed, for products that are in f32 regardless of the model's arithmetic.
    pub(super) exact: Activations,
    pub(super) attention: AttentionBuffers,
    /// The attention's outputs that gates will multiply.
    pub(super) ungated: FloatActivations,
    pub(super) attended: Activations,
    pub(super) activated: Activations,
    /// The output of a part of the layer that is normed or scaled before it is added to the residual stream.
    pub(super) added: Vec<f32>,
    pub(super) columns: Columns,
    pub(super) experts: ExpertScratch,
    pub(super) latent: LatentScratch,
}

impl Buffers {
    /// Creates the scratch of a model with this arithmetic, for `threads` threads.
    pub(super) fn new(arithmetic: Arithmetic, threads: usize) -> Self {
        let scratch = || {
            let [normed, attended, activated] = std::array::from_fn(|_| Activations::new(arithmetic));
            Mutex::new(Scratch {
                normed,
                exact: Activations::new(Arithmetic::F32),
                attention: AttentionBuffers::default(),
                ungated: FloatActivations::rows_apart(),
                attended,
                activated,
                added: Vec::new(),
                columns: Columns::default(),
                experts: ExpertScratch::new(arithmetic, threads),
                latent: LatentScratch::new(arithmetic),
            })
        };
        let scratch = std::iter::repeat_with(scratch).take(threads).collect();
        Self {
            bands: Vec::new(),
            tail: Band::default(),
            scratch,
            logits: Vec::new(),
            rows: Vec::new(),
            hidden: Vec::new(),
            states: Vec::new(),
        }
    }
}

/// The first row of band `nth` out of `bands`. Bands have about the same number of rows, in whole matrix tiles.
pub(super) fn band_start(nth: usize, rows: usize, bands: usize) -> usize {
    const TILE_ROWS: usize = 16;
    if nth == bands { rows } else { (rows * nth / bands + TILE_ROWS / 2) / TILE_ROWS * TILE_ROWS }
}

/// A thread's scratch that is not in use.
pub(super) fn free<T>(scratch: &[Mutex<T>]) -> MutexGuard<'_, T> {
    let free = scratch.iter().find_map(|scratch| match scratch.try_lock() {
        Ok(scratch) => Some(scratch),
        // Leftovers of a task that panicked are overwritten before they are read.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    free.expect("as many as threads, each of which uses one at a time")
}

impl<'a> Band<'a> {
    /// The keys and values that the rows store; only keys for a latent.
    pub(super) fn keys_and_values(&self) -> KvRows<'_> {
        KvRows { spans: &self.spans, k: &self.k, v: &self.v }
    }

    /// Appends the rows of `band` that have logits: `x`, `[rows, hidden]`, and the angles of each; with `recurrent` numbers to a row, also
    /// `v`, a recurrent layer's outputs.
    pub(super) fn follow(&mut self, band: &Band<'_>, hidden: usize, recurrent: Option<usize>) {
        let rows = band.tokens.len();
        let copy = |to: &mut Vec<f32>, from: &[f32], width: usize| {
            band.followed.iter().for_each(|row| to.extend_from_slice(&from[row * width..(row + 1) * width]));
        };
        copy(&mut self.x, &band.x, hidden);
        if let Some(width) = recurrent {
            copy(&mut self.v, &band.v, width);
        }
        self.angles.resize_with(band.angles.len(), Angles::default);
        for (to, from) in self.angles.iter_mut().zip(&band.angles) {
            let pairs = from.cos.len() / rows;
            copy(&mut to.cos, &from.cos, pairs);
            copy(&mut to.sin, &from.sin, pairs);
        }
    }

    /// An empty band for other chunks' rows, in the same memory.
    pub(super) fn recycle<'b>(mut self) -> Band<'b> {
        self.tokens.clear();
        self.followed.clear();
        self.x.clear();
        self.v.clear();
        for Angles { cos, sin } in &mut self.angles {
            cos.clear();
            sin.clear();
        }
        let Self { spans, tokens, followed, x, q, k, v, gates, mixed, angles } = self;
        Band { spans: recycle(spans), tokens, followed, x, q, k, v, gates, mixed, angles }
    }
}

/// An empty vector for other chunks' spans, in the same memory (`collect` reuses the memory of a vector's iterator).
fn recycle<'b>(mut spans: Vec<Span<'_>>) -> Vec<Span<'b>> {
    spans.clear();
    spans.into_iter().map(|_| unreachable!("no spans are left")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_hold_all_rows_and_are_about_equal() {
        for (rows, bands) in [(128, 2), (130, 4), (300, 6), (520, 10), (511, 8), (2048, 32), (1, 1), (77, 1)] {
            let sizes: Vec<usize> = (0..bands).map(|nth| band_start(nth + 1, rows, bands) - band_start(nth, rows, bands)).collect();
            assert_eq!(sizes.iter().sum::<usize>(), rows);
            assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() < 2 * 16, "{rows} rows: {sizes:?}");
        }
    }
}
