//! A batch of texts through an encoder's layers.

use super::{
    config::Pooling,
    family::NormOrder,
    weights::{Encoder, EncoderLayer, Head},
};
use crate::{
    cpu::projection::{Activations, Arithmetic, Projection, project},
    norm::Norm,
};
use std::ops::Range;
use tidemill_kernels::cpu::{
    attention::{Attention, AttentionBuffers, attention},
    elementwise, embedding,
    gemm::{Output, Product},
    kv::{self, KvMemory, KvRows, Span},
};
use tidemill_proto::block::{BLOCK_TOKENS, Token};

/// One text, or two that are compared, as the tokens of both.
#[derive(Clone, Copy)]
pub struct Text<'a> {
    pub tokens: &'a [Token],
    /// Blocks of working memory for all tokens, not shared with other texts of the batch.
    pub blocks: &'a [u32],
    /// The index at which the second text begins; the number of tokens if there is none.
    pub second: usize,
}

/// Memory kept from batch to batch.
pub(super) struct Buffers {
    x: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    cos: Vec<Vec<f32>>,
    sin: Vec<Vec<f32>>,
    normed: Activations,
    attended: Activations,
    activated: Activations,
    attention: AttentionBuffers,
}

impl Buffers {
    pub(super) fn new(arithmetic: Arithmetic) -> Self {
        let activations = || Activations::new(arithmetic);
        let (x, q, k, v, cos, sin) = <_>::default();
        let (normed, attended, activated) = (activations(), activations(), activations());
        Self { x, q, k, v, cos, sin, normed, attended, activated, attention: AttentionBuffers::default() }
    }
}

