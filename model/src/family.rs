//! The differences between model families: one row each, in these [columns]. A row inherits the columns that it does not set from the row
//! that it is based on.

mod columns;

pub(crate) use columns::{
    DeltaStorage, ExpertRule, ExpertStorage, Factor, Family, Flag, GroupRank, GroupRule, Mlp, NormKind, NormNames, QkNorm, Recurrence,
    RopeRule, Scores, SharedExpert, SharedWidth, WidthRule, WindowRule,
};

/// The usual names of a gate, the projection that it multiplies, and the projection of the product.
pub(crate) const GATED: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// The keys of the number of experts; transformers 5 writes the second one for either family.
const EXPERT_COUNTS: [&str; 2] = ["num_experts", "num_local_experts"];

const MIXTRAL_EXPERTS: ExpertRule = ExpertRule {
    count: EXPERT_COUNTS,
    chosen: "num_experts_per_tok",
    intermediate: "intermediate_size",
    scores: Scores::Softmax,
    correction: None,
    groups: None,
    is_normalized: Flag::Always,
    factor: Factor::One,
    shared: None,
    block: "block_sparse_moe",
    router: "gate",
    storage: ExpertStorage::Apart(["w1", "w3", "w2"]),
    has_biases: false,
};

const QWEN3_EXPERTS: ExpertRule = ExpertRule {
    intermediate: "moe_intermediate_size",
    is_normalized: Flag::Key("norm_topk_prob"),
    block: "mlp",
    storage: ExpertStorage::Apart(GATED),
    ..MIXTRAL_EXPERTS
};

const QWEN2_EXPERTS: ExpertRule = ExpertRule {
    shared: Some(SharedExpert {
        name: "shared_expert",
        width: SharedWidth::Key("shared_expert_intermediate_size"),
        gate: Some("shared_expert_gate"),
    }),
    ..QWEN3_EXPERTS
};

const DEEPSEEK_EXPERTS: ExpertRule = ExpertRule {
    count: ["n_routed_experts", "num_local_experts"],
    scores: Scores::Sigmoid,
    correction: Some("gate.e_score_correction_bias"),
    groups: Some(GroupRule { keys: ["n_group", "topk_group"], rank: GroupRank::TwoBest, method: "noaux_tc", without: None }),
    factor: Factor::Key("routed_scaling_factor"),
    shared: Some(SharedExpert { name: "shared_experts", width: SharedWidth::TimesKey("n_shared_experts"), gate: None }),
    ..QWEN3_EXPERTS
};

const DEEPSEEK2_EXPERTS: ExpertRule = ExpertRule {
    scores: Scores::Softmax,
    correction: None,
    groups: Some(GroupRule {
        keys: ["n_group", "topk_group"],
        rank: GroupRank::Best,
        method: "group_limited_greedy",
        without: Some("greedy"),
    }),
    is_normalized: Flag::Never,
    ..DEEPSEEK_EXPERTS
};

const BEFORE: NormNames = NormNames {
    before_attention: Some("input_layernorm"),
    after_attention: None,
    before_mlp: Some("post_attention_layernorm"),
    after_mlp: None,
};
const AFTER: NormNames = NormNames {
    before_attention: None,
    after_attention: Some("post_attention_layernorm"),
    before_mlp: None,
    after_mlp: Some("post_feedforward_layernorm"),
};
const AROUND: NormNames = NormNames {
    before_attention: Some("input_layernorm"),
    after_attention: Some("post_attention_layernorm"),
    before_mlp: Some("pre_feedforward_layernorm"),
    after_mlp: Some("post_feedforward_layernorm"),
};

const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    defaults: r#"{"rms_norm_eps": 1e-6, "tie_word_embeddings": false}"#,
    older_keys: &[],
    norm: NormKind::Rms,
    norm_epsilon: "rms_norm_eps",
    norms: BEFORE,
    final_norm: "norm",
    is_parallel: false,
    has_fused_qkv: false,
    qkv_bias: Flag::Key("attention_bias"),
    has_output_gate: false,
    output: "self_attn.o_proj",
    output_bias: Flag::Key("attention_bias"),
    qk_norm: QkNorm::None,
    qk_norm_names: ["self_attn.q_norm", "self_attn.k_norm"],
    has_latent: false,
    recurrence: None,
    window: WindowRule::Never,
    rope: RopeRule::Everywhere,
    is_interleaved: false,
    score_factor: Factor::One,
    score_cap: None,
    has_sinks: false,
    has_query_growth: false,
    mlp: Mlp::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
    mlp_width: WidthRule::AsStored,
    experts: None,
    mlp_bias: Flag::Key("mlp_bias"),
    activation: "hidden_act",
    gate_clamp: None,
    embedding_factor: Factor::One,
    residual_factor: Factor::One,
    logit_factor: Factor::One,
    logit_cap: None,
};

