//! Loading a checkpoint, and the properties of a loaded model.

use super::{
    band::Buffers,
    delta_rule::DeltaRule,
    dense::Dense,
    experts::Experts,
    key_offset::KeyOffsets,
    latent::Latent,
    projection::{Arithmetic, Projection, Quantization},
    ranks::{self, Rank},
    short_conv::ShortConv,
    stages,
};
use crate::{
    checkpoint::{Checkpoint, WeightMatrix},
    config::ModelConfig,
    error::ModelError,
    fingerprint::fingerprint,
    kv,
    norm::Norm,
    recurrent::{RecurrentConfig, RecurrentKind},
    rope::Rope,
    tensors::{DenseTensors, InputTensors, LayerTensors, MlpTensors, Tensors},
};
use std::{panic::resume_unwind, path::Path, thread};
use tidemill_kernels::{
    Bf16Products, Cpu, Isa, KvLayout,
    cpu::{
        gemm::groupwise::Bits,
        kv::{INT8_HEAD_DIM_MAX, KvMemory},
    },
    dtype::{decode, encode},
};
use tidemill_proto::{
    block::{KvDtype, KvShape, LayoutFingerprint},
    stage::Stage,
};

#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The storage of K and V.
    pub kv_dtype: KvDtype,
    /// The arithmetic of projections. If `None`, they multiply in the type of their weights, bf16 or f32 (f32 also for f16), with sums in
    /// f32; 4-bit weights are multiplied with activations in groups of 8 bits.
    pub quantize: Option<Quantization>,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// The instruction set; if `None`, the best that this machine has. All give the same bits, except AMX in bf16.
    pub isa: Option<Isa>,
}

/// A loaded model.
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) cpu: Cpu,
    /// The place among the stages that have the model's layers: the configuration then has this stage's alone.
    pub(crate) stage: Stage,
    /// The place among other ranks, if this is one rank's part of a model: the configuration then has its heads alone.
    pub(crate) rank: Option<Rank>,
    /// The rotations of layers that attend to everything, and of those with a window if these differ.
    pub(crate) ropes: Vec<Rope>,
    /// The embedding, left in the file: a step looks up only a few rows.
    pub(crate) embedding: WeightMatrix,
    /// The factor of the embedding's rows.
    pub(crate) embedding_factor: Option<f32>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Norm,
    /// The projection to logits, on the first stage only: it has the rows that went through all layers, and samples from them.
    pub(crate) head: Option<Projection>,
    pub(super) buffers: Buffers,
    dequantizes_4_bits: bool,
    kv_shape: KvShape,
    layout: LayoutFingerprint,
}

/// One decoder layer.
pub(crate) struct Layer {
    /// The index of the layer's rotation in the model's [`ropes`](Model::ropes).
    pub(crate) rope: Option<usize>,
    pub(crate) attention_norm: Option<Norm>,
    pub(crate) inputs: Inputs,
    /// The projection to the gates of the attention's outputs, `[heads, head_dim]`.
    pub(crate) output_gate: Option<Projection>,
    pub(crate) output: Projection,
    /// Norms over each head's query and key, or over all heads together.
    pub(crate) qk_norm: Option<(Norm, Norm)>,
    /// The constant that is subtracted from each key before it is stored ([`key_offset`](super::key_offset)).
    pub(crate) key_offset: Option<Vec<f32>>,
    /// The logit of each query head that joins the softmax's sum.
    pub(crate) sinks: Option<Vec<f32>>,
    /// The norm over the attention's output before it is added to the residual stream.
    pub(crate) after_attention: Option<Norm>,
    pub(crate) mlp_norm: Option<Norm>,
    pub(crate) mlp: FeedForward,
    pub(crate) after_mlp: Option<Norm>,
}

/// The projections of the layer's input to queries, keys and values.
pub(crate) enum Inputs {
    /// Queries, keys and values.
    Heads(Box<[Projection; 3]>),
    Latent(Box<Latent>),
    /// No such projections: the layer keeps a state.
    ShortConv(Box<ShortConv>),
    /// A gated delta rule, with projections of its own: the layer keeps a state.
    DeltaRule(Box<DeltaRule>),
}

impl Inputs {
    /// Numbers that a layer with a state computes for each row; `None` for other layers.
    pub(super) fn recurrent_outputs(&self) -> Option<usize> {
        match self {
            Self::Heads(_) | Self::Latent(_) => None,
            Self::ShortConv(conv) => Some(conv.channels()),
            Self::DeltaRule(rule) => Some(rule.heads.outputs()),
        }
    }
}

pub(crate) enum FeedForward {
    Dense(Box<Dense>),
    Experts(Box<Experts>),
}

