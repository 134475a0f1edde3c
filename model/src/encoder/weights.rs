//! Loading an encoder, and the properties of a loaded one.

use super::{
    config::{EncoderConfig, HeadConfig},
    family::{EncoderMlp, NormOrder, Positions, Qkv},
    forward::Buffers,
};
use crate::{
    checkpoint::{Checkpoint, WeightMatrix},
    cpu::projection::{Arithmetic, Projection, Quantization},
    error::ModelError,
    kv,
    norm::Norm,
    rope::Rope,
    tensors::{Linear, RowOrder},
    weight::Weight,
};
use std::path::Path;
use tidemill_kernels::{Bf16Products, Cpu, Dtype, Isa, cpu::kv::KvMemory};
use tidemill_proto::block::{KvDtype, KvShape, LayoutFingerprint};

#[derive(Clone, Debug)]
pub struct EncoderOptions {
    /// The arithmetic of projections; if `None`, bf16 if all weights are, else f32.
    pub quantize: Option<Quantization>,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// The instruction set; if `None`, the best that this machine has.
    pub isa: Option<Isa>,
}

/// A loaded encoder.
pub struct Encoder {
    pub(super) config: EncoderConfig,
    pub(super) cpu: Cpu,
    pub(super) ropes: Vec<Rope>,
    /// `[vocab, hidden]`, left in the file.
    pub(super) words: WeightMatrix,
    /// A row per token type.
    pub(super) types: Vec<f32>,
    /// A row per position.
    pub(super) positions: Vec<f32>,
    pub(super) embedding_norm: Norm,
    pub(super) layers: Vec<EncoderLayer>,
    pub(super) final_norm: Option<Norm>,
    pub(super) head: Option<Head>,
    pub(super) buffers: Buffers,
    layout: LayoutFingerprint,
}

pub(super) struct EncoderLayer {
    /// The index of the layer's rotation in the encoder's [`ropes`](Encoder::ropes).
    pub(super) rope: Option<usize>,
    /// `None` in the first layer if norms precede the parts.
    pub(super) attention_norm: Option<Norm>,
    /// Queries, keys and values.
    pub(super) qkv: [Projection; 3],
    pub(super) output: Projection,
    pub(super) mlp_norm: Norm,
    /// The gate with the projection that it multiplies; without a gate, that projection alone.
    pub(super) up: Projection,
    pub(super) down: Projection,
}

/// The head of a classifier, in f32.
pub(super) struct Head {
    pub(super) dense: Projection,
    pub(super) norm: Option<Norm>,
    pub(super) classifier: Projection,
}

/// The version in the fingerprint, which changes whenever the same weights and tokens would give different numbers.
const ENCODER_VERSION: u32 = 1;

impl Encoder {
    /// Loads a Hugging Face directory; `None` if it holds another kind of model. `progress` gets (bytes read, bytes in all) while the
    /// weights are hashed.
    pub fn load(dir: &Path, options: &EncoderOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Option<Self>, ModelError> {
        let Some(config) = EncoderConfig::load(dir)? else { return Ok(None) };
        let cpu = Cpu::new(options.isa, options.threads)?;
        let mut checkpoint = Checkpoint::open(dir)?;
        let tensors = Take::new(&mut checkpoint, &config).all()?;
        let arithmetic = match options.quantize {
            Some(Quantization::Int8) => Arithmetic::Int8,
            Some(Quantization::Int4) => Arithmetic::INT4,
            _ if tensors.are_bf16() => Arithmetic::Bf16,
            _ => Arithmetic::F32,
        };
        let weights = checkpoint.digest(progress)?;
        let Tensors { words, types, positions, embedding_norm, layers, final_norm, head } = tensors;
        let layers = layers.into_iter().enumerate().map(|(index, layer)| layer.pack(index, &config, &cpu, arithmetic));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let head = match head {
            Some(HeadTensors { dense, norm, classifier }) => {
                let [dense, classifier] = [dense, classifier].map(|linear| linear.pack(&cpu, Arithmetic::F32));
                Some(Head { dense: dense?, norm, classifier: classifier? })
            }
            None => None,
        };
        checkpoint.release();
        let ropes = config.ropes.iter().map(|rope| Rope::new(rope, config.head_dim())).collect();
        let buffers = Buffers::new(arithmetic);
        let layout = LayoutFingerprint::new(&fingerprint(&weights, &config, arithmetic, cpu.isa()), &shape(&config));
        Ok(Some(Self { config, cpu, ropes, words, types, positions, embedding_norm, layers, final_norm, head, buffers, layout }))
    }

    /// Tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.config.vocab
    }

    /// The longest text, in tokens.
    pub fn context_tokens(&self) -> usize {
        self.config.context_tokens
    }

    /// Numbers of a result: those of an embedding, or one per label of a classifier.
    pub fn width(&self) -> usize {
        self.config.head.as_ref().map_or(self.config.hidden, |head| head.labels)
    }

