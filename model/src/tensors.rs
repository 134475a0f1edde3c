//! A checkpoint's tensors by their place in the model, checked against the configuration and still in the mapped files:
//! where every backend begins.

use crate::{
    checkpoint::{Checkpoint, WeightMatrix},
    config::ModelConfig,
    error::ModelError,
    weight::{Storage, Weight},
};
use tidemill_kernels::Dtype;

/// A projection as the file has it: `[outputs, inputs]`.
pub(crate) struct Linear {
    pub(crate) name: String,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Vec<f32>>,
}

pub(crate) struct Tensors {
    /// `[vocab, hidden]`
    pub(crate) embedding: WeightMatrix,
    pub(crate) layers: Vec<LayerTensors>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) head: Linear,
}

/// The tensors of one decoder layer.
pub(crate) struct LayerTensors {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) output: Linear,
    /// Norms over each head's query and key.
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Tensors {
    /// Takes all tensors. Their order is that of the checkpoint's digest.
    pub(crate) fn take(checkpoint: &mut Checkpoint, config: &ModelConfig) -> Result<Self, ModelError> {
        let storage = Storage::new(config.fp8.as_ref());
        let embedding = checkpoint.matrix("model.embed_tokens.weight", config.vocab, config.hidden)?;
        let layers = (0..config.layers).map(|i| LayerTensors::take(checkpoint, config, &storage, i)).collect::<Result<_, _>>()?;
        checkpoint.must_not_have(&format!("model.layers.{}.input_layernorm.weight", config.layers))?;
        let final_norm = checkpoint.vector("model.norm.weight", config.hidden)?;
        let weight = match config.tied {
            true => Weight::Plain(embedding.clone()),
            false => storage.take(checkpoint, "lm_head", config.vocab, config.hidden)?,
        };
        Ok(Self { embedding, layers, final_norm, head: Linear { name: "lm_head.weight".into(), weight, bias: None } })
    }

    /// Whether every matrix is bf16 once FP8 is dequantized.
    pub(crate) fn matrices_are_bf16(&self) -> bool {
        let projections = self.layers.iter().flat_map(LayerTensors::projections).chain([&self.head]);
        self.embedding.view().dtype() == Dtype::Bf16 && projections.into_iter().all(|linear| linear.weight.dtype() == Dtype::Bf16)
    }
}

impl LayerTensors {
    fn take(checkpoint: &mut Checkpoint, config: &ModelConfig, storage: &Storage<'_>, index: usize) -> Result<Self, ModelError> {
        let (hidden, inner, d) = (config.hidden, config.intermediate, config.head_dim);
        let (q_rows, kv_rows) = (config.heads * d, config.kv_heads * d);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let mut linear = |part: &str, rows, cols, bias| {
            let weight = storage.take(checkpoint, &name(part), rows, cols)?;
            let bias = if bias { Some(checkpoint.vector(&name(&format!("{part}.bias")), rows)?) } else { None };
            Ok::<_, ModelError>(Linear { name: name(&format!("{part}.weight")), weight, bias })
        };
        let q = linear("self_attn.q_proj", q_rows, hidden, config.qkv_bias)?;
        let k = linear("self_attn.k_proj", kv_rows, hidden, config.qkv_bias)?;
        let v = linear("self_attn.v_proj", kv_rows, hidden, config.qkv_bias)?;
        let output = linear("self_attn.o_proj", hidden, q_rows, config.output_bias)?;
        let gate = linear("mlp.gate_proj", inner, hidden, config.mlp_bias)?;
        let up = linear("mlp.up_proj", inner, hidden, config.mlp_bias)?;
        let down = linear("mlp.down_proj", hidden, inner, config.mlp_bias)?;
        let mut norm = |part: &str, len| checkpoint.vector(&name(&format!("{part}.weight")), len);
        let attention_norm = norm("input_layernorm", hidden)?;
        let mlp_norm = norm("post_attention_layernorm", hidden)?;
        let qk_norm = if config.qk_norm { Some((norm("self_attn.q_norm", d)?, norm("self_attn.k_norm", d)?)) } else { None };
        for scale in ["k_scale", "v_scale"].map(|scale| name(&format!("self_attn.{scale}"))) {
            if checkpoint.has(&scale) {
                let problem = "scales for K and V in FP8 are not supported: use a checkpoint without them".into();
                return Err(checkpoint.problem_of(&scale, problem));
            }
        }
        Ok(Self { attention_norm, q, k, v, output, qk_norm, mlp_norm, gate, up, down })
    }

    fn projections(&self) -> [&Linear; 7] {
        let Self { q, k, v, output, gate, up, down, .. } = self;
        [q, k, v, output, gate, up, down]
    }
}