impl Model {
    /// Loads a Hugging Face directory. `progress` gets (bytes read, bytes in all) while the weights are read and
    /// hashed.
    pub fn load(dir: &Path, options: &LoadOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Model, ModelError> {
        let cpu = Cpu::new(options.isa, options.threads)?;
        let loaded = load_parts(dir, options, Stage::WHOLE, vec![(cpu, None)], progress)?;
        Ok(loaded.parts.into_iter().next().expect("as many parts as asked for"))
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn kv_shape(&self) -> KvShape {
        self.kv_shape
    }

    /// Blocks of a sequence's state; 0 if no layer keeps one.
    pub fn state_blocks(&self) -> usize {
        (self.state_numbers() * size_of::<f32>()).div_ceil(self.kv_shape.block_bytes())
    }

    pub(super) fn state_numbers(&self) -> usize {
        self.config.recurrent.as_ref().map_or(0, RecurrentConfig::state_numbers)
    }

    /// The number of rows that went through each expert so far, by its number, summed over all layers; empty without experts.
    pub fn expert_rows(&self) -> Vec<u64> {
        let mut rows = vec![0; self.config.experts.as_ref().map_or(0, |experts| experts.count)];
        for layer in &self.layers {
            if let FeedForward::Experts(experts) = &layer.mlp {
                experts.add_rows(&mut rows);
            }
        }
        rows
    }

    /// A commitment to everything that decides the bytes of a KV block, besides its tokens.
    pub fn layout(&self) -> LayoutFingerprint {
        self.layout
    }

    /// Whether weights that the file has in 4 bits were dequantized as they were loaded.
    pub fn dequantizes_4_bits(&self) -> bool {
        self.dequantizes_4_bits
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.cpu.isa()
    }

    /// Bytes of weights that one row with logits reads: all matrices but the embedding, and only the chosen experts. A step reads at least
    /// these.
    pub fn row_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.projection_bytes() - layer.mlp.unread_by_a_row()).sum::<usize>()
            + self.head.as_ref().map_or(0, Projection::bytes)
    }

    /// Memory for `blocks` KV blocks. Pages cost nothing until they are used.
    pub fn new_kv(&self, blocks: usize) -> KvMemory {
        KvMemory::new(self.kv_layout(), blocks)
    }

    pub(crate) fn kv_layout(&self) -> KvLayout {
        kv::layout(self.kv_shape)
    }
}

/// The layers of one stage in one or several parts, and the shapes of its part of a block and of the whole.
pub(super) struct Loaded {
    pub(super) parts: Vec<Model>,
    pub(super) kv_shape: KvShape,
    pub(super) whole_kv_shape: KvShape,
}

/// Loads the layers of a stage on each of `cpus`: whole on a single one without a rank, else the part of each rank. Any stage reads and
/// digests all weights, as the layout is the whole model's; only those of its layers stay in memory.
pub(super) fn load_parts(
    dir: &Path,
    options: &LoadOptions,
    stage: Stage,
    cpus: Vec<(Cpu, Option<Rank>)>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Loaded, ModelError> {
    let config = ModelConfig::load(dir)?;
    ranks::check(&config, cpus.len())?;
    stages::check(&config, stage)?;
    if options.kv_dtype == KvDtype::Int8 && config.latent.is_some() {
        return Err(ModelError::LatentInInt8);
    }
    if options.kv_dtype == KvDtype::Int8 && config.head_dim > INT8_HEAD_DIM_MAX {
        return Err(ModelError::TooWideForInt8Kv { head_dim: config.head_dim });
    }
    let mut checkpoint = Checkpoint::open(dir)?;
    let tensors = Tensors::take(&mut checkpoint, &config)?;
    let arithmetic = Arithmetic::of(&tensors, options.quantize);
    let dequantizes_4_bits = tensors.has_4_bits() && matches!(arithmetic, Arithmetic::F32 | Arithmetic::Bf16);
    let ropes = ropes(&config);
    // A norm would scale the bias differently for each key, and a cap or a sink is not invariant to the offset.
    let has_offsets = options.kv_dtype == KvDtype::Int8 && !config.qk_norm && config.score_cap.is_none() && !config.family.has_sinks;
    let key_offsets = has_offsets.then(|| KeyOffsets::new(&ropes, config.head_dim));
    // The factor is rounded to the embedding's type, as in transformers.
    let dtype = tensors.embedding.view().dtype();
    let embedding_factor = config.embedding_factor.map(|factor| decode(dtype, &encode(dtype, &[factor]))[0]);
    let isa = cpus[0].0.isa();
    let layers = stage.layers(config.layers);
    let own_config = config.of_layers(layers.clone());
    let parts = parts(tensors.of_layers(layers), &own_config, stage, cpus)?;
    // All read the files from start to end, so each finds in memory what another has just read.
    let (weights, packed) = thread::scope(|scope| {
        let key_offsets = key_offsets.as_ref();
        let packing: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || part.pack(arithmetic, key_offsets))).collect();
        let weights = checkpoint.digest(progress);
        let packed: Vec<_> = packing.into_iter().map(|part| part.join().unwrap_or_else(|panic| resume_unwind(panic))).collect();
        (weights, packed)
    });
    let (weights, mut packed) = (weights?, packed.into_iter().collect::<Result<Vec<_>, _>>()?);
    share_experts(&mut packed);
    checkpoint.release();
    let whole_kv_shape = config.kv_shape(options.kv_dtype);
    let settings = fingerprint(&weights, &config, arithmetic_number(arithmetic, options.kv_dtype, isa));
    let layout = LayoutFingerprint::new(&settings, &whole_kv_shape);
    let model = |Packed { config, cpu, rank, embedding, layers, final_norm, head }: Packed| Model {
        kv_shape: config.kv_shape(options.kv_dtype),
        ropes: self::ropes(&config),
        buffers: Buffers::new(arithmetic, cpu.threads()),
        config,
        cpu,
        stage,
        rank,
        embedding,
        embedding_factor,
        layers,
        final_norm,
        head,
        dequantizes_4_bits,
        layout,
    };
    let kv_shape = own_config.kv_shape(options.kv_dtype);
    Ok(Loaded { parts: packed.into_iter().map(model).collect(), kv_shape, whole_kv_shape })
}

