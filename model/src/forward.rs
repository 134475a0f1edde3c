//! A batch of chunks through the layers: K and V of every row into paged memory, logits of the rows that are asked for.

use crate::{
    model::{Layer, Model},
    projection::{Activations, Arithmetic, Output, Product, project},
};
use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, TryLockError},
};
use tidemill_kernels::{
    Cpu, KvMemory, KvRows, Span,
    attention::{Attention, AttentionBuffers, attention},
    elementwise, kv, matrix,
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
    blocks: Vec<Block<'static>>,
    /// The rows that are followed to the logits.
    tail: Block<'static>,
    /// For each thread.
    scratch: Vec<Mutex<Scratch>>,
    logits: Vec<f32>,
}

/// Rows that go through the layers together. Numbers are `[rows, their width]`.
#[derive(Default)]
struct Block<'a> {
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

/// Intermediate results of a block that is in a layer.
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
        Self { blocks: Vec::new(), tail: Block::default(), scratch, logits: Vec::new() }
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

    /// One loop over blocks for each layer, from its attention to the next one's keys: only to write these, blocks wait for each other.
    fn run(&self, chunks: &[Chunk<'_>], kv: &mut KvMemory, buffers: &mut Buffers) {
        let (cpu, scratch) = (&self.cpu, &buffers.scratch);
        let (mut all, mut tail) = self.cut(chunks, std::mem::take(&mut buffers.blocks), std::mem::take(&mut buffers.tail));
        let used = all.iter().take_while(|block| !block.tokens.is_empty()).count();
        let blocks = &mut all[..used];
        let (last, layers) = self.layers.split_last().expect("a model has layers");
        let what = |index| if index == layers.len() { Rows::KeysAndValues } else { Rows::All };
        cpu.for_each_mut(blocks, |block| {
            self.embed(block);
            self.project(&self.layers[0], what(0), block, &mut free(scratch));
        });
        for (index, layer) in layers.iter().enumerate() {
            kv::write(cpu, kv, index, blocks.iter().map(Block::keys_and_values));
            cpu.for_each_mut(blocks, |block| {
                let scratch = &mut free(scratch);
                self.rest_of_layer(layer, index, kv, block, scratch);
                self.project(&self.layers[index + 1], what(index + 1), block, scratch);
            });
        }
        kv::write(cpu, kv, layers.len(), blocks.iter().map(Block::keys_and_values));
        resize(&mut buffers.logits, tail.spans.iter().map(|span| span.rows).sum::<usize>() * self.config.vocab);
        if !tail.spans.is_empty() {
            // From here on only rows with logits matter.
            for block in &*blocks {
                tail.follow(block, self.config.hidden, self.config.head_dim / 2);
            }
            let scratch = &mut free(scratch);
            self.project(last, Rows::Queries, &mut tail, scratch);
            self.rest_of_layer(last, layers.len(), kv, &mut tail, scratch);
            scratch.normed.rms_norm_from(cpu, &tail.x, &self.final_norm, self.config.norm_epsilon);
            project(cpu, &scratch.normed, [Product { weights: &self.head, to: Output::Set(&mut buffers.logits) }]);
        }
        buffers.blocks = all.into_iter().map(Block::recycle).collect();
        buffers.tail = tail.recycle();
    }

    /// Blocks of the chunks' rows, and one for those that are followed to the logits, in the memory of others; there may be more, without rows.
    fn cut<'a>(&self, chunks: &[Chunk<'a>], blocks: Vec<Block<'_>>, tail: Block<'_>) -> (Vec<Block<'a>>, Block<'a>) {
        let mut blocks: Vec<Block<'a>> = blocks.into_iter().map(Block::recycle).collect();
        let mut tail = tail.recycle();
        let rows_max = self.block_rows(chunks.iter().map(|chunk| chunk.tokens.len()).sum());
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
                    (used, room) = (used + 1, rows_max);
                    if blocks.len() < used {
                        blocks.push(Block::default());
                    }
                }
                let block = &mut blocks[used - 1];
                let end = len.min(start + room);
                let span = |rows: Range<usize>| Span { blocks: chunk.blocks, start: chunk.start + rows.start, rows: rows.len() };
                let first = block.tokens.len();
                block.tokens.extend(&chunk.tokens[start..end]);
                block.spans.push(span(start..end));
                if skip < end {
                    let followed = skip.max(start)..end;
                    block.followed.extend(followed.clone().map(|row| first + row - start));
                    tail.spans.push(span(followed));
                }
                room -= end - start;
                start = end;
            }
        }
        (blocks, tail)
    }

    /// Rows of a block. Where a layer's weights are few, blocks of some rows each go through it on a thread of their own, and what they
    /// make stays in its caches; where they are many, threads share the weights, and all rows are one block.
    fn block_rows(&self, rows: usize) -> usize {
        let threads = self.cpu.threads();
        if rows < 2 * BLOCK_ROWS || self.layers[0].projection_bytes() > WEIGHTS_BYTES_MAX {
            return rows;
        }
        let blocks = rows.div_ceil(BLOCK_ROWS).next_multiple_of(threads);
        rows.div_ceil(blocks).next_multiple_of(BLOCK_ROWS / 4)
    }

    /// The residual stream's beginning, and the angles of positions.
    fn embed(&self, block: &mut Block<'_>) {
        resize(&mut block.x, block.tokens.len() * self.config.hidden);
        matrix::lookup(&self.cpu, self.embedding.view(), &block.tokens, &mut block.x);
        for position in block.spans.iter().flat_map(|span| span.start..span.start + span.rows) {
            self.rope.push(position, &mut block.cos, &mut block.sin);
        }
    }

    /// Queries, keys and values.
    fn project(&self, layer: &Layer, what: Rows, block: &mut Block<'_>, scratch: &mut Scratch) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Block { x, q, k, v, .. } = &mut *block;
        let normed = &mut scratch.normed;
        normed.rms_norm_from(cpu, x, &layer.attention_norm, config.norm_epsilon);
        let products = [(&layer.q, q, config.heads), (&layer.k, k, config.kv_heads), (&layer.v, v, config.kv_heads)];
        let [q, k, v] = products.map(|(weights, to, heads)| {
            resize(to, normed.rows() * heads * config.head_dim);
            Product { weights, to: Output::Set(to) }
        });
        match what {
            Rows::All => project(cpu, normed, [q, k, v]),
            Rows::KeysAndValues => project(cpu, normed, [k, v]),
            Rows::Queries => return project(cpu, normed, [q]),
        }
        if let Some((_, norm)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, &mut block.k, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, &mut block.k, config.head_dim, &block.cos, &block.sin);
    }

    /// Attention and feed-forward, with the queries of [`project`](Self::project).
    fn rest_of_layer(&self, layer: &Layer, index: usize, kv: &KvMemory, block: &mut Block<'_>, scratch: &mut Scratch) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Block { spans, x, q, cos, sin, .. } = block;
        let Scratch { normed, attention: buffers, attended, activated } = scratch;
        if let Some((norm, _)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, q, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, q, config.head_dim, cos, sin);
        let what = Attention { layer: index, heads: config.heads, window: config.windows[index] };
        attended.fill(cpu, |attended| attention(cpu, kv, what, spans, q, attended, buffers));
        project(cpu, attended, [Product { weights: &layer.output, to: Output::Add(x) }]);

        normed.rms_norm_from(cpu, x, &layer.mlp_norm, config.norm_epsilon);
        project(cpu, normed, [Product { weights: &layer.gate_up, to: Output::SiluMul(activated) }]);
        project(cpu, activated, [Product { weights: &layer.down, to: Output::Add(x) }]);
    }
}

