//! A batch of chunks through the layers: K and V of every row into paged memory, logits of the requested rows.

use super::{
    band::{Angles, Band, Buffers, Scratch, band_start, free},
    dense::Dense,
    key_offset,
    model::{FeedForward, Inputs, Layer, Model},
    projection::{Activations, Projection, project},
    ranks::Columns,
    states::{Pieces, States},
};
use crate::norm::Norm;
use std::ops::Range;
use tidemill_kernels::{
    Cpu,
    cpu::{
        attention::{Attention, attention},
        convolution::multiply,
        elementwise::{self, Gate},
        embedding,
        gemm::{Output, Product},
        kv::{self, KvMemory, Span},
    },
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, Token},
    stage::Stage,
    step::StateBlocks,
};

/// Consecutive tokens of one sequence. `blocks` already holds all positions before them.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    pub tokens: &'a [Token],
    /// Position of the first token.
    pub start: usize,
    /// Block table: covers `0..start + tokens.len()`. Shared blocks are only read: no two chunks of a batch may write
    /// the same block.
    pub blocks: &'a [u32],
    /// The blocks of the sequence's state, for a model whose layers keep states.
    pub state: StateBlocks<'a>,
    pub logits: LogitRows,
}

/// The rows of a chunk whose logits are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitRows {
    None,
    Last,
    All,
    /// The last row, with its hidden state.
    LastHidden,
}

/// Rows of logits, in chunk order.
pub struct Logits<'a> {
    data: &'a mut [f32],
    vocab: usize,
    /// The hidden states of these rows, after the final norm, if a chunk wants one.
    hidden: &'a [f32],
    width: usize,
}

impl Logits<'_> {
    pub fn rows(&self) -> usize {
        self.data.len() / self.vocab
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }

    /// A row's hidden state, after the final norm. Empty if no chunk wants any.
    pub fn hidden(&self, i: usize) -> &[f32] {
        self.hidden.get(i * self.width..(i + 1) * self.width).unwrap_or_default()
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.vocab..(i + 1) * self.vocab]
    }
}