/// The rotations of layers that attend to everything, and of those with a window if these differ.
fn ropes(config: &ModelConfig) -> Vec<Rope> {
    let ropes = [Some(&config.rope), config.windowed_rope.as_ref()].into_iter().flatten();
    ropes.map(|rope| Rope::new(rope, config.head_dim)).collect()
}

/// Tensors to pack, for a rank or a whole model; `config` has the rank's heads.
struct Part {
    tensors: Tensors,
    config: ModelConfig,
    cpu: Cpu,
    stage: Stage,
    rank: Option<Rank>,
}

/// A packed part.
struct Packed {
    config: ModelConfig,
    cpu: Cpu,
    rank: Option<Rank>,
    embedding: WeightMatrix,
    layers: Vec<Layer>,
    final_norm: Norm,
    head: Option<Projection>,
}

/// Splits the tensors over the ranks, if there are several.
fn parts(tensors: Tensors, config: &ModelConfig, stage: Stage, mut cpus: Vec<(Cpu, Option<Rank>)>) -> Result<Vec<Part>, ModelError> {
    let ranks = cpus.len();
    if ranks == 1 {
        let (cpu, rank) = cpus.remove(0);
        return Ok(vec![Part { tensors, config: config.clone(), cpu, stage, rank }]);
    }
    let of_rank = |(cpu, rank): (Cpu, Option<Rank>)| {
        let shard = rank.as_ref().map(Rank::shard).expect("several parts are ranks'");
        // A latent is each rank's, as all of its heads read it.
        let kv_heads = if config.latent.is_some() { config.kv_heads } else { config.kv_heads / ranks };
        let config = ModelConfig { heads: config.heads / ranks, kv_heads, ..config.clone() };
        Ok(Part { tensors: tensors.part(shard, &config)?, config, cpu, stage, rank })
    };
    cpus.into_iter().map(of_rank).collect()
}

/// Lets each rank compute the experts of all.
fn share_experts(parts: &mut [Packed]) {
    let mut layers: Vec<_> = parts.iter_mut().map(|part| part.layers.iter_mut()).collect();
    loop {
        let of_ranks: Vec<_> = layers.iter_mut().filter_map(|layers| layers.next()).collect();
        if of_ranks.is_empty() {
            return;
        }
        let experts = of_ranks.into_iter().filter_map(|layer| match &mut layer.mlp {
            FeedForward::Experts(experts) => Some(&mut **experts),
            FeedForward::Dense(_) => None,
        });
        Experts::share(&mut experts.collect::<Vec<_>>());
    }
}

impl Part {
    /// Packs the part on its own threads, in memory that they touch first.
    fn pack(self, arithmetic: Arithmetic, key_offsets: Option<&KeyOffsets>) -> Result<Packed, ModelError> {
        let Self { tensors: Tensors { embedding, layers, final_norm, head }, config, cpu, stage, rank } = self;
        cpu.lead();
        let layers = layers.into_iter().enumerate();
        let layers = layers.map(|(index, layer)| Layer::pack(layer, index, &config, &cpu, arithmetic, key_offsets));
        let layers = layers.collect::<Result<_, _>>()?;
        let head = stage.is_first().then(|| head.pack(&cpu, arithmetic.of_head())).transpose()?;
        Ok(Packed { config, cpu, rank, embedding, layers, final_norm, head })
    }
}

impl FeedForward {
    /// Bytes of the experts that a row does not choose.
    fn unread_by_a_row(&self) -> usize {
        match self {
            FeedForward::Dense(_) => 0,
            FeedForward::Experts(experts) => experts.unread_by_a_row(),
        }
    }
}

