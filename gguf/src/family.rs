//! Architectures: what their tensors and settings are called in each of the two worlds. A row each.

use serde_json::{Value, json};

pub(crate) struct Family {
    /// `general.architecture`, and the prefix of its settings.
    pub(crate) name: &'static str,
    /// `architectures` and `model_type` of `config.json`.
    pub(crate) architecture: &'static str,
    pub(crate) model_type: &'static str,
    /// Rows of query and key heads alternate between a head's two halves: the rotation turns neighbours there.
    pub(crate) interleaved: bool,
    /// Norms are stored with the 1 that is added to them.
    pub(crate) norms_plus_one: bool,
    /// A layer's norms besides those of attention.
    pub(crate) norms: &'static [(&'static str, &'static str)],
    /// Settings that follow from a model's sizes.
    pub(crate) more: fn(&Sizes) -> Value,
}

/// Sizes that settings follow from.
pub(crate) struct Sizes {
    pub(crate) layers: u64,
    pub(crate) hidden: u64,
    pub(crate) heads: u64,
    pub(crate) head_dim: u64,
    pub(crate) window: Option<u64>,
    pub(crate) attention_cap: Option<f64>,
    pub(crate) final_cap: Option<f64>,
}

const LLAMAS: &[(&str, &str)] = &[("ffn_norm", "post_attention_layernorm")];
const GEMMAS: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

pub(crate) const FAMILIES: [Family; 5] = [
    Family {
        name: "llama",
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        interleaved: true,
        norms_plus_one: false,
        norms: LLAMAS,
        more: |_| json!({"hidden_act": "silu"}),
    },
    Family {
        name: "qwen2",
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        interleaved: false,
        norms_plus_one: false,
        norms: LLAMAS,
        more: |_| json!({"hidden_act": "silu", "use_sliding_window": false}),
    },
    Family {
        name: "qwen3",
        architecture: "Qwen3ForCausalLM",
        model_type: "qwen3",
        interleaved: false,
        norms_plus_one: false,
        norms: LLAMAS,
        more: |_| json!({"hidden_act": "silu", "use_sliding_window": false}),
    },
    Family {
        name: "gemma2",
        architecture: "Gemma2ForCausalLM",
        model_type: "gemma2",
        interleaved: false,
        norms_plus_one: true,
        norms: GEMMAS,
        more: |sizes| {
            // Every other layer attends to everything. The model of 46 layers scales by its width.
            gemma(sizes, 2, sizes.layers == 46)
        },
    },
    Family {
        name: "gemma3",
        architecture: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        interleaved: false,
        norms_plus_one: true,
        norms: GEMMAS,
        more: |sizes| {
            let mut settings = gemma(sizes, 6, sizes.layers == 62);
            settings["rope_local_base_freq"] = json!(10_000.0);
            settings
        },
    },
];

/// Each layer but every `period`th attends to a window.
fn gemma(sizes: &Sizes, period: u64, scaled_by_width: bool) -> Value {
    let kind = |layer| if (layer + 1) % period == 0 { "full_attention" } else { "sliding_attention" };
    json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": (0..sizes.layers).map(kind).collect::<Vec<_>>(),
        "sliding_window": sizes.window.unwrap_or(4096),
        "query_pre_attn_scalar": if scaled_by_width { sizes.hidden / sizes.heads } else { sizes.head_dim },
        "attn_logit_softcapping": sizes.attention_cap,
        "final_logit_softcapping": sizes.final_cap,
    })
}

/// A layer's tensors that all families have, without `.weight` and `.bias`.
const LAYER: [(&str, &str); 10] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

impl Family {
    pub(crate) fn find(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.name == name)
    }

    /// The Hugging Face name of a tensor, or `None` if the family has no such tensor.
    pub(crate) fn tensor(&self, name: &str) -> Option<String> {
        match name {
            "token_embd.weight" => return Some("model.embed_tokens.weight".into()),
            "output_norm.weight" => return Some("model.norm.weight".into()),
            "output.weight" => return Some("lm_head.weight".into()),
            _ => {}
        }
        let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, kind) = part.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias"))?;
        let (_, name) = LAYER.iter().chain(self.norms).find(|(short, _)| *short == part)?;
        layer.parse::<u32>().ok()?;
        Some(format!("model.layers.{layer}.{name}.{kind}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_the_names_of_their_family() {
        let name = |family: &str, tensor: &str| Family::find(family).unwrap().tensor(tensor);
        assert_eq!(name("qwen2", "blk.11.attn_q.bias").unwrap(), "model.layers.11.self_attn.q_proj.bias");
        assert_eq!(name("llama", "blk.0.ffn_norm.weight").unwrap(), "model.layers.0.post_attention_layernorm.weight");
        assert_eq!(name("gemma3", "blk.0.ffn_norm.weight").unwrap(), "model.layers.0.pre_feedforward_layernorm.weight");
        assert_eq!(name("llama", "output.weight").unwrap(), "lm_head.weight");
        for odd in ["blk.x.attn_q.weight", "blk.0.attn_q.scale", "blk.0.ssm_a", "rope_freqs.weight"] {
            assert_eq!(name("llama", odd), None, "{odd}");
        }
    }
}