const MISTRAL: Family = Family {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    qkv_bias: Flag::Never,
    output_bias: Flag::Never,
    mlp_bias: Flag::Never,
    window: WindowRule::Everywhere,
    ..LLAMA
};

const GEMMA2: Family = Family {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    defaults: r#"{
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0
    }"#,
    norm: NormKind::RmsPlusOne,
    norms: AROUND,
    window: WindowRule::AllBut(2),
    score_factor: Factor::InverseRootKey("query_pre_attn_scalar"),
    score_cap: Some("attn_logit_softcapping"),
    mlp_bias: Flag::Never,
    activation: "hidden_activation",
    embedding_factor: Factor::RootOfHidden,
    logit_cap: Some("final_logit_softcapping"),
    ..LLAMA
};

const OLMO2: Family = Family {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    defaults: r#"{"rms_norm_eps": 1e-5, "tie_word_embeddings": false}"#,
    norms: AFTER,
    qk_norm: QkNorm::All,
    mlp_bias: Flag::Never,
    ..LLAMA
};

const QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    defaults: r#"{"rms_norm_eps": 1e-6, "tie_word_embeddings": false, "head_dim": 128}"#,
    mlp_bias: Flag::Never,
    qk_norm: QkNorm::Heads,
    window: WindowRule::IfUsed,
    ..LLAMA
};

const QWEN3_NEXT: Family = Family {
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    defaults: r#"{
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": true
    }"#,
    norm: NormKind::RmsPlusOne,
    has_output_gate: true,
    recurrence: Some(Recurrence::DeltaRule(DeltaStorage::ByKeyHead)),
    window: WindowRule::Never,
    experts: Some(QWEN2_EXPERTS),
    ..QWEN3
};

const DEEPSEEK2: Family = Family {
    architecture: "DeepseekV2ForCausalLM",
    model_type: "deepseek_v2",
    defaults: r#"{
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0, "topk_method": "greedy"
    }"#,
    has_latent: true,
    experts: Some(DEEPSEEK2_EXPERTS),
    ..LLAMA
};

const QWEN3_5: Family = Family {
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    defaults: r#"{
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32
    }"#,
    recurrence: Some(Recurrence::DeltaRule(DeltaStorage::Apart)),
    rope: RopeRule::Axes,
    experts: None,
    ..QWEN3_NEXT
};

