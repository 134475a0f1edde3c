//! Architectures: the names of their tensors and settings in both formats, one row each. A row inherits the values that it does not set
//! from the row that it is based on.

use crate::{GgufError, config::Settings};
use serde_json::{Map, Value, json};

pub(crate) struct Family {
    /// `general.architecture`, and the prefix of its settings.
    pub(crate) name: &'static str,
    /// The setting that a file of this family has, if several families share a name: the first match is taken.
    pub(crate) marked_by: Option<&'static str>,
    /// `architectures` and `model_type` of `config.json`.
    pub(crate) architecture: &'static str,
    pub(crate) model_type: &'static str,
    /// Whether rows of query and key heads alternate between a head's two halves, as the rotation turns neighbours there.
    pub(crate) interleaved: bool,
    /// Whether norms are stored with the 1 that is added to them.
    pub(crate) norms_plus_one: bool,
    /// The names of the norms' epsilon, in both formats.
    pub(crate) epsilon: (&'static str, &'static str),
    /// A layer's tensors whose names differ from those in [`LAYER`], which is searched after these.
    pub(crate) layer: &'static [(&'static str, &'static str)],
    pub(crate) experts: Option<ExpertNames>,
    /// Further settings of `config.json`.
    pub(crate) more: fn(&Sizes, &Settings<'_>) -> Result<Value, GgufError>,
}

/// The names of a layer's experts.
#[derive(Clone, Copy)]
pub(crate) struct ExpertNames {
    /// The block in the layer, and its router.
    pub(crate) block: &'static str,
    pub(crate) router: &'static str,
    /// The gate, up and down projections of each expert; if `None`, those of all experts are in one tensor, as GPT-OSS stores them.
    pub(crate) projections: Option<[&'static str; 3]>,
    /// The block's other tensors: the corrections of the router's scores, a shared expert and its gate.
    pub(crate) besides: &'static [(&'static str, &'static str)],
}

/// The sizes from which settings follow.
pub(crate) struct Sizes {
    pub(crate) layers: u64,
    pub(crate) hidden: u64,
    pub(crate) heads: u64,
    pub(crate) head_dim: u64,
    pub(crate) window: Option<u64>,
}

/// A tensor's place in the directory.
#[derive(PartialEq, Debug)]
pub(crate) enum Place {
    One(String),
    /// The module of a layer's experts, each of which has a module `{n}` with this projection.
    EachExpert {
        module: String,
        projection: &'static str,
    },
    /// A projection of all experts in the module, whose tensors are made from several of the file's: the gate's come with those that it
    /// gates.
    AllExperts {
        module: String,
        projection: Stacked,
        is_bias: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Stacked {
    Gate,
    Up,
    Down,
}

/// The tensors of a layer, without `.weight` and `.bias`.
const LAYER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
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

/// Norms around both parts of a layer.
const GEMMA_NORMS: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Norms only after both parts of a layer.
const NORMS_AFTER: &[(&str, &str)] =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

const QWEN_EXPERTS: ExpertNames = ExpertNames {
    block: "mlp",
    router: "gate",
    projections: Some(["gate_proj", "up_proj", "down_proj"]),
    besides: &[
        ("ffn_gate_shexp", "shared_expert.gate_proj"),
        ("ffn_up_shexp", "shared_expert.up_proj"),
        ("ffn_down_shexp", "shared_expert.down_proj"),
        ("ffn_gate_inp_shexp", "shared_expert_gate"),
    ],
};

const MIXTRAL_EXPERTS: ExpertNames =
    ExpertNames { block: "block_sparse_moe", router: "gate", projections: Some(["w1", "w3", "w2"]), besides: &[] };

const LLAMA: Family = Family {
    name: "llama",
    marked_by: None,
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    interleaved: true,
    norms_plus_one: false,
    epsilon: ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    layer: &[],
    experts: None,
    more: |_, _| Ok(json!({})),
};

const QWEN2: Family = Family {
    name: "qwen2",
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    interleaved: false,
    more: |_, _| Ok(json!({"use_sliding_window": false})),
    ..LLAMA
};

const OLMO2: Family =
    Family { name: "olmo2", architecture: "Olmo2ForCausalLM", model_type: "olmo2", interleaved: false, layer: NORMS_AFTER, ..LLAMA };

pub(crate) static FAMILIES: [Family; 22] = [
    Family {
        marked_by: Some("expert_count"),
        architecture: "MixtralForCausalLM",
        model_type: "mixtral",
        experts: Some(MIXTRAL_EXPERTS),
        more: |_, settings| experts(settings, "num_local_experts"),
        ..LLAMA
    },
    LLAMA,
    Family { name: "mistral3", architecture: "Ministral3ForCausalLM", model_type: "ministral3", ..LLAMA },
    QWEN2,
    Family { name: "qwen3", architecture: "Qwen3ForCausalLM", model_type: "qwen3", ..QWEN2 },
    Family {
        name: "qwen2moe",
        architecture: "Qwen2MoeForCausalLM",
        model_type: "qwen2_moe",
        experts: Some(QWEN_EXPERTS),
        more: |_, settings| {
            let mut more = experts(settings, "num_experts")?;
            more["qkv_bias"] = json!(settings.has("blk.0.attn_q.bias"));
            more["shared_expert_intermediate_size"] = json!(settings.must("expert_shared_feed_forward_length")?);
            more["use_sliding_window"] = json!(false);
            Ok(more)
        },
        ..QWEN2
    },
    Family {
        name: "qwen3moe",
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        experts: Some(QWEN_EXPERTS),
        more: |_, settings| {
            let mut more = experts(settings, "num_experts")?;
            // The file does not say so, and all published models have it.
            more["norm_topk_prob"] = json!(settings.flag("expert_weights_norm")?.unwrap_or(true));
            more["use_sliding_window"] = json!(false);
            Ok(more)
        },
        ..QWEN2
    },
    Family {
        name: "gemma2",
        architecture: "Gemma2ForCausalLM",
        model_type: "gemma2",
        interleaved: false,
        norms_plus_one: true,
        layer: GEMMA_NORMS,
        // Every other layer attends to everything. The model of 46 layers scales by its width.
        more: |sizes, settings| gemma(sizes, settings, 2, sizes.layers == 46),
        ..LLAMA
    },
    Family {
        name: "gemma3",
        architecture: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        interleaved: false,
        norms_plus_one: true,
        layer: GEMMA_NORMS,
        more: |sizes, settings| {
            let mut more = gemma(sizes, settings, 6, sizes.layers == 62)?;
            more["rope_local_base_freq"] = json!(10_000.0);
            Ok(more)
        },
        ..LLAMA
    },
    Family {
        name: "phi3",
        architecture: "Phi3ForCausalLM",
        model_type: "phi3",
        interleaved: false,
        layer: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        more: |sizes, settings| {
            // Phi-4 has no window, which its file encodes as 0.
            Ok(json!({
                "sliding_window": sizes.window.filter(|window| *window > 0),
                "original_max_position_embeddings": settings.number("rope.scaling.original_context_length")?,
            }))
        },
        ..LLAMA
    },
    Family { marked_by: Some("attention.sliding_window"), architecture: "Olmo3ForCausalLM", model_type: "olmo3", more: windows, ..OLMO2 },
    OLMO2,
    Family {
        name: "granite",
        architecture: "GraniteForCausalLM",
        model_type: "granite",
        more: |_, settings| {
            let scale = |key: &str| Ok::<_, GgufError>(settings.float(key)?.map_or(1.0, shortest));
            Ok(json!({
                "attention_multiplier": scale("attention.scale")?,
                "embedding_multiplier": scale("embedding_scale")?,
                "residual_multiplier": scale("residual_scale")?,
                "logits_scaling": scale("logit_scale")?,
            }))
        },
        ..LLAMA
    },
    Family {
        name: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        more: |_, _| Ok(json!({"no_rope_layer_interval": 4})),
        ..LLAMA
    },
    Family {
        name: "glm4",
        architecture: "Glm4ForCausalLM",
        model_type: "glm4",
        interleaved: false,
        layer: &[
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
        ],
        ..LLAMA
    },
    Family {
        name: "glm4moe",
        architecture: "Glm4MoeForCausalLM",
        model_type: "glm4_moe",
        interleaved: false,
        layer: &[("post_attention_norm", "post_attention_layernorm")],
        experts: Some(ExpertNames {
            besides: &[
                ("exp_probs_b", "gate.e_score_correction_bias"),
                ("ffn_gate_shexp", "shared_experts.gate_proj"),
                ("ffn_up_shexp", "shared_experts.up_proj"),
                ("ffn_down_shexp", "shared_experts.down_proj"),
            ],
            ..QWEN_EXPERTS
        }),
        more: |_, settings| {
            let mut more = experts(settings, "n_routed_experts")?;
            let groups = |key: &str| Ok::<_, GgufError>(settings.number(key)?.unwrap_or(1));
            more["n_shared_experts"] = json!(settings.number("expert_shared_count")?.unwrap_or(1));
            more["first_k_dense_replace"] = json!(settings.number("leading_dense_block_count")?.unwrap_or(0));
            more["n_group"] = json!(groups("expert_group_count")?);
            more["topk_group"] = json!(groups("expert_group_used_count")?);
            more["norm_topk_prob"] = json!(settings.flag("expert_weights_norm")?.unwrap_or(true));
            more["routed_scaling_factor"] = json!(settings.float("expert_weights_scale")?.map_or(1.0, shortest));
            more["use_qk_norm"] = json!(settings.has("blk.0.attn_q_norm.weight"));
            Ok(more)
        },
        ..LLAMA
    },
    Family {
        name: "cohere2",
        architecture: "Cohere2ForCausalLM",
        model_type: "cohere2",
        interleaved: false,
        epsilon: ("attention.layer_norm_epsilon", "layer_norm_eps"),
        more: |sizes, settings| Ok(json!({"logit_scale": settings.float("logit_scale")?.map(shortest), "sliding_window": sizes.window})),
        ..LLAMA
    },
    Family {
        name: "starcoder2",
        architecture: "Starcoder2ForCausalLM",
        model_type: "starcoder2",
        interleaved: false,
        epsilon: ("attention.layer_norm_epsilon", "norm_epsilon"),
        layer: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        more: |_, settings| {
            Ok(json!({"hidden_act": "gelu_pytorch_tanh", "sliding_window": null, "use_bias": settings.has("blk.0.attn_q.bias")}))
        },
        ..LLAMA
    },
    Family {
        name: "exaone4",
        architecture: "Exaone4ForCausalLM",
        model_type: "exaone4",
        interleaved: false,
        layer: NORMS_AFTER,
        more: windows,
        ..LLAMA
    },
    Family {
        name: "seed_oss",
        architecture: "SeedOssForCausalLM",
        model_type: "seed_oss",
        interleaved: false,
        layer: &[("post_attention_norm", "post_attention_layernorm")],
        more: |_, settings| Ok(json!({"attention_out_bias": settings.has("blk.0.attn_output.bias")})),
        ..LLAMA
    },
    Family {
        name: "minimax-m2",
        architecture: "MiniMaxM2ForCausalLM",
        model_type: "minimax_m2",
        interleaved: false,
        experts: Some(ExpertNames { besides: &[("exp_probs_b", "e_score_correction_bias")], ..MIXTRAL_EXPERTS }),
        more: |_, settings| experts(settings, "num_local_experts"),
        ..LLAMA
    },
    Family {
        name: "gpt-oss",
        architecture: "GptOssForCausalLM",
        model_type: "gpt_oss",
        interleaved: false,
        layer: &[("post_attention_norm", "post_attention_layernorm"), ("attn_sinks", "self_attn.sinks")],
        experts: Some(ExpertNames { router: "router", projections: None, ..QWEN_EXPERTS }),
        more: |sizes, settings| {
            let mut more = experts(settings, "num_local_experts")?;
            more["intermediate_size"] = json!(settings.must("expert_feed_forward_length")?);
            more["sliding_window"] = json!(sizes.window);
            more["rope_scaling"] = json!({"truncate": false});
            // All experts have one form.
            if settings.is_mxfp4("blk.0.ffn_down_exps.weight") {
                more["quantization_config"] = json!({"quant_method": "mxfp4"});
            }
            Ok(more)
        },
        ..LLAMA
    },
];

/// The settings of a model in which each layer but every `period`th attends to a window.
fn gemma(sizes: &Sizes, settings: &Settings<'_>, period: u64, scaled_by_width: bool) -> Result<Value, GgufError> {
    let kind = |layer| if (layer + 1) % period == 0 { "full_attention" } else { "sliding_attention" };
    Ok(json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": (0..sizes.layers).map(kind).collect::<Vec<_>>(),
        "sliding_window": sizes.window.unwrap_or(4096),
        "query_pre_attn_scalar": if scaled_by_width { sizes.hidden / sizes.heads } else { sizes.head_dim },
        "attn_logit_softcapping": settings.float("attn_logit_softcapping")?,
        "final_logit_softcapping": settings.float("final_logit_softcapping")?,
    }))
}

/// The window, and the layers that attend to it, if the file lists them.
fn windows(sizes: &Sizes, settings: &Settings<'_>) -> Result<Value, GgufError> {
    let mut more = Map::from_iter([("sliding_window".into(), json!(sizes.window))]);
    if let Some(flags) = settings.flags("attention.sliding_window_pattern")? {
        let kind = |windowed: &bool| if *windowed { "sliding_attention" } else { "full_attention" };
        more.insert("layer_types".into(), flags.iter().map(kind).collect());
    }
    Ok(Value::Object(more))
}

/// The settings of experts. `count`: the key of their number.
fn experts(settings: &Settings<'_>, count: &str) -> Result<Value, GgufError> {
    let mut more = json!({"num_experts_per_tok": settings.must("expert_used_count")?});
    more[count] = json!(settings.must("expert_count")?);
    if let Some(width) = settings.number("expert_feed_forward_length")? {
        more["moe_intermediate_size"] = json!(width);
    }
    Ok(more)
}

/// The intended number of a setting, which is f32 in the file: the shortest one that rounds to it.
pub(crate) fn shortest(number: f64) -> f64 {
    (number as f32).to_string().parse().unwrap_or(number)
}

impl Family {
    /// The family of a file whose architecture is `name`; `has` tells whether the file has a setting.
    pub(crate) fn find(name: &str, has: impl Fn(&str) -> bool) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.name == name && family.marked_by.is_none_or(&has))
    }

