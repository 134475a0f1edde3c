//! Published decoder shapes, as data, from the checkpoints' own `config.json`.

use super::tokenizer;
use serde_json::{Value, json};

/// Everything that determines a decoder's tensors and their sizes, and the rest of its `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub name: &'static str,
    architecture: &'static str,
    model_type: &'static str,
    pub vocab: u32,
    pub hidden: u32,
    pub intermediate: u32,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Feed-forward layers of experts instead of one that is `intermediate` wide.
    pub experts: Option<Experts>,
    /// Whether query, key and value projections have biases.
    qkv_bias: bool,
    /// Whether there are norms over each head's query and key.
    qk_norm: bool,
    /// Whether the head is the embedding.
    tied: bool,
    pub max_positions: u32,
    rope_theta: f64,
    /// The factor of Llama 3's frequency scaling, from 8,192 original positions.
    rope_llama3_factor: Option<f64>,
    rms_norm_eps: f64,
}

/// Experts of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    pub count: u32,
    /// The number of experts per row.
    pub chosen: u32,
    /// The width of each.
    pub intermediate: u32,
}

const SHAPES: [Shape; 5] = [
    // huggingface.co/meta-llama/Llama-3.1-8B
    Shape {
        name: "llama-3.1-8b",
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        vocab: 128_256,
        hidden: 4096,
        intermediate: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        experts: None,
        qkv_bias: false,
        qk_norm: false,
        tied: false,
        max_positions: 131_072,
        rope_theta: 500_000.0,
        rope_llama3_factor: Some(8.0),
        rms_norm_eps: 1e-5,
    },
    // huggingface.co/meta-llama/Llama-3.2-1B
    Shape {
        name: "llama-3.2-1b",
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        vocab: 128_256,
        hidden: 2048,
        intermediate: 8192,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        experts: None,
        qkv_bias: false,
        qk_norm: false,
        tied: true,
        max_positions: 131_072,
        rope_theta: 500_000.0,
        rope_llama3_factor: Some(32.0),
        rms_norm_eps: 1e-5,
    },
    // huggingface.co/HuggingFaceTB/SmolLM-135M
    Shape {
        name: "smollm-135m",
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        vocab: 49_152,
        hidden: 576,
        intermediate: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        experts: None,
        qkv_bias: false,
        qk_norm: false,
        tied: true,
        max_positions: 2048,
        rope_theta: 10_000.0,
        rope_llama3_factor: None,
        rms_norm_eps: 1e-5,
    },
    // huggingface.co/Qwen/Qwen2-0.5B
    Shape {
        name: "qwen2-0.5b",
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        vocab: 151_936,
        hidden: 896,
        intermediate: 4864,
        layers: 24,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        experts: None,
        qkv_bias: true,
        qk_norm: false,
        tied: true,
        max_positions: 131_072,
        rope_theta: 1_000_000.0,
        rope_llama3_factor: None,
        rms_norm_eps: 1e-6,
    },
    // This is no published model: it has the proportions of Qwen3-30B-A3B in 1.0 billion parameters, a quarter of which a row passes
    // through.
    Shape {
        name: "qwen3-moe-1b",
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        vocab: 65_536,
        hidden: 1024,
        intermediate: 3072,
        layers: 12,
        heads: 16,
        kv_heads: 2,
        head_dim: 128,
        experts: Some(Experts { count: 64, chosen: 8, intermediate: 384 }),
        qkv_bias: false,
        qk_norm: true,
        tied: true,
        max_positions: 40_960,
        rope_theta: 1_000_000.0,
        rope_llama3_factor: None,
        rms_norm_eps: 1e-6,
    },
];

pub fn by_name(name: &str) -> Result<&'static Shape, String> {
    SHAPES.iter().find(|shape| shape.name == name).ok_or_else(|| format!("the known shapes are {}", names()))
}

pub fn names() -> String {
    SHAPES.map(|shape| shape.name).join(", ")
}

impl Shape {
    /// Every tensor's name and dimensions; a norm's weight is its one-dimensional `…norm.weight`. If the head is tied to the embedding,
    /// there is no `lm_head`.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let [vocab, hidden, intermediate] = [self.vocab, self.hidden, self.intermediate].map(|n| n as usize);
        let [q, kv] = [self.heads, self.kv_heads].map(|heads| (heads * self.head_dim) as usize);
        let mut tensors =
            vec![("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]), ("model.norm.weight".to_owned(), vec![hidden])];
        if !self.tied {
            tensors.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
        }
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            for (name, width) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
                add(&format!("self_attn.{name}.weight"), &[width, hidden]);
                if self.qkv_bias {
                    add(&format!("self_attn.{name}.bias"), &[width]);
                }
            }
            add("self_attn.o_proj.weight", &[hidden, q]);
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim as usize]);
                add("self_attn.k_norm.weight", &[self.head_dim as usize]);
            }
            let mut add_mlp = |module: &str, width: usize| {
                add(&format!("{module}.gate_proj.weight"), &[width, hidden]);
                add(&format!("{module}.up_proj.weight"), &[width, hidden]);
                add(&format!("{module}.down_proj.weight"), &[hidden, width]);
            };
            match self.experts {
                Some(experts) => {
                    (0..experts.count).for_each(|expert| add_mlp(&format!("mlp.experts.{expert}"), experts.intermediate as usize));
                    add("mlp.gate.weight", &[experts.count as usize, hidden]);
                }
                None => add_mlp("mlp", intermediate),
            }
        }
        tensors
    }

    /// `config.json` as in the published checkpoint, except for our tokenizer's special tokens.
    pub fn config(&self, torch_dtype: &str) -> Value {
        let mut config = json!({
            "architectures": [self.architecture],
            "attention_dropout": 0.0,
            "bos_token_id": tokenizer::END_OF_TEXT,
            "eos_token_id": tokenizer::END_OF_TURN,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "model_type": self.model_type,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "torch_dtype": torch_dtype,
            "use_cache": true,
            "vocab_size": self.vocab,
        });
        if self.model_type == "llama" {
            config["attention_bias"] = json!(false);
            config["head_dim"] = json!(self.head_dim);
            config["mlp_bias"] = json!(false);
            config["rope_scaling"] = Value::Null;
        } else if let Some(experts) = self.experts {
            config["attention_bias"] = json!(false);
            config["decoder_sparse_step"] = json!(1);
            config["head_dim"] = json!(self.head_dim);
            config["mlp_only_layers"] = json!([]);
            config["moe_intermediate_size"] = json!(experts.intermediate);
            config["norm_topk_prob"] = json!(true);
            config["num_experts"] = json!(experts.count);
            config["num_experts_per_tok"] = json!(experts.chosen);
        } else {
            config["use_sliding_window"] = json!(false);
            config["sliding_window"] = json!(self.max_positions);
            config["max_window_layers"] = json!(self.layers);
        }
        if let Some(factor) = self.rope_llama3_factor {
            config["rope_scaling"] = json!({
                "factor": factor,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            });
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_as_many_as_published() {
        // These are the numbers on the checkpoints' pages on the hub.
        let published = [
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.2-1b", 1_235_814_400),
            ("smollm-135m", 134_515_008),
            ("qwen2-0.5b", 494_032_768),
            // This one was counted.
            ("qwen3-moe-1b", 1_030_516_736),
        ];
        for (name, parameters) in published {
            let tensors = by_name(name).unwrap().tensors();
            assert_eq!(tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>(), parameters, "{name}");
        }
        assert!(by_name("gpt-5").unwrap_err().contains("smollm-135m"));
    }
}