    /// Shape of a block of working memory: one layer's keys and values.
    pub fn kv_shape(&self) -> KvShape {
        shape(&self.config)
    }

    /// A commitment to everything that decides a result, besides the tokens.
    pub fn layout(&self) -> LayoutFingerprint {
        self.layout
    }

    /// Working memory of `blocks` blocks. Pages cost nothing until they are used.
    pub fn new_kv(&self, blocks: usize) -> KvMemory {
        KvMemory::new(kv::layout(self.kv_shape()), blocks)
    }
}

fn shape(config: &EncoderConfig) -> KvShape {
    KvShape { layers: 1, kv_heads: config.heads, head_dim: config.head_dim(), dtype: KvDtype::F32, latent: None }
}

fn fingerprint(weights: &[u8; 32], config: &EncoderConfig, arithmetic: Arithmetic, isa: Isa) -> [u8; 32] {
    let in_blocks = arithmetic == Arithmetic::Bf16 && isa.bf16_products() == Bf16Products::Blocks;
    let mut hasher = blake3::Hasher::new_derive_key("tidemill encoder v1");
    hasher.update(&ENCODER_VERSION.to_le_bytes());
    hasher.update(weights);
    hasher.update(format!("{arithmetic:?} {in_blocks}").as_bytes());
    hasher.update(&serde_json::to_vec(config).expect("names and finite numbers serialize"));
    *hasher.finalize().as_bytes()
}

/// An encoder's tensors, still in the mapped files.
struct Tensors {
    words: WeightMatrix,
    types: Vec<f32>,
    positions: Vec<f32>,
    embedding_norm: Norm,
    layers: Vec<LayerTensors>,
    final_norm: Option<Norm>,
    head: Option<HeadTensors>,
}

struct LayerTensors {
    attention_norm: Option<Norm>,
    qkv: [Linear; 3],
    output: Linear,
    mlp_norm: Norm,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

struct HeadTensors {
    dense: Linear,
    norm: Option<Norm>,
    classifier: Linear,
}

impl Tensors {
    fn are_bf16(&self) -> bool {
        let of_layer = |layer: &LayerTensors| {
            let LayerTensors { qkv, output, gate, up, down, .. } = layer;
            qkv.iter().chain(gate).chain([output, up, down]).all(|linear| linear.weight.dtype() == Dtype::Bf16)
        };
        self.words.view().dtype() == Dtype::Bf16 && self.layers.iter().all(of_layer)
    }
}

impl LayerTensors {
    fn pack(self, index: usize, config: &EncoderConfig, cpu: &Cpu, arithmetic: Arithmetic) -> Result<EncoderLayer, ModelError> {
        let Self { attention_norm, qkv: [q, k, v], output, mlp_norm, gate, up, down } = self;
        let rope = match config.ropes.len() {
            0 => None,
            count => Some(usize::from(count > 1 && config.windows[index].is_some())),
        };
        Ok(EncoderLayer {
            rope,
            attention_norm,
            qkv: [q.pack(cpu, arithmetic)?, k.pack(cpu, arithmetic)?, v.pack(cpu, arithmetic)?],
            output: output.pack(cpu, arithmetic)?,
            mlp_norm,
            up: match gate {
                Some(gate) => gate.pack_gated(&up, cpu, arithmetic)?,
                None => up.pack(cpu, arithmetic)?,
            },
            down: down.pack(cpu, arithmetic)?,
        })
    }
}

/// Takes the tensors out of a checkpoint.
struct Take<'a> {
    checkpoint: &'a mut Checkpoint,
    config: &'a EncoderConfig,
    /// The prefix of the encoder's tensors in this checkpoint.
    prefix: &'static str,
}

impl<'a> Take<'a> {
    fn new(checkpoint: &'a mut Checkpoint, config: &'a EncoderConfig) -> Self {
        let family = config.family;
        let has = |prefix: &str| checkpoint.has(&format!("{prefix}{}.weight", family.words));
        let prefix = if has(family.prefix) { family.prefix } else { "" };
        Self { checkpoint, config, prefix }
    }

    fn all(mut self) -> Result<Tensors, ModelError> {
        let (config, family) = (self.config, self.config.family);
        let (hidden, prefix) = (config.hidden, self.prefix);
        let name = |part: &str| format!("{prefix}{part}");
        let words = self.checkpoint.matrix(&name(&format!("{}.weight", family.words)), config.vocab, hidden)?;
        let types = match family.types.filter(|_| config.types > 0) {
            Some(types) => self.table(&name(types), config.types)?,
            None => Vec::new(),
        };
        let positions = match &family.positions {
            Positions::Table { name: positions, .. } => self.table(&name(positions), config.position_rows)?,
            Positions::Rotary | Positions::RotaryByWindow => Vec::new(),
        };
        let embedding_norm = self.norm(&name(family.embedding_norm))?;
        let layers = (0..config.layers()).map(|index| self.layer(index)).collect::<Result<_, _>>()?;
        let surplus = self.layer_part(config.layers(), family.output);
        self.checkpoint.must_not_have(&format!("{surplus}.weight"))?;
        let final_norm = family.final_norm.map(|norm| self.norm(&name(norm))).transpose()?;
        let head = config.head.as_ref().map(|head| self.head(head)).transpose()?;
        Ok(Tensors { words, types, positions, embedding_norm, layers, final_norm, head })
    }

