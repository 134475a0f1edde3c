//! The differences between model families: a row each.

/// Where a flag comes from.
#[derive(Clone, Copy)]
pub(crate) enum Flag {
    Never,
    Always,
    /// `attention_bias` of `config.json`; false if absent.
    AttentionBias,
    /// `mlp_bias` of `config.json`; false if absent.
    MlpBias,
}

/// Which layers attend to a sliding window.
#[derive(Clone, Copy)]
pub(crate) enum WindowRule {
    Never,
    /// All layers, if `sliding_window` is set.
    Everywhere,
    /// If `use_sliding_window`: the layers that `layer_types` names, or else those from `max_window_layers` on.
    ByLayer,
}

pub(crate) struct Family {
    /// In `config.json`'s `architectures`.
    pub(crate) architecture: &'static str,
    /// Of the query, key and value projections.
    pub(crate) qkv_bias: Flag,
    /// Of the attention's output projection.
    pub(crate) output_bias: Flag,
    /// Of the feed-forward projections.
    pub(crate) mlp_bias: Flag,
    /// RMSNorm over each query and key head before the rotation.
    pub(crate) qk_norm: bool,
    pub(crate) window: WindowRule,
    /// Whether the head shares the embedding's weights where `tie_word_embeddings` is absent, as in transformers' configuration classes.
    pub(crate) tied: bool,
    /// Default size of a head; `None`: `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
}

pub(crate) const FAMILIES: [Family; 4] = [
    Family {
        architecture: "LlamaForCausalLM",
        qkv_bias: Flag::AttentionBias,
        output_bias: Flag::AttentionBias,
        mlp_bias: Flag::MlpBias,
        qk_norm: false,
        window: WindowRule::Never,
        tied: false,
        head_dim: None,
    },
    Family {
        architecture: "MistralForCausalLM",
        qkv_bias: Flag::Never,
        output_bias: Flag::Never,
        mlp_bias: Flag::Never,
        qk_norm: false,
        window: WindowRule::Everywhere,
        tied: false,
        head_dim: None,
    },
    Family {
        architecture: "Qwen2ForCausalLM",
        qkv_bias: Flag::Always,
        output_bias: Flag::Never,
        mlp_bias: Flag::Never,
        qk_norm: false,
        window: WindowRule::ByLayer,
        tied: false,
        head_dim: None,
    },
    Family {
        architecture: "Qwen3ForCausalLM",
        qkv_bias: Flag::AttentionBias,
        output_bias: Flag::AttentionBias,
        mlp_bias: Flag::Never,
        qk_norm: true,
        window: WindowRule::ByLayer,
        tied: false,
        head_dim: Some(128),
    },
];