    /// The place of a tensor, or `None` if the family has no such tensor.
    pub(crate) fn place(&self, tensor: &str) -> Option<Place> {
        let of_model = match tensor {
            "token_embd.weight" => Some("model.embed_tokens.weight"),
            "output_norm.weight" => Some("model.norm.weight"),
            "output_norm.bias" => Some("model.norm.bias"),
            "output.weight" => Some("lm_head.weight"),
            _ => None,
        };
        if let Some(name) = of_model {
            return Some(Place::One(name.into()));
        }
        let (layer, part) = tensor.strip_prefix("blk.")?.split_once('.')?;
        let (part, kind) = part.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias"))?;
        layer.parse::<u32>().ok()?;
        if let Some(place) = self.experts.and_then(|experts| experts.place(layer, part, kind)) {
            return Some(place);
        }
        let (_, name) = self.layer.iter().chain(&LAYER).find(|(short, _)| *short == part)?;
        let kind = if *name == "self_attn.sinks" { String::new() } else { format!(".{kind}") };
        Some(Place::One(format!("model.layers.{layer}.{name}{kind}")))
    }
}

impl ExpertNames {
    fn place(self, layer: &str, part: &str, kind: &str) -> Option<Place> {
        let block = format!("model.layers.{layer}.{}", self.block);
        let nth = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"].iter().position(|name| *name == part);
        match (nth, self.projections) {
            (Some(nth), Some(projections)) => {
                (kind == "weight").then(|| Place::EachExpert { module: format!("{block}.experts"), projection: projections[nth] })
            }
            (Some(nth), None) => Some(Place::AllExperts {
                module: format!("{block}.experts"),
                projection: [Stacked::Gate, Stacked::Up, Stacked::Down][nth],
                is_bias: kind == "bias",
            }),
            (None, _) if part == "ffn_gate_inp" => Some(Place::One(format!("{block}.{}.{kind}", self.router))),
            (None, _) => {
                let (_, name) = self.besides.iter().find(|(short, _)| *short == part)?;
                // The corrections are not a module's bias, but a vector of that name.
                let kind = if part == "exp_probs_b" { String::new() } else { format!(".{kind}") };
                Some(Place::One(format!("{block}.{name}{kind}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_the_names_of_their_family() {
        let family = |name: &str, has: &'static str| Family::find(name, |key| key == has).unwrap();
        let name = |family: &Family, tensor: &str| match family.place(tensor) {
            Some(Place::One(name)) => Some(name),
            _ => None,
        };
        let of = |family_name: &str, tensor: &str| name(family(family_name, ""), tensor);
        assert_eq!(of("qwen2", "blk.11.attn_q.bias").unwrap(), "model.layers.11.self_attn.q_proj.bias");
        assert_eq!(of("llama", "blk.0.ffn_norm.weight").unwrap(), "model.layers.0.post_attention_layernorm.weight");
        assert_eq!(of("gemma3", "blk.0.ffn_norm.weight").unwrap(), "model.layers.0.pre_feedforward_layernorm.weight");
        assert_eq!(of("llama", "output.weight").unwrap(), "lm_head.weight");
        assert_eq!(of("gpt-oss", "blk.3.attn_sinks.weight").unwrap(), "model.layers.3.self_attn.sinks");
        assert_eq!(of("minimax-m2", "blk.0.exp_probs_b.bias").unwrap(), "model.layers.0.block_sparse_moe.e_score_correction_bias");
        for odd in ["blk.x.attn_q.weight", "blk.0.attn_q.scale", "blk.0.ssm_a", "rope_freqs.weight", "blk.0.ffn_gate_exps.weight"] {
            assert_eq!(of("llama", odd), None, "{odd}");
        }
        let mixtral = family("llama", "expert_count");
        let module = "model.layers.2.block_sparse_moe.experts".to_owned();
        assert_eq!(mixtral.place("blk.2.ffn_up_exps.weight"), Some(Place::EachExpert { module, projection: "w3" }));
        assert_eq!(family("olmo2", "attention.sliding_window").architecture, "Olmo3ForCausalLM");
        assert!(Family::find("mamba", |_| true).is_none());
    }
}