pub(crate) static FAMILIES: [Family; 29] = [
    LLAMA,
    MISTRAL,
    Family {
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        qkv_bias: Flag::Always,
        output_bias: Flag::Never,
        mlp_bias: Flag::Never,
        window: WindowRule::IfUsed,
        ..LLAMA
    },
    QWEN3,
    GEMMA2,
    Family {
        architecture: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        defaults: r#"{
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0
        }"#,
        qk_norm: QkNorm::Heads,
        window: WindowRule::AllBut(6),
        rope: RopeRule::ByWindow { local_theta: "rope_local_base_freq" },
        score_cap: None,
        ..GEMMA2
    },
    Family {
        architecture: "Phi3ForCausalLM",
        model_type: "phi3",
        defaults: r#"{"rms_norm_eps": 1e-5, "tie_word_embeddings": false, "original_max_position_embeddings": 4096}"#,
        has_fused_qkv: true,
        qkv_bias: Flag::Never,
        output_bias: Flag::Never,
        mlp: Mlp::FusedGate,
        mlp_bias: Flag::Never,
        window: WindowRule::Everywhere,
        ..LLAMA
    },
    OLMO2,
    Family {
        architecture: "Olmo3ForCausalLM",
        model_type: "olmo3",
        defaults: r#"{"rms_norm_eps": 1e-5, "tie_word_embeddings": false, "sliding_window": 4096, "rope_theta": 500000.0}"#,
        window: WindowRule::AllBut(4),
        rope: RopeRule::ByWindow { local_theta: "rope_theta" },
        ..OLMO2
    },
    Family {
        architecture: "GraniteForCausalLM",
        model_type: "granite",
        defaults: r#"{
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0
        }"#,
        score_factor: Factor::Key("attention_multiplier"),
        embedding_factor: Factor::Key("embedding_multiplier"),
        residual_factor: Factor::Key("residual_multiplier"),
        logit_factor: Factor::InverseKey("logits_scaling"),
        ..LLAMA
    },
    Family {
        architecture: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        defaults: r#"{"rms_norm_eps": 1e-6, "tie_word_embeddings": true, "num_key_value_heads": 4, "rope_theta": 2000000.0}"#,
        window: WindowRule::IfUsed,
        rope: RopeRule::ExceptListed,
        ..LLAMA
    },
    Family {
        architecture: "Glm4ForCausalLM",
        model_type: "glm4",
        defaults: r#"{
            "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": false, "head_dim": 128, "num_key_value_heads": 2, "attention_bias": true,
            "partial_rotary_factor": 0.5
        }"#,
        norms: NormNames {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_self_attn_layernorm"),
            before_mlp: Some("post_attention_layernorm"),
            after_mlp: Some("post_mlp_layernorm"),
        },
        output_bias: Flag::Never,
        is_interleaved: true,
        mlp: Mlp::FusedGate,
        mlp_bias: Flag::Never,
        ..LLAMA
    },
    Family {
        architecture: "Cohere2ForCausalLM",
        model_type: "cohere2",
        defaults: r#"{"layer_norm_eps": 1e-5, "tie_word_embeddings": true, "sliding_window": 4096, "logit_scale": 0.0625}"#,
        norm: NormKind::Layer { has_bias: false },
        norm_epsilon: "layer_norm_eps",
        norms: NormNames { before_attention: Some("input_layernorm"), after_attention: None, before_mlp: None, after_mlp: None },
        is_parallel: true,
        mlp_bias: Flag::Never,
        window: WindowRule::AllBut(4),
        rope: RopeRule::Windowed,
        is_interleaved: true,
        logit_factor: Factor::Key("logit_scale"),
        ..LLAMA
    },
    Family {
        architecture: "Starcoder2ForCausalLM",
        model_type: "starcoder2",
        defaults: r#"{
            "norm_epsilon": 1e-5, "tie_word_embeddings": true, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "use_bias": true
        }"#,
        norm: NormKind::Layer { has_bias: true },
        norm_epsilon: "norm_epsilon",
        qkv_bias: Flag::Key("use_bias"),
        output_bias: Flag::Key("use_bias"),
        window: WindowRule::Everywhere,
        mlp: Mlp::Plain,
        mlp_bias: Flag::Key("use_bias"),
        ..LLAMA
    },
    Family {
        architecture: "Exaone4ForCausalLM",
        model_type: "exaone4",
        defaults: r#"{"rms_norm_eps": 1e-5, "tie_word_embeddings": false, "num_key_value_heads": 32, "sliding_window": 4096}"#,
        norms: AFTER,
        qkv_bias: Flag::Never,
        output_bias: Flag::Never,
        qk_norm: QkNorm::Heads,
        window: WindowRule::AllBut(4),
        rope: RopeRule::Windowed,
        mlp_bias: Flag::Never,
        ..LLAMA
    },
    Family {
        architecture: "SeedOssForCausalLM",
        model_type: "seed_oss",
        defaults: r#"{"rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true}"#,
        output_bias: Flag::Key("attention_out_bias"),
        ..LLAMA
    },
    Family {
        architecture: "Ministral3ForCausalLM",
        model_type: "ministral3",
        defaults: r#"{"rms_norm_eps": 1e-5, "tie_word_embeddings": false, "num_key_value_heads": 8, "head_dim": 128}"#,
        has_query_growth: true,
        ..MISTRAL
    },
    Family {
        architecture: "MixtralForCausalLM",
        model_type: "mixtral",
        defaults: r#"{
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "num_key_value_heads": 8, "num_experts_per_tok": 2
        }"#,
        experts: Some(MIXTRAL_EXPERTS),
        ..MISTRAL
    },
    Family {
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        defaults: r#"{
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 4, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": false
        }"#,
        experts: Some(QWEN3_EXPERTS),
        ..QWEN3
    },
    Family {
        architecture: "Qwen2MoeForCausalLM",
        model_type: "qwen2_moe",
        defaults: r#"{
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": false, "qkv_bias": true
        }"#,
        qkv_bias: Flag::Key("qkv_bias"),
        output_bias: Flag::Never,
        mlp_bias: Flag::Never,
        window: WindowRule::IfUsed,
        experts: Some(QWEN2_EXPERTS),
        ..LLAMA
    },
    Family {
        architecture: "Glm4MoeForCausalLM",
        model_type: "glm4_moe",
        defaults: r#"{
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0
        }"#,
        output_bias: Flag::Never,
        qk_norm: QkNorm::HeadsIf("use_qk_norm"),
        mlp_bias: Flag::Never,
        experts: Some(DEEPSEEK_EXPERTS),
        ..LLAMA
    },
    Family {
        architecture: "MiniMaxM2ForCausalLM",
        model_type: "minimax_m2",
        defaults: r#"{
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0,
            "num_local_experts": 256, "num_experts_per_tok": 8
        }"#,
        qkv_bias: Flag::Never,
        output_bias: Flag::Never,
        qk_norm: QkNorm::All,
        mlp_bias: Flag::Never,
        experts: Some(ExpertRule { scores: Scores::Sigmoid, correction: Some("e_score_correction_bias"), ..MIXTRAL_EXPERTS }),
        ..LLAMA
    },
    Family {
        architecture: "GptOssForCausalLM",
        model_type: "gpt_oss",
        defaults: r#"{
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": true,
            "sliding_window": 128, "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0
        }"#,
        window: WindowRule::AllBut(2),
        has_sinks: true,
        mlp_bias: Flag::Never,
        gate_clamp: Some(["swiglu_alpha", "swiglu_limit"]),
        experts: Some(ExpertRule {
            scores: Scores::ChosenSoftmax,
            is_normalized: Flag::Never,
            block: "mlp",
            router: "router",
            storage: ExpertStorage::Stacked,
            has_biases: true,
            ..MIXTRAL_EXPERTS
        }),
        ..LLAMA
    },
    DEEPSEEK2,
    Family {
        architecture: "DeepseekV3ForCausalLM",
        model_type: "deepseek_v3",
        defaults: r#"{
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": true,
            "routed_scaling_factor": 2.5
        }"#,
        mlp_bias: Flag::Never,
        experts: Some(DEEPSEEK_EXPERTS),
        ..DEEPSEEK2
    },
    Family {
        architecture: "Lfm2ForCausalLM",
        model_type: "lfm2",
        defaults: r#"{
            "norm_eps": 1e-5, "tie_word_embeddings": true, "num_key_value_heads": 8, "intermediate_size": 12288, "rope_theta": 1000000.0,
            "conv_L_cache": 3, "conv_bias": false, "block_auto_adjust_ff_dim": true, "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256
        }"#,
        older_keys: &[("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")],
        norm_epsilon: "norm_eps",
        norms: NormNames { before_attention: Some("operator_norm"), after_attention: None, before_mlp: Some("ffn_norm"), after_mlp: None },
        final_norm: "embedding_norm",
        qkv_bias: Flag::Never,
        output: "self_attn.out_proj",
        output_bias: Flag::Never,
        qk_norm: QkNorm::Heads,
        qk_norm_names: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        recurrence: Some(Recurrence::ShortConv),
        mlp: Mlp::Gated(["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]),
        mlp_width: WidthRule::TwoThirds,
        mlp_bias: Flag::Never,
        ..LLAMA
    },
    QWEN3_NEXT,
    QWEN3_5,
    Family {
        architecture: "Qwen3_5MoeForCausalLM",
        model_type: "qwen3_5_moe_text",
        // All feed-forward layers have experts: no layer is as wide as `intermediate_size`, which the file lacks.
        defaults: r#"{
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "intermediate_size": 512
        }"#,
        experts: Some(ExpertRule { is_normalized: Flag::Always, storage: ExpertStorage::StackedRows, ..QWEN2_EXPERTS }),
        ..QWEN3_5
    },
];

