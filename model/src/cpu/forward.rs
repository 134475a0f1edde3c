//! A batch of chunks through the layers: K and V of every row into paged memory, logits of the rows that are asked for.

use super::{
    model::{Layer, Model},
    projection::{Activations, Arithmetic, project},
};
use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, TryLockError},
};
use tidemill_kernels::{
    Cpu,
    cpu::{
        attention::{Attention, AttentionBuffers, attention},
        elementwise, embedding,
        gemm::{Output, Product},
        kv::{self, KvMemory, KvRows, Span},
    },
};
use tidemill_proto::block::{BLOCK_TOKENS, Token};

/// Consecutive tokens of one sequence. All positions before them are in `blocks` already.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    pub tokens: &'a [Token],
    /// Position of the first token.
    pub start: usize,
    /// Block table: covers `0..start + tokens.len()`. Blocks that chunks share are only read: no two chunks of a batch may
    /// write the same block.
    pub blocks: &'a [u32],
    pub logits: LogitRows,
}

/// Which of a chunk's rows are followed to the logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitRows {
    None,
    Last,
    All,
}

/// Rows of logits, in chunk order.
pub struct Logits<'a> {
    data: &'a mut [f32],
    vocab: usize,
}

impl Logits<'_> {
    pub fn rows(&self) -> usize {
        self.data.len() / self.vocab
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.vocab..(i + 1) * self.vocab]
    }
}

/// What is kept from batch to batch so that a step allocates nothing.
#[derive(Default)]
pub(crate) struct Buffers {
    bands: Vec<Band<'static>>,
    /// The rows that are followed to the logits.
    tail: Band<'static>,
    /// For each thread.
    scratch: Vec<Mutex<Scratch>>,
    logits: Vec<f32>,
}

/// A band of rows, which go through the layers together. Numbers are `[rows, their width]`.
#[derive(Default)]
struct Band<'a> {
    spans: Vec<Span<'a>>,
    tokens: Vec<Token>,
    /// Numbers of those rows that are followed to the logits, ascending.
    followed: Vec<usize>,
    /// The residual stream.
    x: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Intermediate results of a band that is in a layer.
struct Scratch {
    normed: Activations,
    attention: AttentionBuffers,
    attended: Activations,
    activated: Activations,
}

impl Buffers {
    /// For a model whose projections compute so, on so many threads.
    pub(crate) fn new(arithmetic: Arithmetic, threads: usize) -> Self {
        let scratch = || {
            let [normed, attended, activated] = std::array::from_fn(|_| Activations::new(arithmetic));
            Mutex::new(Scratch { normed, attention: AttentionBuffers::default(), attended, activated })
        };
        let scratch = std::iter::repeat_with(scratch).take(threads).collect();
        Self { bands: Vec::new(), tail: Band::default(), scratch, logits: Vec::new() }
    }
}