impl Encoder {
    /// The results of all texts, rows of [`width`](Encoder::width) numbers one after the other.
    ///
    /// # Panics
    /// On a broken contract: a token outside the vocabulary, an empty text, one beyond the encoder's context or its blocks.
    pub fn encode(&mut self, texts: &[Text<'_>], kv: &mut KvMemory) -> Vec<f32> {
        for text in texts {
            assert!(!text.tokens.is_empty(), "a text has at least one token");
            assert!(text.tokens.len() <= self.config.context_tokens, "a text is within the context");
            assert!(text.blocks.len() * BLOCK_TOKENS >= text.tokens.len(), "a text has blocks for its tokens");
        }
        let mut buffers = std::mem::replace(&mut self.buffers, Buffers::new(Arithmetic::F32));
        let pooled = self.run(texts, kv, &mut buffers);
        self.buffers = buffers;
        match &self.head {
            Some(head) => self.classify(head, pooled),
            None => pooled,
        }
    }

    fn run(&self, texts: &[Text<'_>], kv: &mut KvMemory, buffers: &mut Buffers) -> Vec<f32> {
        let spans: Vec<_> = texts.iter().map(|text| Span { blocks: text.blocks, start: 0, rows: text.tokens.len() }).collect();
        self.embed(texts, buffers);
        for (index, layer) in self.layers.iter().enumerate() {
            self.attend(index, layer, &spans, kv, buffers);
            self.feed_forward(layer, buffers);
        }
        if let Some(norm) = &self.final_norm {
            norm.apply(&self.cpu, &mut buffers.x);
        }
        let mut start = 0;
        let mut pooled = Vec::new();
        for text in texts {
            let rows = start..start + text.tokens.len();
            start = rows.end;
            self.pool(&buffers.x, rows, &mut pooled);
        }
        pooled
    }

    /// Fills the residual stream from the tables, and the angles of positions.
    fn embed(&self, texts: &[Text<'_>], buffers: &mut Buffers) {
        let (cpu, hidden) = (&self.cpu, self.config.hidden);
        let tokens: Vec<Token> = texts.iter().flat_map(|text| text.tokens).copied().collect();
        let x = &mut buffers.x;
        x.clear();
        x.resize(tokens.len() * hidden, 0.0);
        embedding::lookup(cpu, self.words.view(), &tokens, x);
        let positions = || texts.iter().flat_map(|text| (0..text.tokens.len()).map(|position| (position, position >= text.second)));
        let add_row = |x: &mut [f32], table: &[f32], row: usize| {
            x.iter_mut().zip(&table[row * hidden..(row + 1) * hidden]).for_each(|(x, number)| *x += number);
        };
        for (x, (position, is_second)) in x.chunks_exact_mut(hidden).zip(positions()) {
            // The type is added first, as in transformers.
            if !self.types.is_empty() {
                add_row(x, &self.types, usize::from(is_second).min(self.config.types - 1));
            }
            if !self.positions.is_empty() {
                add_row(x, &self.positions, self.config.first_position + position);
            }
        }
        self.embedding_norm.apply(cpu, x);
        buffers.cos.resize_with(self.ropes.len(), Vec::new);
        buffers.sin.resize_with(self.ropes.len(), Vec::new);
        for ((rope, cos), sin) in self.ropes.iter().zip(&mut buffers.cos).zip(&mut buffers.sin) {
            cos.clear();
            sin.clear();
            positions().for_each(|(position, _)| rope.push(position, cos, sin));
        }
    }

    fn attend(&self, index: usize, layer: &EncoderLayer, spans: &[Span<'_>], kv: &mut KvMemory, buffers: &mut Buffers) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Buffers { x, q, k, v, cos, sin, normed, attended, attention: scratch, .. } = buffers;
        self.fill(normed, x, layer.attention_norm.as_ref());
        let rows = normed.rows();
        let outputs = [&mut *q, &mut *k, &mut *v].map(|to| {
            to.resize(rows * config.hidden, 0.0);
            Output::Set(to)
        });
        let mut weights = layer.qkv.iter();
        project(cpu, normed, outputs.map(|output| Product { weights: weights.next().expect("three projections"), output }));
        if let Some(rope) = layer.rope {
            for heads in [&mut *q, &mut *k] {
                elementwise::rotate(cpu, heads, rows, config.head_dim(), &cos[rope], &sin[rope]);
            }
        }
        kv::write(cpu, kv, 0, [KvRows { spans, k, v }].into_iter());
        let what = Attention { window: config.windows[index], is_bidirectional: true, ..Attention::plain(0, config.heads) };
        attended.fill(cpu, |attended| attention(cpu, kv, what, spans, q, attended, scratch));
        self.add(attended, &layer.output, layer.attention_norm.as_ref(), x);
    }

    fn feed_forward(&self, layer: &EncoderLayer, buffers: &mut Buffers) {
        let Buffers { x, normed, activated, .. } = buffers;
        self.fill(normed, x, Some(&layer.mlp_norm));
        let output = Output::Activated(self.config.activation, &mut *activated);
        project(&self.cpu, normed, [Product { weights: &layer.up, output }]);
        self.add(activated, &layer.down, Some(&layer.mlp_norm), x);
    }

    /// Packs the input of a part of a layer.
    fn fill(&self, normed: &mut Activations, x: &[f32], norm: Option<&Norm>) {
        match norm.filter(|_| self.config.family.norm_order == NormOrder::Before) {
            Some(norm) => normed.norm_from(&self.cpu, x, norm),
            None => normed.copy_from(&self.cpu, x, self.config.hidden),
        }
    }

    /// Adds the projection of `from` to the residual stream, and norms the sum where the family does.
    fn add(&self, from: &Activations, weights: &Projection, norm: Option<&Norm>, x: &mut [f32]) {
        project(&self.cpu, from, [Product { weights, output: Output::Add(x) }]);
        if let Some(norm) = norm.filter(|_| self.config.family.norm_order == NormOrder::After) {
            norm.apply(&self.cpu, x);
        }
    }

    /// Appends the pooled row of a text.
    fn pool(&self, x: &[f32], rows: Range<usize>, pooled: &mut Vec<f32>) {
        let hidden = self.config.hidden;
        let row = |row: usize| &x[row * hidden..(row + 1) * hidden];
        let first = match self.config.pooling {
            Pooling::First => return pooled.extend_from_slice(row(rows.start)),
            Pooling::Last => return pooled.extend_from_slice(row(rows.end - 1)),
            Pooling::Mean | Pooling::Max => pooled.len(),
        };
        pooled.extend_from_slice(row(rows.start));
        let pooled = &mut pooled[first..];
        let count = rows.len() as f32;
        for at in rows.skip(1) {
            match self.config.pooling {
                Pooling::Max => pooled.iter_mut().zip(row(at)).for_each(|(pooled, x)| *pooled = pooled.max(*x)),
                _ => pooled.iter_mut().zip(row(at)).for_each(|(pooled, x)| *pooled += x),
            }
        }
        if self.config.pooling == Pooling::Mean {
            pooled.iter_mut().for_each(|pooled| *pooled /= count);
        }
    }

    /// A classifier's logits of pooled rows.
    fn classify(&self, head: &Head, pooled: Vec<f32>) -> Vec<f32> {
        let (cpu, hidden) = (&self.cpu, self.config.hidden);
        let rows = pooled.len() / hidden;
        let settings = self.config.head.as_ref().expect("a head has settings");
        let mut input = Activations::new(Arithmetic::F32);
        input.copy_from(cpu, &pooled, hidden);
        let mut inner = pooled;
        match settings.activation {
            Some(activation) => {
                let mut activated = Activations::new(Arithmetic::F32);
                project(cpu, &input, [Product { weights: &head.dense, output: Output::Activated(activation, &mut activated) }]);
                inner = activated.to_rows();
            }
            None => {
                project(cpu, &input, [Product { weights: &head.dense, output: Output::Set(&mut inner) }]);
                // A soft cap at 1 is tanh.
                elementwise::scale_and_cap(cpu, &mut inner, 1.0, Some(1.0));
            }
        }
        if let Some(norm) = &head.norm {
            norm.apply(cpu, &mut inner);
        }
        input.copy_from(cpu, &inner, hidden);
        let mut logits = vec![0.0; rows * settings.labels];
        project(cpu, &input, [Product { weights: &head.classifier, output: Output::Set(&mut logits) }]);
        logits
    }
}
