//! A batch of chunks through the layers: K and V of every row into paged memory, logits of the rows that are asked for.

use crate::model::{Layer, Model};
use tidemill_kernels::{
    Cpu, KvMemory, Span,
    attention::{Attention, attention},
    elementwise, kv, matmul,
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

/// Intermediate results, kept from batch to batch; each is `[rows, its width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// The residual stream.
    x: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    delta: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    logits: Vec<f32>,
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
        let spans: Vec<Span<'_>> = chunks.iter().map(|c| Span { blocks: c.blocks, start: c.start, rows: c.tokens.len() }).collect();
        let tail = Tail::new(chunks);

        let tokens: Vec<Token> = chunks.iter().flat_map(|chunk| chunk.tokens).copied().collect();
        resize(&mut b.x, tokens.len() * self.config.hidden);
        matmul::lookup(cpu, self.embedding.view(), &tokens, &mut b.x);
        b.cos.clear();
        b.sin.clear();
        for position in spans.iter().flat_map(|span| span.start..span.start + span.rows) {
            self.rope.push(position, &mut b.cos, &mut b.sin);
        }

        for (index, layer) in self.layers.iter().enumerate() {
            self.keys_and_values(layer, index, &spans, kv, b);
            if index + 1 < self.layers.len() {
                self.rest_of_layer(layer, index, &spans, kv, b);
            } else if !tail.rows.is_empty() {
                // From here on only rows with logits matter.
                for rows in [&mut b.x, &mut b.normed] {
                    keep_rows(rows, self.config.hidden, &tail.rows);
                }
                for angles in [&mut b.cos, &mut b.sin] {
                    keep_rows(angles, self.config.head_dim / 2, &tail.rows);
                }
                self.rest_of_layer(layer, index, &tail.spans, kv, b);
            }
        }

        resize(&mut b.logits, tail.rows.len() * self.config.vocab);
        if !tail.rows.is_empty() {
            elementwise::rms_norm(cpu, &mut b.x, &self.final_norm, self.config.norm_epsilon);
            matmul::matmul(cpu, &b.x, self.head.as_ref().unwrap_or(&self.embedding).view(), &mut b.logits);
        }
    }

    /// The layer's first norm, and K and V of all rows into `kv`.
    fn keys_and_values(&self, layer: &Layer, index: usize, spans: &[Span<'_>], kv: &mut KvMemory, b: &mut Buffers) {
        let (cpu, config) = (&self.cpu, &self.config);
        self.norm(&layer.attention_norm, b);
        let rows = b.x.len() / config.hidden;
        let width = config.kv_heads * config.head_dim;
        resize(&mut b.k, rows * width);
        resize(&mut b.v, rows * width);
        layer.k.apply(cpu, &b.normed, &mut b.k);
        layer.v.apply(cpu, &b.normed, &mut b.v);
        if let Some((_, norm)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, &mut b.k, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, &mut b.k, config.head_dim, &b.cos, &b.sin);
        kv::write(cpu, kv, index, spans, &b.k, &b.v);
    }

    /// Queries, attention and feed-forward of the rows in `b.x`, which are those of `spans`.
    fn rest_of_layer(&self, layer: &Layer, index: usize, spans: &[Span<'_>], kv: &KvMemory, b: &mut Buffers) {
        let (cpu, config) = (&self.cpu, &self.config);
        let rows = b.x.len() / config.hidden;
        resize(&mut b.q, rows * config.heads * config.head_dim);
        resize(&mut b.attended, rows * config.heads * config.head_dim);
        resize(&mut b.delta, rows * config.hidden);
        resize(&mut b.gate, rows * config.intermediate);
        resize(&mut b.up, rows * config.intermediate);

        layer.q.apply(cpu, &b.normed, &mut b.q);
        if let Some((norm, _)) = &layer.qk_norm {
            elementwise::rms_norm(cpu, &mut b.q, norm, config.norm_epsilon);
        }
        elementwise::rotate(cpu, &mut b.q, config.head_dim, &b.cos, &b.sin);
        let what = Attention { layer: index, heads: config.heads, window: config.windows[index] };
        attention(cpu, kv, what, spans, &b.q, &mut b.attended);
        layer.output.apply(cpu, &b.attended, &mut b.delta);
        elementwise::add(cpu, &mut b.x, &b.delta);

        self.norm(&layer.mlp_norm, b);
        layer.gate.apply(cpu, &b.normed, &mut b.gate);
        layer.up.apply(cpu, &b.normed, &mut b.up);
        elementwise::silu_mul(cpu, &mut b.gate, &b.up);
        layer.down.apply(cpu, &b.gate, &mut b.delta);
        elementwise::add(cpu, &mut b.x, &b.delta);
    }

    /// `normed = norm(x)`.
    fn norm(&self, weight: &[f32], b: &mut Buffers) {
        b.normed.clone_from(&b.x);
        elementwise::rms_norm(&self.cpu, &mut b.normed, weight, self.config.norm_epsilon);
    }
}

/// The rows that are followed to the logits.
struct Tail<'a> {
    /// Their numbers in the batch, ascending.
    rows: Vec<usize>,
    spans: Vec<Span<'a>>,
}

impl<'a> Tail<'a> {
    fn new(chunks: &[Chunk<'a>]) -> Self {
        let mut tail = Tail { rows: Vec::new(), spans: Vec::new() };
        let mut first = 0;
        for chunk in chunks {
            let len = chunk.tokens.len();
            let skip = match chunk.logits {
                LogitRows::None => len,
                LogitRows::Last => len - 1,
                LogitRows::All => 0,
            };
            if skip < len {
                tail.rows.extend(first + skip..first + len);
                tail.spans.push(Span { blocks: chunk.blocks, start: chunk.start + skip, rows: len - skip });
            }
            first += len;
        }
        tail
    }
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