/// The arithmetic's number in the fingerprint; AMX's order counts if weights or attention are in bf16.
fn arithmetic_number(arithmetic: Arithmetic, kv_dtype: KvDtype, isa: Isa) -> u8 {
    let number = match arithmetic {
        Arithmetic::F32 => 0,
        Arithmetic::Int8 => 1,
        Arithmetic::Bf16 => 2,
        Arithmetic::Groupwise(Bits::Eight) => 6,
        Arithmetic::Groupwise(Bits::Four) => 7,
    };
    let in_bf16 = arithmetic == Arithmetic::Bf16 || kv_dtype == KvDtype::Bf16;
    match isa.bf16_products() {
        Bf16Products::Blocks if in_bf16 => number + 3,
        _ => number,
    }
}

impl Layer {
    fn pack(
        tensors: LayerTensors,
        index: usize,
        config: &ModelConfig,
        cpu: &Cpu,
        arithmetic: Arithmetic,
        key_offsets: Option<&KeyOffsets>,
    ) -> Result<Layer, ModelError> {
        let recurrent = config.recurrent.as_ref().map(|recurrent| recurrent.kind);
        let rope = config.rope_of(index);
        let key_bias = match &tensors.inputs {
            InputTensors::Heads(heads) => heads[1].bias.as_deref(),
            InputTensors::Latent(_) | InputTensors::ShortConv(_) | InputTensors::DeltaRule(_) => None,
        };
        let key_offset = key_offsets.zip(key_bias).map(|(offsets, bias)| offsets.of(bias, rope));
        let LayerTensors { attention_norm, inputs, output_gate, output, qk_norm, sinks, after_attention, mlp_norm, mlp, after_mlp } =
            tensors;
        Ok(Layer {
            rope,
            attention_norm,
            inputs: match (&inputs, config.latent) {
                (InputTensors::Latent(latent), Some(sizes)) => Inputs::Latent(Box::new(Latent::pack(latent, sizes, cpu, arithmetic)?)),
                (InputTensors::Heads(heads), _) => {
                    let [q, k, v] = &**heads;
                    Inputs::Heads(Box::new([q.pack(cpu, arithmetic)?, k.pack(cpu, arithmetic)?, v.pack(cpu, arithmetic)?]))
                }
                (InputTensors::ShortConv(conv), _) => {
                    let Some(RecurrentKind::ShortConv { channels, .. }) = recurrent else {
                        unreachable!("convolutions were taken for models that have them")
                    };
                    Inputs::ShortConv(Box::new(ShortConv::pack(conv, channels, cpu, arithmetic)?))
                }
                (InputTensors::DeltaRule(rule), _) => {
                    let Some(RecurrentKind::DeltaRule { heads, .. }) = recurrent else {
                        unreachable!("delta rules were taken for models that have them")
                    };
                    Inputs::DeltaRule(Box::new(DeltaRule::pack(rule, heads, cpu, arithmetic)?))
                }
                (InputTensors::Latent(_), None) => unreachable!("latents were taken for models that have them"),
            },
            output_gate: output_gate.map(|gate| gate.pack(cpu, arithmetic)).transpose()?,
            output: output.pack(cpu, arithmetic)?,
            qk_norm,
            after_attention,
            key_offset,
            sinks,
            mlp_norm,
            mlp: match (&mlp, config.experts_of(index)) {
                (MlpTensors::Experts(tensors), Some(experts)) => {
                    FeedForward::Experts(Box::new(Experts::pack(tensors, experts, cpu, arithmetic)?))
                }
                (MlpTensors::Dense(dense), _) => {
                    let DenseTensors { gate, up, down } = &**dense;
                    FeedForward::Dense(Box::new(Dense::pack(gate.as_ref(), up, down, cpu, arithmetic)?))
                }
                (MlpTensors::Experts(_), None) => unreachable!("experts were taken for layers that have some"),
            },
            after_mlp,
        })
    }

    /// Bytes that one pass over the projections' weights reads.
    pub(crate) fn projection_bytes(&self) -> usize {
        let Self { inputs, output_gate, output, mlp, .. } = self;
        let inputs = match inputs {
            Inputs::Heads(heads) => heads.iter().map(Projection::bytes).sum(),
            Inputs::Latent(latent) => latent.bytes(),
            Inputs::ShortConv(conv) => conv.bytes(),
            Inputs::DeltaRule(rule) => rule.bytes(),
        };
        let output = output_gate.as_ref().map_or(0, Projection::bytes) + output.bytes();
        let mlp = match mlp {
            FeedForward::Dense(dense) => dense.bytes(),
            FeedForward::Experts(experts) => experts.bytes(),
        };
        inputs + output + mlp
    }
}