impl Model {
    /// Runs all chunks in one batch: writes their K and V into `kv` and returns the requested logits, in chunk order.
    ///
    /// # Panics
    /// On a broken contract: a token outside the vocabulary, an empty chunk, a chunk beyond the model's context or its
    /// block table, a state that is missing, a block id outside `kv`, or `kv` of another model.
    pub fn forward(&mut self, chunks: &[Chunk<'_>], kv: &mut KvMemory) -> Logits<'_> {
        assert!(self.stage == Stage::WHOLE, "a model with all its layers");
        self.compute(chunks, None, kv);
        self.logits()
    }

    /// The logits of the last batch; of ranks, the first has all.
    pub(super) fn logits(&mut self) -> Logits<'_> {
        let Buffers { logits, hidden, .. } = &mut self.buffers;
        Logits { data: logits, vocab: self.config.vocab, hidden, width: self.config.hidden }
    }

    /// The rows that the last batch left behind for another stage, `[rows, hidden]`: all of them for the next one, or from the last one
    /// those with logits.
    pub(super) fn rows(&self) -> &[f32] {
        &self.buffers.rows
    }

    /// Runs all chunks, as [`forward`](Self::forward) does. `input` has their rows as the stage before left them; the first stage has none.
    pub(super) fn compute(&mut self, chunks: &[Chunk<'_>], input: Option<&[f32]>, kv: &mut KvMemory) {
        assert_eq!(*kv.layout(), self.kv_layout(), "the KV memory is of another shape than the model");
        for chunk in chunks {
            let end = chunk.start + chunk.tokens.len();
            assert!(!chunk.tokens.is_empty(), "a chunk has at least one token");
            assert!(end <= self.config.context_tokens(), "position {end} is beyond the context of {}", self.config.context_tokens());
            assert!(chunk.blocks.len() * BLOCK_TOKENS >= end, "the block table ends before the chunk");
        }
        let mut buffers = std::mem::take(&mut self.buffers);
        let mut states = States::load(&self.cpu, chunks, self.state_numbers(), kv, std::mem::take(&mut buffers.states));
        self.run(chunks, input, kv, &mut states, &mut buffers);
        buffers.states = states.store(&self.cpu, chunks, kv);
        self.buffers = buffers;
    }

    /// Computes the logits of rows that went through all stages, `[rows, hidden]`, as [`forward`](Self::forward) does at its end.
    pub(super) fn finish(&mut self, x: &[f32], wants_hidden: bool) {
        let mut buffers = std::mem::take(&mut self.buffers);
        if x.is_empty() {
            buffers.logits.clear();
        } else {
            let Buffers { scratch, hidden, logits, .. } = &mut buffers;
            self.project_to_logits(x, wants_hidden, &mut free(scratch), hidden, logits);
        }
        self.buffers = buffers;
    }

    /// One loop over bands per layer, from its attention to the next layer's keys. Bands wait for each other only to
    /// write these.
    fn run(&self, chunks: &[Chunk<'_>], input: Option<&[f32]>, kv: &mut KvMemory, states: &mut States, buffers: &mut Buffers) {
        let (cpu, scratch) = (&self.cpu, &buffers.scratch);
        let (mut all, mut tail) = self.cut(chunks, std::mem::take(&mut buffers.bands), std::mem::take(&mut buffers.tail));
        let used = all.iter().take_while(|band| !band.tokens.is_empty()).count();
        let bands = &mut all[..used];
        let pieces = Pieces::new(chunks, bands);
        let (last, layers) = self.layers.split_last().expect("a model has layers");
        let what = |index| if index == layers.len() && self.stage.is_last() { Rows::KeysAndValues } else { Rows::All };
        if let Some(rows) = input {
            self.enter(bands, rows);
        }
        cpu.for_each_mut(bands, |band| {
            if input.is_none() {
                self.embed(band);
            }
            self.find_angles(band);
            self.project(&self.layers[0], what(0), band, &mut free(scratch));
        });
        for (index, layer) in layers.iter().enumerate() {
            self.keep(layer, index, kv, bands, &pieces, states);
            cpu.for_each_mut(bands, |band| {
                let scratch = &mut free(scratch);
                self.rest_of_layer(layer, index, kv, band, scratch);
                self.project(&self.layers[index + 1], what(index + 1), band, scratch);
            });
        }
        self.keep(last, layers.len(), kv, bands, &pieces, states);
        buffers.rows.clear();
        if !self.stage.is_last() {
            // The next stage needs all rows.
            cpu.for_each_mut(bands, |band| self.rest_of_layer(last, layers.len(), kv, band, &mut free(scratch)));
            bands.iter().for_each(|band| buffers.rows.extend_from_slice(&band.x));
        } else if tail.spans.is_empty() {
            buffers.logits.clear();
        } else {
            // From here on, only rows with logits matter.
            for band in &*bands {
                tail.follow(band, self.config.hidden, last.inputs.recurrent_outputs());
            }
            let scratch = &mut free(scratch);
            self.project(last, Rows::Queries, &mut tail, scratch);
            self.rest_of_layer(last, layers.len(), kv, &mut tail, scratch);
            if self.stage.is_first() {
                let wants_hidden = chunks.iter().any(|chunk| chunk.logits == LogitRows::LastHidden);
                self.project_to_logits(&tail.x, wants_hidden, scratch, &mut buffers.hidden, &mut buffers.logits);
            } else {
                std::mem::swap(&mut buffers.rows, &mut tail.x);
            }
        }
        buffers.bands = all.into_iter().map(Band::recycle).collect();
        buffers.tail = tail.recycle();
    }

    /// Norms rows that went through all layers, into `hidden` too if that is wanted, and projects them to logits.
    fn project_to_logits(&self, x: &[f32], wants_hidden: bool, scratch: &mut Scratch, hidden: &mut Vec<f32>, logits: &mut Vec<f32>) {
        let cpu = &self.cpu;
        hidden.clear();
        if wants_hidden {
            hidden.extend_from_slice(x);
            self.final_norm.apply(cpu, hidden);
        }
        scratch.normed.norm_from(cpu, x, &self.final_norm);
        self.multiply_by_head(scratch, logits);
        let (factor, cap) = (self.config.logit_factor, self.config.logit_cap);
        if factor.is_some() || cap.is_some() {
            elementwise::scale_and_cap(cpu, logits, factor.unwrap_or(1.0), cap);
        }
    }

    fn multiply_by_head(&self, Scratch { normed, columns, .. }: &mut Scratch, logits: &mut Vec<f32>) {
        let (cpu, rows, vocab) = (&self.cpu, normed.rows(), self.config.vocab);
        let weights = self.head.as_ref().expect("only the first stage computes logits");
        let Some(rank) = &self.rank else {
            resize(logits, rows * vocab);
            return project(cpu, normed, [Product { weights, output: Output::Set(logits) }]);
        };
        resize(&mut columns.own, rows * rank.own(vocab).len());
        project(cpu, normed, [Product { weights, output: Output::Set(&mut columns.own) }]);
        rank.gather_to_first(cpu, rows, &mut columns.own, logits);
    }

    /// Cuts the chunks' rows into bands, and collects the rows with logits in `tail`, reusing old bands' memory.
    /// Trailing bands may be empty.
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
                LogitRows::Last | LogitRows::LastHidden => len - 1,
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

    /// Number of bands for `rows` rows. If a layer's weights are small, each band goes through it on one thread, and
    /// its intermediate results stay in that thread's caches. If they are large, or rows are too few for all threads,
    /// there is one band, and threads share each product. So it is for a rank, which meets the others between products.
    fn bands(&self, rows: usize) -> usize {
        if self.rank.is_some() {
            return 1;
        }
        let bands = rows.div_ceil(BAND_ROWS).next_multiple_of(self.cpu.threads());
        if rows < (2 * BAND_ROWS).max(bands * BAND_ROWS_MIN) || self.layers[0].projection_bytes() > WEIGHTS_BYTES_MAX { 1 } else { bands }
    }

    /// Fills the residual stream with the rows of the stage before.
    fn enter(&self, bands: &mut [Band<'_>], mut rows: &[f32]) {
        for band in bands {
            let (own, others) = rows.split_at(band.tokens.len() * self.config.hidden);
            band.x.extend_from_slice(own);
            rows = others;
        }
        assert!(rows.is_empty(), "as many rows as tokens");
    }

    /// Fills the residual stream from the embedding.
    fn embed(&self, band: &mut Band<'_>) {
        resize(&mut band.x, band.tokens.len() * self.config.hidden);
        embedding::lookup(&self.cpu, self.embedding.view(), &band.tokens, &mut band.x);
        if let Some(factor) = self.embedding_factor {
            elementwise::scale_and_cap(&self.cpu, &mut band.x, factor, None);
        }
    }

    /// Computes the angles of the rows' positions.
    fn find_angles(&self, band: &mut Band<'_>) {
        band.angles.resize_with(self.ropes.len(), Angles::default);
        for (rope, Angles { cos, sin }) in self.ropes.iter().zip(&mut band.angles) {
            for position in band.spans.iter().flat_map(|span| span.start..span.start + span.rows) {
                rope.push(position, cos, sin);
            }
        }
    }

    /// Stores what later rows need: keys and values in blocks, or a state, whose layer also computes the rows' outputs.
    fn keep(&self, layer: &Layer, index: usize, kv: &mut KvMemory, bands: &mut [Band<'_>], pieces: &Pieces, states: &mut States) {
        let part = self.config.recurrent.as_ref().map_or(0..0, |recurrent| {
            let numbers = recurrent.layer_numbers();
            let first = recurrent.layers_before(index) * numbers;
            first..first + numbers
        });
        match &layer.inputs {
            Inputs::ShortConv(conv) => conv.advance(&self.cpu, bands, pieces, states, &part),
            Inputs::DeltaRule(rule) => rule.advance(&self.cpu, bands, pieces, states, &part),
            Inputs::Heads(_) | Inputs::Latent(_) => {
                kv::write(&self.cpu, kv, self.config.kv_layer(index), bands.iter().map(Band::keys_and_values))
            }
        }
    }

    /// Computes queries, keys and values, and the gates of the attention's outputs. In their places, a convolution has the gate of its
    /// output, its input, and nothing; a delta rule has the gates of its outputs, its convolution's input, and the inputs of rates and
    /// decays.
    fn project(&self, layer: &Layer, what: Rows, band: &mut Band<'_>, scratch: &mut Scratch) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Band { x, q, k, v, gates, angles, .. } = &mut *band;
        let normed = &mut scratch.normed;
        self.fill(normed, x, layer.attention_norm.as_ref());
        let [weights_q, weights_k, weights_v] = match &layer.inputs {
            Inputs::Heads(heads) => &**heads,
            Inputs::Latent(latent) => {
                let angles = &angles[layer.rope.expect("a latent's layers rotate")];
                if !matches!(what, Rows::Queries) {
                    latent.keys(cpu, normed, angles, k, &mut scratch.latent);
                }
                if !matches!(what, Rows::KeysAndValues) {
                    latent.queries(cpu, normed, angles, q, &mut scratch.latent);
                }
                return;
            }
            Inputs::ShortConv(conv) => {
                let numbers = normed.rows() * conv.channels();
                let [gate, after, input] = &conv.projections;
                let [q, k, v] = [(after, q), (gate, k), (input, v)].map(|(weights, to)| {
                    resize(to, numbers);
                    Product { weights, output: Output::Set(to) }
                });
                match what {
                    Rows::All => project(cpu, normed, [q, k, v]),
                    Rows::KeysAndValues => project(cpu, normed, [k, v]),
                    Rows::Queries => return project(cpu, normed, [q]),
                }
                return multiply(&mut band.k, &band.v);
            }
            Inputs::DeltaRule(rule) => {
                let (rows, heads) = (normed.rows(), rule.heads);
                let mixed = (&rule.mixed, k, rows * heads.channels());
                let [q, k] = [(&rule.gates, q, rows * heads.outputs()), mixed].map(|(weights, to, numbers)| {
                    resize(to, numbers);
                    Product { weights, output: Output::Set(to) }
                });
                match what {
                    Rows::All => project(cpu, normed, [q, k]),
                    Rows::KeysAndValues => project(cpu, normed, [k]),
                    Rows::Queries => return project(cpu, normed, [q]),
                }
                self.fill(&mut scratch.exact, x, layer.attention_norm.as_ref());
                resize(gates, rows * 2 * heads.value_heads);
                return project(cpu, &scratch.exact, [Product { weights: &rule.rates, output: Output::Set(gates) }]);
            }
        };
        if let (Some(weights), Rows::All | Rows::Queries) = (&layer.output_gate, &what) {
            resize(gates, normed.rows() * config.heads * config.head_dim);
            project(cpu, normed, [Product { weights, output: Output::Set(gates) }]);
        }
        let products = [(weights_q, q, config.heads), (weights_k, k, config.kv_heads), (weights_v, v, config.kv_heads)];
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
            self.norm_heads(norm, &mut band.k, &mut scratch.columns.all);
        }
        self.rotate(layer, &mut band.k, &band.angles);
        if let Some(offset) = &layer.key_offset {
            key_offset::subtract(&mut band.k, offset);
        }
    }

    /// Computes attention and feed-forward, with the queries from [`project`](Self::project).
    fn rest_of_layer(&self, layer: &Layer, index: usize, kv: &KvMemory, band: &mut Band<'_>, scratch: &mut Scratch) {
        let (cpu, config) = (&self.cpu, &self.config);
        let Band { spans, x, q, v, gates, angles, .. } = band;
        let Scratch {
            normed,
            attention: buffers,
            ungated,
            attended,
            activated,
            added,
            columns,
            experts: expert_scratch,
            latent: latent_scratch,
            ..
        } = scratch;
        if let (FeedForward::Dense(dense), true) = (&layer.mlp, config.family.is_parallel) {
            // This must precede the attention's sum, as both parts read the same `x`.
            self.activate(dense, layer.attention_norm.as_ref(), x, normed, activated, columns);
        }
        let (window, scale, cap) = (config.windows[index], config.score_factor, config.score_cap);
        let what =
            Attention { window, scale, cap, sinks: layer.sinks.as_deref(), ..Attention::plain(config.kv_layer(index), config.heads) };
        match &layer.inputs {
            Inputs::Heads(_) => {
                if let Some((norm, _)) = &layer.qk_norm {
                    self.norm_heads(norm, q, &mut columns.all);
                }
                self.rotate(layer, q, angles);
                self.grow(spans, q);
                if layer.output_gate.is_none() && self.rank.is_none() {
                    attended.fill(cpu, |attended| attention(cpu, kv, what, spans, q, attended, buffers));
                } else {
                    attention(cpu, kv, what, spans, q, ungated, buffers);
                    q.clear();
                    ungated.append_columns(0..ungated.cols(), q);
                    if layer.output_gate.is_some() {
                        elementwise::gate(cpu, q, gates, Gate::Sigmoid);
                    }
                    self.pack_all_columns(ungated.rows(), q, &mut columns.all, attended);
                }
            }
            Inputs::Latent(latent) => {
                let outputs = latent.attend(cpu, kv, what, spans, q, buffers, latent_scratch);
                self.pack_all_columns(x.len() / config.hidden, outputs, &mut columns.all, attended);
            }
            Inputs::ShortConv(conv) => {
                multiply(v, q);
                attended.copy_from(cpu, v, conv.channels());
            }
            Inputs::DeltaRule(rule) => {
                rule.finish(cpu, v, q);
                attended.copy_from(cpu, v, rule.heads.outputs());
            }
        }
        self.add(attended, &layer.output, layer.after_attention.as_ref(), x, added, columns);
        match &layer.mlp {
            FeedForward::Dense(dense) => {
                if !config.family.is_parallel {
                    self.activate(dense, layer.mlp_norm.as_ref(), x, normed, activated, columns);
                }
                self.add(activated, &dense.down, layer.after_mlp.as_ref(), x, added, columns);
            }
            FeedForward::Experts(experts) => {
                let normed = &mut expert_scratch.normed;
                normed.clear();
                normed.extend_from_slice(x);
                if let Some(norm) = &layer.mlp_norm {
                    norm.apply(cpu, normed);
                }
                experts.apply(cpu, self.rank.as_ref(), config.hidden, config.activation, expert_scratch, columns, added);
                self.add_up(added, layer.after_mlp.as_ref(), x);
            }
        }
    }

    /// Computes a dense feed-forward layer up to its activation.
    fn activate(
        &self,
        dense: &Dense,
        norm: Option<&Norm>,
        x: &[f32],
        normed: &mut Activations,
        activated: &mut Activations,
        columns: &mut Columns,
    ) {
        self.fill(normed, x, norm);
        let rank = self.rank.as_ref().map(|rank| (rank, columns));
        dense.activate(&self.cpu, rank, self.config.activation, normed, activated);
    }

    /// Packs rows, with the columns of other ranks if there are any.
    fn pack_all_columns(&self, rows: usize, own: &mut Vec<f32>, all: &mut Vec<f32>, to: &mut Activations) {
        let all = match &self.rank {
            None => own,
            Some(rank) => {
                rank.gather(&self.cpu, rows, own, all);
                all
            }
        };
        to.copy_from(&self.cpu, all, all.len() / rows);
    }

    /// Norms queries or keys: each head's numbers, or those of all heads together, also of those that other ranks have.
    fn norm_heads(&self, norm: &Norm, x: &mut Vec<f32>, all: &mut Vec<f32>) {
        let width = norm.weight.len();
        match &self.rank {
            Some(rank) if width > self.config.head_dim => {
                rank.gather(&self.cpu, x.len() / rank.own(width).len(), x, all);
                norm.apply(&self.cpu, all);
                rank.keep_own(all, width, x);
            }
            _ => norm.apply(&self.cpu, x),
        }
    }

    /// Adds the projection of `from` to the residual stream, normed and scaled where the family does. A rank computes its own columns of the
    /// sum, or of what is normed and scaled.
    fn add(
        &self,
        from: &Activations,
        weights: &Projection,
        norm: Option<&Norm>,
        x: &mut Vec<f32>,
        added: &mut Vec<f32>,
        columns: &mut Columns,
    ) {
        let (cpu, rows, width, own) = (&self.cpu, from.rows(), self.config.hidden, &mut columns.own);
        let is_added_as_it_is = norm.is_none() && self.config.residual_factor.is_none();
        match &self.rank {
            None if is_added_as_it_is => return project(cpu, from, [Product { weights, output: Output::Add(x) }]),
            None => {
                resize(added, x.len());
                project(cpu, from, [Product { weights, output: Output::Set(added) }]);
            }
            Some(rank) if is_added_as_it_is => {
                rank.keep_own(x, width, own);
                project(cpu, from, [Product { weights, output: Output::Add(own) }]);
                return rank.gather(cpu, rows, own, x);
            }
            Some(rank) => {
                resize(own, rows * rank.own(width).len());
                project(cpu, from, [Product { weights, output: Output::Set(own) }]);
                rank.gather(cpu, rows, own, added);
            }
        }
        self.add_up(added, norm, x);
    }

    fn add_up(&self, added: &mut [f32], norm: Option<&Norm>, x: &mut [f32]) {
        if let Some(norm) = norm {
            norm.apply(&self.cpu, added);
        }
        elementwise::add_scaled(&self.cpu, x, added, self.config.residual_factor.unwrap_or(1.0));
    }

    /// Packs rows of the residual stream, normed if the layer norms them there.
    fn fill(&self, normed: &mut Activations, x: &[f32], norm: Option<&Norm>) {
        match norm {
            Some(norm) => normed.norm_from(&self.cpu, x, norm),
            None => normed.copy_from(&self.cpu, x, self.config.hidden),
        }
    }

    /// Rotates queries or keys, if the layer rotates them.
    fn rotate(&self, layer: &Layer, heads: &mut [f32], angles: &[Angles]) {
        if let Some(rope) = layer.rope {
            let Angles { cos, sin } = &angles[rope];
            elementwise::rotate(&self.cpu, heads, cos.len() / self.ropes[rope].pairs(), self.config.head_dim, cos, sin);
        }
    }

    /// Scales queries by their positions, if the model does so.
    fn grow(&self, spans: &[Span<'_>], q: &mut [f32]) {
        let Some(growth) = &self.config.query_growth else { return };
        let positions = spans.iter().flat_map(|span| span.start..span.start + span.rows);
        for (position, q) in positions.zip(q.chunks_exact_mut(self.config.heads * self.config.head_dim)) {
            let factor = growth.factor(position);
            if factor != 1.0 {
                elementwise::scale_and_cap(&self.cpu, q, factor, None);
            }
        }
    }
}

/// Rows of a band. The intermediate results of 64 rows of a small model fit a second-level cache of 2 MiB, beside the weights that are
/// streamed.
const BAND_ROWS: usize = 64;
/// The fewest rows worth a band of their own: with fewer, reading all weights again does not pay off.
const BAND_ROWS_MIN: usize = BAND_ROWS / 2;
/// The largest weights of a layer that bands go through separately. Each band reads all of them again: 3.5 MB (135M shape, 8 bits) cost
/// less than synchronizing after each product, 7 MB (the same in bf16) more.
const WEIGHTS_BYTES_MAX: usize = 5 << 20;

/// The projections to compute. In the last layer, all rows need keys and values, but only some need queries.
enum Rows {
    All,
    KeysAndValues,
    Queries,
}

fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}

const _: fn() = || {
    // A loaded model moves to the engine's own thread.
    fn assert_send<T: Send>() {}
    assert_send::<(Model, KvMemory, Cpu)>();
};