impl Model {
    /// Runs all chunks in one batch: writes their K and V into `kv` and returns the logits asked for, in chunk order.
    ///
    /// # Panics
    /// On a broken contract: a token outside the vocabulary, an empty chunk, a chunk beyond the model's context or its block
    /// table, a block id outside `kv`, or `kv` of another model.
    pub fn forward(&mut self, chunks: &[Chunk<'_>], kv: &mut KvMemory) -> Logits<'_> {
        assert_eq!(*kv.layout(), self.kv_layout(), "the KV memory is of another shape than the model");
        for chunk in chunks {
            let end = chunk.start + chunk.tokens.len();
            assert!(!chunk.tokens.is_empty(), "a chunk has at least one token");
            assert!(end <= self.config.context_tokens(), "position {end} is beyond the context of {}", self.config.context_tokens());
            assert!(chunk.blocks.len() * BLOCK_TOKENS >= end, "the block table ends before the chunk");
        }
        let mut buffers = std::mem::take(&mut self.buffers);
        self.run(chunks, kv, &mut buffers);
        self.buffers = buffers;
        Logits { data: &mut self.buffers.logits, vocab: self.config.vocab }
    }

    /// One loop over bands for each layer, from its attention to the next one's keys: only to write these, bands wait for each other.
    fn run(&self, chunks: &[Chunk<'_>], kv: &mut KvMemory, buffers: &mut Buffers) {
        let (cpu, scratch) = (&self.cpu, &buffers.scratch);
        let (mut all, mut tail) = self.cut(chunks, std::mem::take(&mut buffers.bands), std::mem::take(&mut buffers.tail));
        let used = all.iter().take_while(|band| !band.tokens.is_empty()).count();
        let bands = &mut all[..used];
        let (last, layers) = self.layers.split_last().expect("a model has layers");
        let what = |index| if index == layers.len() { Rows::KeysAndValues } else { Rows::All };
        cpu.for_each_mut(bands, |band| {
            self.embed(band);
            self.project(&self.layers[0], what(0), band, &mut free(scratch));
        });
        for (index, layer) in layers.iter().enumerate() {
            kv::write(cpu, kv, index, bands.iter().map(Band::keys_and_values));
            cpu.for_each_mut(bands, |band| {
                let scratch = &mut free(scratch);
                self.rest_of_layer(layer, index, kv, band, scratch);
                self.project(&self.layers[index + 1], what(index + 1), band, scratch);
            });
        }
        kv::write(cpu, kv, layers.len(), bands.iter().map(Band::keys_and_values));
        resize(&mut buffers.logits, tail.spans.iter().map(|span| span.rows).sum::<usize>() * self.config.vocab);
        if !tail.spans.is_empty() {
            // From here on only rows with logits matter.
            for band in &*bands {
                tail.follow(band, self.config.hidden, self.config.head_dim / 2);
            }
            let scratch = &mut free(scratch);
            self.project(last, Rows::Queries, &mut tail, scratch);
            self.rest_of_layer(last, layers.len(), kv, &mut tail, scratch);
            scratch.normed.rms_norm_from(cpu, &tail.x, &self.final_norm, self.config.norm_epsilon);
            project(cpu, &scratch.normed, [Product { weights: &self.head, output: Output::Set(&mut buffers.logits) }]);
        }
        buffers.bands = all.into_iter().map(Band::recycle).collect();
        buffers.tail = tail.recycle();
    }

    /// Bands of the chunks' rows, and one for those that are followed to the logits, in the memory of others; there may be more, without rows.
    fn cut<'a>(&self, chunks: &[Chunk<'a>], bands: Vec<Band<'_>>, tail: Band<'_>) -> (Vec<Band<'a>>, Band<'a>) {
        let mut bands: Vec<Band<'a>> = bands.into_iter().map(Band::recycle).collect();
        let mut tail = tail.recycle();
        let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let count = self.bands(rows);
        let (mut used, mut room) = (0, 0);
        for chunk in chunks {
            let len = chunk.tokens.len();
            let skip = match chunk.logits {
                LogitRows::None => len,
                LogitRows::Last => len - 1,
                LogitRows::All => 0,
            };
            let mut start = 0;
            while start < len {
                if room == 0 {
                    room = band_start(used + 1, rows, count) - band_start(used, rows, count);
                    used += 1;
                    if bands.len() < used {
                        bands.push(Band::default());
                    }
                }
                let band = &mut bands[used - 1];
                let end = len.min(start + room);
                let span = |rows: Range<usize>| Span { blocks: chunk.blocks, start: chunk.start + rows.start, rows: rows.len() };
                let first = band.tokens.len();
                band.tokens.extend(&chunk.tokens[start..end]);
                band.spans.push(span(start..end));
                if skip < end {
                    let followed = skip.max(start)..end;
                    band.followed.extend(followed.clone().map(|row| first + row - start));
                    tail.spans.push(span(followed));
                }
                room -= end - start;
                start = end;
            }
        }
        (bands, tail)
    }

    /// Bands of so many rows. Where a layer's weights are few, bands go through it on a thread of their own each, and what they make stays
    /// in its caches; where they are many, or rows too few for all threads, threads share each product, and all rows are one band.
    fn bands(&self, rows: usize) -> usize {
        let bands = rows.div_ceil(BAND_ROWS).next_multiple_of(self.cpu.threads());
        if rows < (2 * BAND_ROWS).max(bands * BAND_ROWS_MIN) || self.layers[0].projection_bytes() > WEIGHTS_BYTES_MAX { 1 } else { bands }
    }

    /// The residual stream's beginning, and the angles of positions.
    fn embed(&self, band: &mut Band<'_>) {
        resize(&mut band.x, band.tokens.len() * self.config.hidden);
        embedding::lookup(&self.cpu, self.embedding.view(), &band.tokens, &mut band.x);
        for position in band.spans.iter().flat_map(|span| span.start..span.start + span.rows) {
            self.rope.push(position, &mut band.cos, &mut band.sin);
        }
    }

    /// Queries, keys and values.
    fn project(&self, layer: &Layer, what: Rows, band: &mut Band<'_>, scratch: &mut Scratch) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Band { x, q, k, v, .. } = &mut *band;
        let normed = &mut scratch.normed;
        normed.rms_norm_from(cpu, x, &layer.attention_norm, config.norm_epsilon);
        let products = [(&layer.q, q, config.heads), (&layer.k, k, config.kv_heads), (&layer.v, v, config.kv_heads)];
        let [q, k, v] = products.map(|(weights, to, heads)| {
            resize(to, normed.rows() * heads * config.head_dim);
            Product { weights, output: Output::Set(to) }
        });
        match what {
            Rows::All => project(cpu, normed, [q, k, v]),
            Rows::KeysAndValues => project(cpu, normed, [k, v]),
            Rows::Queries => return project(cpu, normed, [q]),
        }
        if let Some((_, norm)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, &mut band.k, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, &mut band.k, config.head_dim, &band.cos, &band.sin);
    }

    /// Attention and feed-forward, with the queries of [`project`](Self::project).
    fn rest_of_layer(&self, layer: &Layer, index: usize, kv: &KvMemory, band: &mut Band<'_>, scratch: &mut Scratch) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Band { spans, x, q, cos, sin, .. } = band;
        let Scratch { normed, attention: buffers, attended, activated } = scratch;
        if let Some((norm, _)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, q, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, q, config.head_dim, cos, sin);
        let what = Attention { layer: index, heads: config.heads, window: config.windows[index] };
        attended.fill(cpu, |attended| attention(cpu, kv, what, spans, q, attended, buffers));
        project(cpu, attended, [Product { weights: &layer.output, output: Output::Add(x) }]);

        normed.rms_norm_from(cpu, x, &layer.mlp_norm, config.norm_epsilon);
        project(cpu, normed, [Product { weights: &layer.gate_up, output: Output::SiluMul(activated) }]);
        project(cpu, activated, [Product { weights: &layer.down, output: Output::Add(x) }]);
    }
}

/// What 64 rows of a small model need between two layers' attention stays in a second cache of 2 MiB, beside the weights that pass by.
const BAND_ROWS: usize = 64;
/// Fewer are not worth reading all weights again for.
const BAND_ROWS_MIN: usize = BAND_ROWS / 2;
/// A band reads all weights of the layer again: 3.5 MB (135M shape, 8 bits) cost less than waiting for each other after each product,
/// 7 MB (the same in bf16) more.
const WEIGHTS_BYTES_MAX: usize = 5 << 20;

/// First row of band `nth` of `bands`: about as many in each, in whole tiles of a matrix unit.
fn band_start(nth: usize, rows: usize, bands: usize) -> usize {
    const TILE_ROWS: usize = 16;
    if nth == bands { rows } else { (rows * nth / bands + TILE_ROWS / 2) / TILE_ROWS * TILE_ROWS }
}

/// One of the threads' scratch that nobody uses.
fn free(scratch: &[Mutex<Scratch>]) -> MutexGuard<'_, Scratch> {
    let free = scratch.iter().find_map(|scratch| match scratch.try_lock() {
        Ok(scratch) => Some(scratch),
        // What a task that panicked has left is written before it is read.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    free.expect("as many as threads, each of which uses one at a time")
}

/// What is projected from a layer's rows. In the last layer all rows need keys and values, but only some need more.
enum Rows {
    All,
    KeysAndValues,
    Queries,
}

impl<'a> Band<'a> {
    fn keys_and_values(&self) -> KvRows<'_> {
        KvRows { spans: &self.spans, k: &self.k, v: &self.v }
    }

    /// Takes in those rows of `band` that are followed: `x`, `[rows, hidden]`, and `angles` cosines and sines of each.
    fn follow(&mut self, band: &Band<'_>, hidden: usize, angles: usize) {
        let parts = [(&mut self.x, &band.x, hidden), (&mut self.cos, &band.cos, angles), (&mut self.sin, &band.sin, angles)];
        for (to, from, width) in parts {
            band.followed.iter().for_each(|row| to.extend_from_slice(&from[row * width..(row + 1) * width]));
        }
    }

    /// An empty band for rows of other chunks, in the same memory.
    fn recycle<'b>(mut self) -> Band<'b> {
        self.tokens.clear();
        self.followed.clear();
        for numbers in [&mut self.x, &mut self.cos, &mut self.sin] {
            numbers.clear();
        }
        let Self { spans, tokens, followed, x, q, k, v, cos, sin } = self;
        Band { spans: recycle(spans), tokens, followed, x, q, k, v, cos, sin }
    }
}

/// An empty vector for spans of other chunks, in the same memory (`collect` reuses that of a vector's iterator).
fn recycle<'b>(mut spans: Vec<Span<'_>>) -> Vec<Span<'b>> {
    spans.clear();
    spans.into_iter().map(|_| unreachable!("no spans are left")).collect()
}

fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}

const _: fn() = || {
    // A loaded model moves to the engine's own thread.
    fn assert_send<T: Send>() {}
    assert_send::<(Model, KvMemory, Cpu)>();
};

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
