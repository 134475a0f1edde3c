//! Loading a checkpoint, and what a loaded model tells about itself.

use crate::{
    config::ModelConfig,
    error::ModelError,
    forward::Buffers,
    projection::{Arithmetic, Linear, Projection, Quantization},
    rope::Rope,
    weights::{Checkpoint, WeightMatrix},
};
use std::path::Path;
use tidemill_kernels::{BLOCK_POSITIONS, Cpu, Dtype, Isa, KvLayout, KvMemory};
use tidemill_proto::block::{BLOCK_TOKENS, KvDtype, KvShape, LayoutFingerprint};

const _: () = assert!(BLOCK_TOKENS == BLOCK_POSITIONS, "the KV kernels and the block keys must agree on a block");

/// Part of the layout fingerprint: changes whenever the same weights and tokens would give other KV bytes than before.
const ARITHMETIC_VERSION: u32 = 3;

#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// How K and V are stored; `None`: as the weights are.
    pub kv_dtype: Option<KvDtype>,
    /// How projections compute; `None`: as their weights are stored, in products of bf16 or of f32 (and f16), with sums in f32.
    pub quantize: Option<Quantization>,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// `None`: the best that this machine has. All give the same bits.
    pub isa: Option<Isa>,
}

/// A model ready to run.
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) cpu: Cpu,
    pub(crate) rope: Rope,
    /// As in the file: of a step's rows few are looked up.
    pub(crate) embedding: WeightMatrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) head: Projection,
    pub(crate) buffers: Buffers,
    kv_shape: KvShape,
    layout: LayoutFingerprint,
}

/// One decoder layer's weights.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) q: Projection,
    pub(crate) k: Projection,
    pub(crate) v: Projection,
    pub(crate) output: Projection,
    /// Norms over each head's query and key.
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate_up: Projection,
    pub(crate) down: Projection,
}

impl Model {
    /// Loads a Hugging Face directory. `progress` gets (bytes read, bytes in all) while the weights are read and hashed.
    pub fn load(dir: &Path, options: &LoadOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Model, ModelError> {
        let config = ModelConfig::load(dir)?;
        let cpu = Cpu::new(options.isa, options.threads)?;
        let mut checkpoint = Checkpoint::open(dir)?;
        let arithmetic = Arithmetic::of(&checkpoint, options.quantize);
        let embedding = checkpoint.matrix("model.embed_tokens.weight", config.vocab, config.hidden)?;
        let layers = (0..config.layers).map(|i| Layer::load(&cpu, &mut checkpoint, &config, arithmetic, i)).collect::<Result<_, _>>()?;
        let final_norm = checkpoint.vector("model.norm.weight", config.hidden)?;
        let head = match config.tied {
            true => embedding.clone(),
            false => checkpoint.matrix("lm_head.weight", config.vocab, config.hidden)?,
        };
        let head = Linear { name: "lm_head.weight".into(), weight: head, bias: None }.pack(&cpu, arithmetic)?;
        let kv_shape = KvShape {
            layers: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            dtype: options.kv_dtype.unwrap_or(match embedding.dtype() {
                Dtype::F32 => KvDtype::F32,
                Dtype::F16 => KvDtype::F16,
                Dtype::Bf16 => KvDtype::Bf16,
            }),
        };
        let weights = checkpoint.digest(progress);
        checkpoint.release();
        let layout = LayoutFingerprint::new(&fingerprint(&weights, &config, arithmetic), &kv_shape, (0, 1));
        let rope = Rope::new(&config.rope, config.head_dim);
        Ok(Model { config, cpu, rope, embedding, layers, final_norm, head, buffers: Buffers::new(arithmetic), kv_shape, layout })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn kv_shape(&self) -> KvShape {
        self.kv_shape
    }

    /// Commits to everything that decides the bytes of a KV block, besides its tokens.
    pub fn layout(&self) -> LayoutFingerprint {
        self.layout
    }

    /// The instruction set that runs.
    pub fn isa(&self) -> Isa {
        self.cpu.isa()
    }

    /// Memory for `blocks` KV blocks. Pages cost nothing until they are used.
    pub fn new_kv(&self, blocks: usize) -> KvMemory {
        KvMemory::new(self.kv_layout(), blocks)
    }

    pub(crate) fn kv_layout(&self) -> KvLayout {
        let KvShape { layers, kv_heads, head_dim, dtype } = self.kv_shape;
        let dtype = match dtype {
            KvDtype::F32 => Dtype::F32,
            KvDtype::F16 => Dtype::F16,
            KvDtype::Bf16 => Dtype::Bf16,
        };
        KvLayout { layers, kv_heads, head_dim, dtype }
    }
}

/// Digest of weights, settings and arithmetic.
fn fingerprint(weights: &[u8; 32], config: &ModelConfig, arithmetic: Arithmetic) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("tidemill model v1");
    hasher.update(&ARITHMETIC_VERSION.to_le_bytes());
    hasher.update(weights);
    hasher.update(&[match arithmetic {
        Arithmetic::F32 => 0,
        Arithmetic::Int8 => 1,
        Arithmetic::Bf16 => 2,
    }]);
    hasher.update(&serde_json::to_vec(config).expect("names and finite numbers serialize"));
    *hasher.finalize().as_bytes()
}

impl Layer {
    fn load(
        cpu: &Cpu,
        checkpoint: &mut Checkpoint,
        config: &ModelConfig,
        arithmetic: Arithmetic,
        index: usize,
    ) -> Result<Layer, ModelError> {
        let (hidden, inner, d) = (config.hidden, config.intermediate, config.head_dim);
        let (q_rows, kv_rows) = (config.heads * d, config.kv_heads * d);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let mut linear = |part: &str, rows, cols, bias| {
            let tensor = name(&format!("{part}.weight"));
            let weight = checkpoint.matrix(&tensor, rows, cols)?;
            let bias = if bias { Some(checkpoint.vector(&name(&format!("{part}.bias")), rows)?) } else { None };
            Ok::<_, ModelError>(Linear { name: tensor, weight, bias })
        };
        let q = linear("self_attn.q_proj", q_rows, hidden, config.qkv_bias)?.pack(cpu, arithmetic)?;
        let k = linear("self_attn.k_proj", kv_rows, hidden, config.qkv_bias)?.pack(cpu, arithmetic)?;
        let v = linear("self_attn.v_proj", kv_rows, hidden, config.qkv_bias)?.pack(cpu, arithmetic)?;
        let output = linear("self_attn.o_proj", hidden, q_rows, config.output_bias)?.pack(cpu, arithmetic)?;
        let gate = linear("mlp.gate_proj", inner, hidden, config.mlp_bias)?;
        let up = linear("mlp.up_proj", inner, hidden, config.mlp_bias)?;
        let down = linear("mlp.down_proj", hidden, inner, config.mlp_bias)?.pack(cpu, arithmetic)?;
        let gate_up = gate.pack_gated(&up, cpu, arithmetic)?;
        let mut norm = |part: &str, len| checkpoint.vector(&name(&format!("{part}.weight")), len);
        let attention_norm = norm("input_layernorm", hidden)?;
        let mlp_norm = norm("post_attention_layernorm", hidden)?;
        let qk_norm = if config.qk_norm { Some((norm("self_attn.q_norm", d)?, norm("self_attn.k_norm", d)?)) } else { None };
        Ok(Layer { attention_norm, q, k, v, output, qk_norm, mlp_norm, gate_up, down })
    }
}