/// Multimodal architectures, whose text settings are under `text_config`; the `model_type` there gives the family.
pub(crate) const MULTIMODAL: [&str; 4] = [
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
];

/// The family of a text configuration's `model_type`.
pub(crate) fn of_model_type(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

/// The family of an architecture.
pub(crate) fn of_architecture(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.architecture == name)
}

/// All architectures that can be loaded.
pub(crate) fn architectures() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.architecture).chain(MULTIMODAL)
}

/// The architecture with the nearest name, by the number of insertions, deletions and replacements.
pub(crate) fn nearest(name: &str) -> &'static str {
    architectures().min_by_key(|known| distance(name, known)).expect("there are families")
}

fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = before + usize::from(from != *to);
            before = row[j + 1];
            row[j + 1] = replaced.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_defaults_are_objects() {
        for (i, family) in FAMILIES.iter().enumerate() {
            let others = &FAMILIES[..i];
            assert!(others.iter().all(|other| other.architecture != family.architecture && other.model_type != family.model_type));
            let defaults: serde_json::Value = serde_json::from_str(family.defaults).expect(family.architecture);
            let has = |key: &str| defaults.get(key).is_some();
            assert!(defaults.is_object() && has("tie_word_embeddings") && has(family.norm_epsilon), "{}", family.architecture);
        }
    }

    #[test]
    fn an_unknown_name_has_a_nearest_one() {
        for (name, expected) in [
            ("Gemma2ForCausalML", "Gemma2ForCausalLM"),
            ("GlmForCausalLM", "Glm4ForCausalLM"),
            ("Phi4ForCausalLM", "Phi3ForCausalLM"),
            ("Mistral4ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
        ] {
            assert_eq!(nearest(name), expected);
        }
    }
}