    fn layer(&mut self, index: usize) -> Result<LayerTensors, ModelError> {
        let (config, family) = (self.config, self.config.family);
        let (hidden, inner) = (config.hidden, config.intermediate);
        let (attention_bias, mlp_bias) = (config.attention_bias, config.mlp_bias);
        let name = |part: &str| format!("{}{}.{index}.{part}", self.prefix, family.layers);
        let names = [family.output, family.attention_norm, family.mlp_norm].map(name);
        let qkv = match &family.qkv {
            Qkv::Apart(parts) => {
                let [q, k, v] = parts.map(name);
                [q, k, v].map(|name| self.linear(&name, hidden, hidden, attention_bias)).into_iter().collect::<Result<Vec<_>, _>>()?
            }
            Qkv::Fused(part) => {
                let name = name(part);
                self.parts(&name, [hidden; 3], hidden, attention_bias)?
            }
        };
        let (gate, up, down) = match family.mlp {
            EncoderMlp::Plain { up, down } => (None, self.linear(&self.layer_part(index, up), inner, hidden, mlp_bias)?, down),
            EncoderMlp::Gated { gate, up, down } => {
                let gate = self.linear(&self.layer_part(index, gate), inner, hidden, mlp_bias)?;
                (Some(gate), self.linear(&self.layer_part(index, up), inner, hidden, mlp_bias)?, down)
            }
            EncoderMlp::FusedGate { gate_up, down } => {
                let mut parts = self.parts(&self.layer_part(index, gate_up), [inner; 2], hidden, mlp_bias)?.into_iter();
                let (gate, up) = (parts.next(), parts.next());
                (gate, up.expect("two parts"), down)
            }
        };
        let down = self.linear(&self.layer_part(index, down), hidden, inner, mlp_bias)?;
        let [output, attention_norm, mlp_norm] = names;
        let has_norm = family.norm_order == NormOrder::After || index > 0;
        Ok(LayerTensors {
            attention_norm: has_norm.then(|| self.norm(&attention_norm)).transpose()?,
            qkv: qkv.try_into().unwrap_or_else(|_| unreachable!("three parts")),
            output: self.linear(&output, hidden, hidden, attention_bias)?,
            mlp_norm: self.norm(&mlp_norm)?,
            gate,
            up,
            down,
        })
    }

    fn head(&mut self, head: &HeadConfig) -> Result<HeadTensors, ModelError> {
        let (hidden, names) = (self.config.hidden, self.config.family.head.as_ref().expect("a classifier's family has a head"));
        let place = if names.dense_is_the_encoders { self.prefix } else { "" };
        Ok(HeadTensors {
            dense: self.linear(&format!("{place}{}", names.dense), hidden, hidden, head.dense_bias)?,
            norm: names.norm.map(|norm| self.norm(norm)).transpose()?,
            classifier: self.linear(names.classifier, head.labels, hidden, true)?,
        })
    }

    fn layer_part(&self, index: usize, part: &str) -> String {
        format!("{}{}.{index}.{part}", self.prefix, self.config.family.layers)
    }

    fn table(&mut self, name: &str, rows: usize) -> Result<Vec<f32>, ModelError> {
        self.checkpoint.scales(&format!("{name}.weight"), &[vec![rows, self.config.hidden]])
    }

    fn norm(&mut self, name: &str) -> Result<Norm, ModelError> {
        Norm::layer(self.checkpoint, name, self.config.hidden, self.config.norm_epsilon, self.config.norm_bias)
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear, ModelError> {
        let weight = Weight::Plain(self.checkpoint.matrix(&format!("{name}.weight"), rows, cols)?);
        let bias = if bias { Some(self.checkpoint.vector(&format!("{name}.bias"), rows)?) } else { None };
        Ok(Linear { name: format!("{name}.weight"), weight, bias, order: RowOrder::AsStored })
    }

    /// Projections that are stored as one, with the given number of outputs each.
    fn parts<const N: usize>(&mut self, name: &str, rows: [usize; N], cols: usize, bias: bool) -> Result<Vec<Linear>, ModelError> {
        let all = self.linear(name, rows.iter().sum(), cols, bias)?;
        let mut start = 0;
        let part = |rows: usize| {
            let range = start..start + rows;
            start = range.end;
            let weight = all.weight.rows_of(range.clone()).map_err(|problem| self.checkpoint.problem_of(&all.name, problem))?;
            let bias = all.bias.as_ref().map(|bias| bias[range].to_vec());
            Ok(Linear { name: all.name.clone(), weight, bias, order: RowOrder::AsStored })
        };
        rows.map(part).into_iter().collect()
    }
}
