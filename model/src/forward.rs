//! A batch of chunks through the layers: K and V of every row into paged memory, logits of the rows that are asked for.

use crate::{
    model::{Layer, Model},
    projection::{Activations, Arithmetic, Output, Product, project},
};
use tidemill_kernels::{
    Cpu, KvMemory, Span,
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

/// Intermediate results, kept from batch to batch so that a step allocates nothing. `[rows, its width]` unless said.
#[derive(Default)]
pub(crate) struct Buffers {
    tokens: Vec<Token>,
    tail: Tail<'static>,
    spans: Vec<Span<'static>>,
    /// The residual stream.
    x: Vec<f32>,
    normed: Activations,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attention: AttentionBuffers,
    attended: Activations,
    activated: Activations,
    cos: Vec<f32>,
    sin: Vec<f32>,
    logits: Vec<f32>,
}

impl Buffers {
    /// For a model whose projections compute so.
    pub(crate) fn new(arithmetic: Arithmetic) -> Self {
        let [normed, attended, activated] = std::array::from_fn(|_| Activations::new(arithmetic));
        Self { normed, attended, activated, ..Self::default() }
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

    fn run(&self, chunks: &[Chunk<'_>], kv: &mut KvMemory, b: &mut Buffers) {
        let cpu = &self.cpu;
        let mut spans = recycle(std::mem::take(&mut b.spans));
        spans.extend(chunks.iter().map(|c| Span { blocks: c.blocks, start: c.start, rows: c.tokens.len() }));
        let mut tail = std::mem::take(&mut b.tail).recycle();
        tail.fill(chunks);

        b.tokens.clear();
        b.tokens.extend(chunks.iter().flat_map(|chunk| chunk.tokens));
        resize(&mut b.x, b.tokens.len() * self.config.hidden);
        matrix::lookup(cpu, self.embedding.view(), &b.tokens, &mut b.x);
        b.cos.clear();
        b.sin.clear();
        for position in spans.iter().flat_map(|span| span.start..span.start + span.rows) {
            self.rope.push(position, &mut b.cos, &mut b.sin);
        }

        let (last, layers) = self.layers.split_last().expect("a model has layers");
        for (index, layer) in layers.iter().enumerate() {
            self.norm(&layer.attention_norm, b);
            self.project(layer, Rows::All, b);
            self.store(layer, index, &spans, kv, b);
            self.rest_of_layer(layer, index, &spans, kv, b);
        }
        let index = layers.len();
        self.norm(&last.attention_norm, b);
        self.project(last, Rows::KeysAndValues, b);
        self.store(last, index, &spans, kv, b);
        resize(&mut b.logits, tail.rows.len() * self.config.vocab);
        if !tail.rows.is_empty() {
            // From here on only rows with logits matter.
            keep_rows(&mut b.x, self.config.hidden, &tail.rows);
            for angles in [&mut b.cos, &mut b.sin] {
                keep_rows(angles, self.config.head_dim / 2, &tail.rows);
            }
            self.norm(&last.attention_norm, b);
            self.project(last, Rows::Queries, b);
            self.rest_of_layer(last, index, &tail.spans, kv, b);
            self.norm(&self.final_norm, b);
            project(cpu, &b.normed, [Product { weights: &self.head, to: Output::Set(&mut b.logits) }]);
        }
        b.spans = recycle(spans);
        b.tail = tail.recycle();
    }

    /// Queries, keys and values of the rows in `b.normed`.
    fn project(&self, layer: &Layer, what: Rows, b: &mut Buffers) {
        let (cpu, config) = (&self.cpu, &self.config);
        let rows = b.normed.rows();
        resize(&mut b.q, rows * config.heads * config.head_dim);
        resize(&mut b.k, rows * config.kv_heads * config.head_dim);
        resize(&mut b.v, rows * config.kv_heads * config.head_dim);
        let q = Product { weights: &layer.q, to: Output::Set(&mut b.q) };
        let k = Product { weights: &layer.k, to: Output::Set(&mut b.k) };
        let v = Product { weights: &layer.v, to: Output::Set(&mut b.v) };
        match what {
            Rows::All => project(cpu, &b.normed, [q, k, v]),
            Rows::KeysAndValues => project(cpu, &b.normed, [k, v]),
            Rows::Queries => project(cpu, &b.normed, [q]),
        }
    }

    /// K and V of all rows into `kv`.
    fn store(&self, layer: &Layer, index: usize, spans: &[Span<'_>], kv: &mut KvMemory, b: &mut Buffers) {
        let (cpu, config) = (&self.cpu, &self.config);
        if let Some((_, norm)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, &mut b.k, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, &mut b.k, config.head_dim, &b.cos, &b.sin);
        kv::write(cpu, kv, index, spans, &b.k, &b.v);
    }

    /// Attention and feed-forward of the rows in `b.x`, which are those of `spans` and whose queries are in `b.q`.
    fn rest_of_layer(&self, layer: &Layer, index: usize, spans: &[Span<'_>], kv: &KvMemory, b: &mut Buffers) {
        let (cpu, config) = (&self.cpu, &self.config);
        if let Some((norm, _)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, &mut b.q, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, &mut b.q, config.head_dim, &b.cos, &b.sin);
        let what = Attention { layer: index, heads: config.heads, window: config.windows[index] };
        b.attended.fill(cpu, |attended| attention(cpu, kv, what, spans, &b.q, attended, &mut b.attention));
        project(cpu, &b.attended, [Product { weights: &layer.output, to: Output::Add(&mut b.x) }]);

        self.norm(&layer.mlp_norm, b);
        project(cpu, &b.normed, [Product { weights: &layer.gate_up, to: Output::SiluMul(&mut b.activated) }]);
        project(cpu, &b.activated, [Product { weights: &layer.down, to: Output::Add(&mut b.x) }]);
    }

    /// `normed = norm(x)`.
    fn norm(&self, weight: &[f32], b: &mut Buffers) {
        b.normed.rms_norm_from(&self.cpu, &b.x, weight, self.config.norm_epsilon);
    }
}

/// What is projected from a layer's rows. In the last layer all rows need keys and values, but only some need more.
enum Rows {
    All,
    KeysAndValues,
    Queries,
}

/// The rows that are followed to the logits.
#[derive(Default)]
struct Tail<'a> {
    /// Their numbers in the batch, ascending.
    rows: Vec<usize>,
    spans: Vec<Span<'a>>,
}

impl<'a> Tail<'a> {
    fn fill(&mut self, chunks: &[Chunk<'a>]) {
        self.rows.clear();
        let mut first = 0;
        for chunk in chunks {
            let len = chunk.tokens.len();
            let skip = match chunk.logits {
                LogitRows::None => len,
                LogitRows::Last => len - 1,
                LogitRows::All => 0,
            };
            if skip < len {
                self.rows.extend(first + skip..first + len);
                self.spans.push(Span { blocks: chunk.blocks, start: chunk.start + skip, rows: len - skip });
            }
            first += len;
        }
    }

    fn recycle<'b>(self) -> Tail<'b> {
        Tail { rows: self.rows, spans: recycle(self.spans) }
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

/// Moves the given rows (ascending) to the front and drops the others.
fn keep_rows(buffer: &mut Vec<f32>, width: usize, rows: &[usize]) {
    for (to, from) in rows.iter().enumerate() {
        buffer.copy_within(from * width..(from + 1) * width, to * width);
    }
    buffer.truncate(rows.len() * width);
}

const _: fn() = || {
    // A loaded model moves to the engine's own thread.
    fn assert_send<T: Send>() {}
    assert_send::<(Model, KvMemory, Cpu)>();
};