/// What 64 rows of a small model need between two layers' attention stays in a second cache of 2 MiB, beside the weights that pass by.
const BLOCK_ROWS: usize = 64;
/// A block reads all weights of the layer again: 3.5 MB (135M shape, 8 bits) cost less than waiting for each other after each product,
/// 7 MB (the same in bf16) more.
const WEIGHTS_BYTES_MAX: usize = 5 << 20;

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

impl<'a> Block<'a> {
    fn keys_and_values(&self) -> KvRows<'_> {
        KvRows { spans: &self.spans, k: &self.k, v: &self.v }
    }

    /// Takes in those rows of `block` that are followed: `x`, `[rows, hidden]`, and `angles` cosines and sines of each.
    fn follow(&mut self, block: &Block<'_>, hidden: usize, angles: usize) {
        let parts = [(&mut self.x, &block.x, hidden), (&mut self.cos, &block.cos, angles), (&mut self.sin, &block.sin, angles)];
        for (to, from, width) in parts {
            block.followed.iter().for_each(|row| to.extend_from_slice(&from[row * width..(row + 1) * width]));
        }
    }

    /// An empty block for rows of other chunks, in the same memory.
    fn recycle<'b>(mut self) -> Block<'b> {
        self.tokens.clear();
        self.followed.clear();
        for numbers in [&mut self.x, &mut self.cos, &mut self.sin] {
            numbers.clear();
        }
        let Self { spans, tokens, followed, x, q, k, v, cos, sin } = self;
        Block { spans: recycle(spans), tokens, followed, x, q, k, v, cos, sin }
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
