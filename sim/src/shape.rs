//! The shapes of decoders, which determine the bytes of their weights and of their KV, and the operations of a token.

use serde::Serialize;
use tidemill_proto::block::BLOCK_TOKENS;

/// The shape of a decoder, with KV of two bytes a number.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Shape {
    pub name: &'static str,
    pub hidden: u32,
    pub vocab: u32,
    pub context_tokens: u32,
    /// The number of layers with attention.
    pub layers: u32,
    pub attention: Attention,
    /// The windows of layers that only attend to the last positions. Their K and V of earlier positions are kept nevertheless.
    pub windows: Option<Windows>,
    /// Additional layers, whose state does not grow with the sequence.
    pub recurrent: Option<Recurrent>,
    /// The number of layers with one gated feed-forward network, and its inner size.
    pub dense: (u32, u32),
    pub experts: Option<Experts>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub enum Attention {
    Grouped {
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        /// The number of projections of the queries' size: 1, or 2 if the output has a gate.
        queries: u32,
    },
    /// K and V of all heads as one compressed vector and one rotated key (DeepSeek-V2, 2024, section 2.1).
    Latent { heads: u32, query_latent: u32, latent: u32, rotated: u32, plain: u32, value: u32 },
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Windows {
    pub layers: u32,
    pub positions: u32,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Recurrent {
    pub layers: u32,
    /// The number of weights of one layer.
    pub weights: u32,
    /// The bytes of one layer's state of a sequence.
    pub state_bytes: u32,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Experts {
    pub layers: u32,
    pub count: u32,
    /// The number of the `count` experts that a token passes through.
    pub used: u32,
    /// The number of experts of the same size that every token passes through in addition.
    pub shared: u32,
    pub intermediate: u32,
    /// The bytes of one of their weights, scales included.
    pub weight_bytes: f64,
}

const BF16: f64 = 2.0;
/// The bytes of a weight in blocks of 32 numbers of four bits with a scale of eight bits.
const MXFP4: f64 = 4.25 / 8.0;

const fn grouped(heads: u32, kv_heads: u32, head_dim: u32) -> Attention {
    Attention::Grouped { heads, kv_heads, head_dim, queries: 1 }
}

const fn dense(name: &'static str, layers: u32, hidden: u32, attention: Attention, intermediate: u32) -> Shape {
    let dense = (layers, intermediate);
    Shape { name, hidden, vocab: 0, context_tokens: 0, layers, attention, windows: None, recurrent: None, dense, experts: None }
}

/// The shapes that are known by name, from the models' own `config.json`.
pub const SHAPES: [Shape; 8] = [
    // The paper's dummy model: its context is longer than the real one's, as the trace's prompts are.
    Shape { vocab: 32_000, context_tokens: 200_000, ..dense("llama2-70b", 80, 8192, grouped(64, 8, 128), 28_672) },
    Shape { vocab: 128_256, context_tokens: 200_000, ..dense("llama-3.1-8b", 32, 4096, grouped(32, 8, 128), 14_336) },
    Shape { vocab: 49_152, context_tokens: 8192, ..dense("smollm-135m", 30, 576, grouped(9, 3, 64), 1536) },
    Shape {
        name: "deepseek-v3",
        hidden: 7168,
        vocab: 129_280,
        context_tokens: 163_840,
        layers: 61,
        attention: Attention::Latent { heads: 128, query_latent: 1536, latent: 512, rotated: 64, plain: 128, value: 128 },
        windows: None,
        recurrent: None,
        dense: (3, 18_432),
        experts: Some(Experts { layers: 58, count: 256, used: 8, shared: 1, intermediate: 2048, weight_bytes: 1.0 }),
    },
    Shape {
        name: "gpt-oss-120b",
        hidden: 2880,
        vocab: 201_088,
        context_tokens: 131_072,
        layers: 36,
        attention: grouped(64, 8, 64),
        windows: Some(Windows { layers: 18, positions: 128 }),
        recurrent: None,
        dense: (0, 0),
        experts: Some(Experts { layers: 36, count: 128, used: 4, shared: 0, intermediate: 2880, weight_bytes: MXFP4 }),
    },
    Shape {
        name: "qwen3-30b-a3b",
        hidden: 2048,
        vocab: 151_936,
        context_tokens: 262_144,
        layers: 48,
        attention: grouped(32, 4, 128),
        windows: None,
        recurrent: None,
        dense: (0, 0),
        experts: Some(Experts { layers: 48, count: 128, used: 8, shared: 0, intermediate: 768, weight_bytes: BF16 }),
    },
    Shape {
        name: "qwen3-next-80b-a3b",
        hidden: 2048,
        vocab: 151_936,
        context_tokens: 262_144,
        layers: 12,
        attention: Attention::Grouped { heads: 16, kv_heads: 2, head_dim: 256, queries: 2 },
        windows: None,
        // Per layer: 16 key and 32 value heads of 128 numbers; queries, keys, values, gates and the output's projection; a state, all in
        // f32, of 128 × 128 numbers per value head, and the last three inputs of the convolution over 8,192 channels.
        recurrent: Some(Recurrent {
            layers: 36,
            weights: 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048,
            state_bytes: (32 * 128 * 128 + 3 * 8192) * 4,
        }),
        dense: (0, 0),
        experts: Some(Experts { layers: 48, count: 512, used: 10, shared: 1, intermediate: 512, weight_bytes: BF16 }),
    },
    Shape {
        name: "lfm2-1.2b",
        hidden: 2048,
        vocab: 65_536,
        context_tokens: 128_000,
        layers: 6,
        attention: grouped(32, 8, 64),
        windows: None,
        // Per layer: projections to two gates and the convolution's input, and of its output; the last two inputs, in f32.
        recurrent: Some(Recurrent { layers: 10, weights: 4 * 2048 * 2048 + 3 * 2048, state_bytes: 2 * 2048 * 4 }),
        dense: (16, 8192),
        experts: None,
    },
];

impl Shape {
    pub fn find(name: &str) -> Option<Shape> {
        SHAPES.into_iter().find(|shape| shape.name == name)
    }

    /// The weights of the layers that every token passes through, without experts.
    fn common_weights(&self) -> f64 {
        let (layers, intermediate) = self.dense;
        let recurrent = self.recurrent.map_or(0.0, |r| f64::from(r.layers) * f64::from(r.weights));
        let router = self.experts.map_or(0.0, |e| f64::from(e.layers) * f64::from(e.count));
        let hidden = f64::from(self.hidden);
        f64::from(self.layers) * self.attention.weights(hidden)
            + recurrent
            + hidden * (router + 3.0 * f64::from(layers) * f64::from(intermediate))
    }

    /// The weights of one expert in all layers.
    fn expert_weights(&self, experts: &Experts) -> f64 {
        f64::from(experts.layers) * 3.0 * f64::from(self.hidden) * f64::from(experts.intermediate)
    }

    /// The weights that a token passes through, without the head's.
    pub fn active_weights(&self) -> f64 {
        self.common_weights() + self.experts.map_or(0.0, |e| f64::from(e.used + e.shared) * self.expert_weights(&e))
    }

    /// The weights that a row of logits takes.
    pub fn head_weights(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocab)
    }

    /// All weights, with both ends of a tied embedding.
    pub fn weights(&self) -> f64 {
        let experts = self.experts.map_or(0.0, |e| f64::from(e.count + e.shared) * self.expert_weights(&e));
        self.common_weights() + experts + 2.0 * self.head_weights()
    }

    pub fn weight_bytes(&self) -> f64 {
        let experts = self.experts.map_or(0.0, |e| f64::from(e.count + e.shared) * self.expert_weights(&e) * e.weight_bytes);
        BF16 * (self.common_weights() + 2.0 * self.head_weights()) + experts
    }

    /// The bytes of weights, without the head's, that a step of this many tokens reads, if the experts of tokens are independent.
    pub fn bytes_read(&self, tokens: f64) -> f64 {
        let experts = self.experts.map_or(0.0, |e| {
            let missed = 1.0 - f64::from(e.used) / f64::from(e.count);
            let touched = f64::from(e.count) * (1.0 - missed.powf(tokens)) + f64::from(e.shared);
            touched * self.expert_weights(&e) * e.weight_bytes
        });
        BF16 * self.common_weights() + experts
    }

    pub fn kv_token_bytes(&self) -> u64 {
        u64::from(self.layers) * self.attention.kv_numbers() * BF16 as u64
    }

    pub fn block_bytes(&self) -> u64 {
        BLOCK_TOKENS as u64 * self.kv_token_bytes()
    }

    /// Bytes of a sequence's recurrent state.
    pub fn state_bytes(&self) -> u64 {
        self.recurrent.map_or(0, |r| u64::from(r.layers) * u64::from(r.state_bytes))
    }

    /// The bytes of K, V and state that a step reads or writes: for `kv_tokens` positions of these prompt tokens and decoding rows.
    pub fn kv_read(&self, prompt: f64, rows: f64, kv_tokens: f64) -> f64 {
        let per_layer = (self.attention.kv_numbers() as f64) * BF16;
        let (full, windowed) = self.in_windows(kv_tokens, |window| prompt + window * (rows + 1.0));
        per_layer * (full + windowed) + 2.0 * rows * self.state_bytes() as f64
    }

    /// The operations of attention and recurrence for this many tokens, which attend to `pairs` positions in all.
    pub fn attention_flops(&self, tokens: f64, pairs: f64) -> f64 {
        let (full, windowed) = self.in_windows(pairs, |window| tokens * window);
        self.attention.pair_flops() * (full + windowed) + self.state_flops() * tokens
    }

    /// `amount` in each layer that attends to everything, and at most `most(window)` in each of the others.
    fn in_windows(&self, amount: f64, most: impl Fn(f64) -> f64) -> (f64, f64) {
        let windows = self.windows.unwrap_or(Windows { layers: 0, positions: 0 });
        let windowed = amount.min(most(f64::from(windows.positions)));
        (f64::from(self.layers - windows.layers) * amount, f64::from(windows.layers) * windowed)
    }

    /// The operations of a state: a token decays it, reads a key from it, adds a product to it and reads its query, six operations per
    /// number.
    fn state_flops(&self) -> f64 {
        6.0 * self.state_bytes() as f64 / 4.0
    }
}

impl Attention {
    /// The weights of one layer.
    fn weights(self, hidden: f64) -> f64 {
        match self {
            Self::Grouped { heads, kv_heads, head_dim, queries } => {
                hidden * f64::from(head_dim) * f64::from((1 + queries) * heads + 2 * kv_heads)
            }
            Self::Latent { heads, query_latent, latent, rotated, plain, value } => {
                let [heads, queries, latent] = [heads, query_latent, latent].map(f64::from);
                let [rotated, plain, value] = [rotated, plain, value].map(f64::from);
                let queries = queries * (hidden + heads * (plain + rotated));
                let keys_and_values = hidden * (latent + rotated) + latent * heads * (plain + value);
                queries + keys_and_values + heads * value * hidden
            }
        }
    }

    /// The count of numbers that a block holds for one layer and token.
    fn kv_numbers(self) -> u64 {
        match self {
            Self::Grouped { kv_heads, head_dim, .. } => 2 * u64::from(kv_heads) * u64::from(head_dim),
            Self::Latent { latent, rotated, .. } => u64::from(latent) + u64::from(rotated),
        }
    }

    /// The operations for one pair of positions in one layer. A latent is attended to as it is, also by prompts.
    fn pair_flops(self) -> f64 {
        let numbers = match self {
            Self::Grouped { heads, head_dim, .. } => heads * 2 * head_dim,
            Self::Latent { heads, latent, rotated, .. } => heads * (2 * latent + rotated),
        };
        2.0 * f64::from(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::block::{KvDtype, KvShape};

    #[test]
    fn shapes_have_the_published_sizes() {
        // Billions of parameters in all and per token, from the models' cards; both ends of a tied embedding count.
        for (name, all, active, kv_token_bytes, state_mb) in [
            ("llama2-70b", 69.0, 69.0, 327_680, 0.0),
            ("llama-3.1-8b", 8.03, 8.03, 131_072, 0.0),
            ("smollm-135m", 0.163, 0.163, 23_040, 0.0),
            ("deepseek-v3", 671.0, 37.5, 70_272, 0.0),
            ("gpt-oss-120b", 116.8, 5.7, 73_728, 0.0),
            ("qwen3-30b-a3b", 30.5, 3.35, 98_304, 0.0),
            ("qwen3-next-80b-a3b", 79.7, 3.9, 24_576, 79.0),
            ("lfm2-1.2b", 1.30, 1.30, 12_288, 0.16),
        ] {
            let shape = Shape::find(name).unwrap();
            let near = |found: f64, published: f64| (found / published - 1.0).abs() < 0.02;
            let (found, of_token) = (shape.weights() / 1e9, (shape.active_weights() + 2.0 * shape.head_weights()) / 1e9);
            assert!(near(found, all) && near(of_token, active), "{name}: {found} {of_token}");
            assert_eq!(shape.kv_token_bytes(), kv_token_bytes, "{name}");
            assert!((shape.state_bytes() as f64 / 1e6 - state_mb).abs() < 0.05, "{name}: {}", shape.state_bytes());
        }
    }

    #[test]
    fn experts_are_read_as_tokens_use_them() {
        let shape = Shape::find("qwen3-30b-a3b").unwrap();
        let read = |tokens: f64| shape.bytes_read(tokens) / BF16;
        assert!((read(1.0) - shape.active_weights()).abs() < 1.0, "one token reads what it passes");
        let all = shape.weights() - 2.0 * shape.head_weights();
        assert!(read(16.0) < 0.75 * all && (read(1e4) / all - 1.0).abs() < 1e-6, "16 tokens miss experts, a prompt misses none");
    }

    #[test]
    fn windows_and_latents_spare_what_they_should() {
        let windowed = Shape::find("gpt-oss-120b").unwrap();
        let everywhere = Shape { windows: None, ..windowed };
        let ratio = windowed.kv_read(0.0, 1.0, 100_000.0) / everywhere.kv_read(0.0, 1.0, 100_000.0);
        assert!((0.5..0.51).contains(&ratio), "half the layers read 256 positions: {ratio}");
        let latent = Shape::find("deepseek-v3").unwrap();
        let Attention::Latent { heads, rotated, plain, value, .. } = latent.attention else { panic!("a latent") };
        let expanded = 2.0 * f64::from(latent.layers) * f64::from(heads * (plain + rotated + value)) * 1e4;
        let ratio = latent.attention_flops(1.0, 1e4) / expanded;
        assert!((3.3..3.5).contains(&ratio), "absorbed, a pair takes more operations than expanded: {ratio}");
        let shape = KvShape { layers: 61, kv_heads: 1, head_dim: 576, dtype: KvDtype::Bf16, latent: Some(512) };
        assert_eq!(latent.block_bytes(), shape.block_bytes() as u64, "a pool's blocks");
    }
}
