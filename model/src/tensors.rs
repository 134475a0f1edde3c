//! A checkpoint's tensors by their place in the model, checked against the configuration and still in the mapped files: the starting point
//! of every backend.

use crate::{
    checkpoint::{Checkpoint, WeightMatrix},
    config::{ExpertConfig, ModelConfig},
    error::ModelError,
    family::{DeltaStorage, ExpertStorage, GATED, Mlp, QkNorm, Recurrence},
    latent::LatentConfig,
    norm::Norm,
    recurrent::RecurrentKind,
    stacked::{Outputs, Stack},
    weight::{Storage, Weight},
};
use std::ops::Range;
use tidemill_kernels::{Dtype, cpu::delta_rule::DeltaHeads};
use tidemill_proto::block::Shard;

/// A projection as stored in the file: `[outputs, inputs]`.
pub(crate) struct Linear {
    pub(crate) name: String,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) order: RowOrder,
}

/// The outputs of a projection that are used, and their order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    AsStored,
    /// The first `rotated` outputs of each head are reordered: the even ones, then the odd ones. So pairs of neighbours lie half of
    /// `rotated` apart, where the rotation expects them; scores are the same, as queries and keys have one order.
    EvenFirst {
        head_dim: usize,
        rotated: usize,
    },
    /// The last `rotated` outputs of each head come before its `plain` ones; if interleaved, in the order of `EvenFirst`.
    RotatedFirst {
        plain: usize,
        rotated: usize,
        is_interleaved: bool,
    },
    /// Some parts of each of `groups` groups, all of the same size: first that part of each group, then the next part of each. `sizes` are
    /// those of a group's parts, in the order of the file.
    ByPart {
        groups: usize,
        sizes: [usize; 4],
        first: usize,
        end: usize,
    },
}

impl RowOrder {
    /// The number of used outputs of `stored` rows.
    pub(crate) fn outputs(self, stored: usize) -> usize {
        match self {
            Self::AsStored | Self::EvenFirst { .. } | Self::RotatedFirst { .. } => stored,
            Self::ByPart { groups, sizes, first, end } => groups * sizes[first..end].iter().sum::<usize>(),
        }
    }

    /// The stored row of output `row`; the biases are already in order.
    pub(crate) fn stored(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::EvenFirst { head_dim, rotated } => {
                let (head, i) = (row / head_dim * head_dim, row % head_dim);
                match (i < rotated / 2, i < rotated) {
                    (true, _) => head + 2 * i,
                    (false, true) => head + 2 * (i - rotated / 2) + 1,
                    (false, false) => row,
                }
            }
            Self::RotatedFirst { plain, rotated, is_interleaved } => {
                let (head, i) = (row / (plain + rotated) * (plain + rotated), row % (plain + rotated));
                let order = if is_interleaved { Self::EvenFirst { head_dim: rotated, rotated } } else { Self::AsStored };
                head + if i < rotated { plain + order.stored(i) } else { i - rotated }
            }
            Self::ByPart { groups, sizes, first, end } => {
                let (mut row, mut part) = (row, first);
                while row >= groups * sizes[part] && part + 1 < end {
                    row -= groups * sizes[part];
                    part += 1;
                }
                let (group, i) = (row / sizes[part], row % sizes[part]);
                group * sizes.iter().sum::<usize>() + sizes[..part].iter().sum::<usize>() + i
            }
        }
    }
}

pub(crate) struct Tensors {
    /// `[vocab, hidden]`
    pub(crate) embedding: WeightMatrix,
    pub(crate) layers: Vec<LayerTensors>,
    pub(crate) final_norm: Norm,
    pub(crate) head: Linear,
}

/// The tensors of one decoder layer.
pub(crate) struct LayerTensors {
    pub(crate) attention_norm: Option<Norm>,
    pub(crate) inputs: InputTensors,
    /// The projection to the gates of the attention's outputs, `[heads, head_dim]`.
    pub(crate) output_gate: Option<Linear>,
    pub(crate) output: Linear,
    /// Norms over each head's query and key, or over all heads together.
    pub(crate) qk_norm: Option<(Norm, Norm)>,
    /// The logit of each query head that joins the softmax's sum.
    pub(crate) sinks: Option<Vec<f32>>,
    /// The norm over the attention's output before it is added to the residual stream.
    pub(crate) after_attention: Option<Norm>,
    pub(crate) mlp_norm: Option<Norm>,
    pub(crate) mlp: MlpTensors,
    pub(crate) after_mlp: Option<Norm>,
}

/// The projections of the layer's input to queries, keys and values.
pub(crate) enum InputTensors {
    /// Queries, keys and values.
    Heads(Box<[Linear; 3]>),
    Latent(Box<LatentTensors>),
    ShortConv(Box<ConvTensors>),
    DeltaRule(Box<DeltaTensors>),
}

/// The tensors of a gated delta rule, without the projection of its output.
pub(crate) struct DeltaTensors {
    /// The projections to the convolution's inputs (queries, keys and values of all heads) and to the gates of the outputs.
    pub(crate) projections: [Linear; 2],
    /// The projections to the inputs of the rates of all value heads, and then of their decays: together `[2, value heads]` outputs.
    pub(crate) rates: Vec<Linear>,
    /// `[taps, channels]`, the oldest input's tap first.
    pub(crate) taps: Vec<f32>,
    /// The logarithm of each value head's decay speed; `biases` are added to the inputs of decays.
    pub(crate) speeds: Vec<f32>,
    pub(crate) biases: Vec<f32>,
    /// The norm over each head's output, before it is gated.
    pub(crate) norm: Norm,
}

/// The tensors of a gated short convolution, without the projection of its output.
pub(crate) struct ConvTensors {
    /// The projections to the convolution's gate, its output's gate and its input, `[channels, hidden]` each.
    pub(crate) projections: [Linear; 3],
    /// `[taps, channels]`, the oldest input's tap first.
    pub(crate) taps: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
}

pub(crate) struct LatentTensors {
    /// The projection that compresses queries' input, and the norm after it.
    pub(crate) compress: Option<(Linear, Norm)>,
    /// `[heads, rotated and plain part, inputs]`
    pub(crate) query: Linear,
    /// `[rank, hidden]`
    pub(crate) latent: Linear,
    pub(crate) norm: Norm,
    /// `[rotated, hidden]`
    pub(crate) rotated: Linear,
    /// The key's plain part, `[plain, rank]`, and the value, `[value, rank]`, of each head.
    pub(crate) heads: Vec<[Linear; 2]>,
}

pub(crate) enum MlpTensors {
    Dense(Box<DenseTensors>),
    Experts(Box<ExpertTensors>),
}

pub(crate) struct DenseTensors {
    /// The projection to the gate, if there is one.
    pub(crate) gate: Option<Linear>,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

pub(crate) struct ExpertTensors {
    /// `[experts, hidden]`
    pub(crate) router: Linear,
    /// The correction of each expert's score, for the choice alone.
    pub(crate) correction: Option<Vec<f32>>,
    /// The gate, up and down projections of each expert.
    pub(crate) experts: Vec<[Linear; 3]>,
    pub(crate) shared: Option<SharedTensors>,
}

/// An expert that every row goes through.
pub(crate) struct SharedTensors {
    /// `[1, hidden]`
    pub(crate) gate: Option<Linear>,
    pub(crate) projections: [Linear; 3],
}

/// The epsilon of the norms over latents, regardless of `rms_norm_eps`, as in transformers.
const LATENT_EPSILON: f32 = 1e-6;

/// The prefixes of the text model's tensors and of its head: in a checkpoint of its own, and in two layouts of multimodal ones.
const PLACES: [(&str, &str); 3] =
    [("model", "lm_head"), ("language_model.model", "language_model.lm_head"), ("model.language_model", "lm_head")];

impl Tensors {
    /// Takes all tensors, in the order of the checkpoint's digest.
    pub(crate) fn take(checkpoint: &mut Checkpoint, config: &ModelConfig) -> Result<Self, ModelError> {
        let storage = Storage::new(config.quantization.as_ref());
        let has_embedding = |(model, _): &(&str, &str)| checkpoint.has(&format!("{model}.embed_tokens.weight"));
        let (model, head) = PLACES.into_iter().find(has_embedding).unwrap_or(PLACES[0]);
        let embedding = checkpoint.matrix(&format!("{model}.embed_tokens.weight"), config.vocab, config.hidden)?;
        let mut layers = Vec::new();
        for index in 0..config.layers {
            let of = TakeLayer { checkpoint, config, storage: &storage, index, prefix: format!("{model}.layers.{index}") };
            layers.push(of.take()?);
        }
        // Every layer has one of these tensors.
        for part in ["input_layernorm.weight", "operator_norm.weight", "self_attn.o_proj.weight"] {
            checkpoint.must_not_have(&format!("{model}.layers.{}.{part}", config.layers.saturating_add(config.draft_layers)))?;
        }
        let final_norm = Norm::take(checkpoint, config, &format!("{model}.{}", config.family.final_norm), config.hidden)?;
        let weight = match config.tied {
            true => Weight::Plain(embedding.clone()),
            false => storage.take(checkpoint, head, config.vocab, config.hidden)?,
        };
        let head = Linear { name: format!("{head}.weight"), weight, bias: None, order: RowOrder::AsStored };
        Ok(Self { embedding, layers, final_norm, head })
    }

    /// The tensors of consecutive layers, with the embedding and the head.
    pub(crate) fn of_layers(self, layers: Range<usize>) -> Self {
        let layers = self.layers.into_iter().take(layers.end).skip(layers.start).collect();
        Self { layers, ..self }
    }

    /// The part of one tensor-parallel rank: of each matrix its rows, and the numbers that go with its heads. Matrices stay in the mapped
    /// files.
    pub(crate) fn part(&self, shard: Shard, config: &ModelConfig) -> Result<Self, ModelError> {
        let layers = self.layers.iter().map(|layer| layer.part(shard, config)).collect::<Result<_, _>>()?;
        Ok(Self { embedding: self.embedding.clone(), layers, final_norm: self.final_norm.clone(), head: self.head.part(shard, 1)? })
    }

    /// Whether every matrix is bf16 after dequantization.
    pub(crate) fn matrices_are_bf16(&self) -> bool {
        self.embedding.view().dtype() == Dtype::Bf16 && self.projections().all(|linear| linear.weight.dtype() == Dtype::Bf16)
    }

    /// Whether there are matrices in 4 bits, and products can take all of these as they are.
    pub(crate) fn can_stay_in_4_bits(&self) -> bool {
        let can_stay = |linear: &Linear| match &linear.weight {
            Weight::Int4(matrix) => Some(matrix.can_stay()),
            Weight::Mxfp4(_) => Some(true),
            Weight::Plain(_) | Weight::Fp8(_) | Weight::Transposed(_) => None,
        };
        let mut in_4_bits = self.projections().filter_map(can_stay).peekable();
        in_4_bits.peek().is_some() && in_4_bits.all(|can_stay| can_stay)
    }

    /// Whether there are matrices in 4 bits.
    pub(crate) fn has_4_bits(&self) -> bool {
        self.projections().any(|linear| matches!(linear.weight, Weight::Int4(_) | Weight::Mxfp4(_)))
    }

    fn projections(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(LayerTensors::projections).chain([&self.head])
    }
}

impl LayerTensors {
    /// All projections that multiply in the model's arithmetic, which excludes a router, a shared expert's gate and a delta rule's rates.
    fn projections(&self) -> impl Iterator<Item = &Linear> {
        let Self { inputs, output_gate, output, mlp, .. } = self;
        let inputs = match inputs {
            InputTensors::Heads(heads) => heads.iter().collect(),
            InputTensors::Latent(latent) => latent.projections(),
            InputTensors::ShortConv(conv) => conv.projections.iter().collect(),
            InputTensors::DeltaRule(rule) => rule.projections.iter().collect(),
        };
        let (dense, experts) = match mlp {
            MlpTensors::Dense(dense) => (Some(&**dense), None),
            MlpTensors::Experts(tensors) => (None, Some(&**tensors)),
        };
        let experts =
            experts.into_iter().flat_map(|tensors| tensors.experts.iter().chain(tensors.shared.iter().map(|shared| &shared.projections)));
        let dense = dense.into_iter().flat_map(|DenseTensors { gate, up, down }| gate.iter().chain([up, down]));
        inputs.into_iter().chain(output_gate).chain([output]).chain(dense).chain(experts.flatten())
    }
}

impl LayerTensors {
    /// The part of one rank, in a model that can be split: one whose layers keep no states.
    fn part(&self, shard: Shard, config: &ModelConfig) -> Result<Self, ModelError> {
        let of_heads = |linear: &Linear| linear.part(shard, config.head_dim);
        let inputs = match &self.inputs {
            InputTensors::Heads(heads) => {
                let [q, k, v] = &**heads;
                InputTensors::Heads(Box::new([of_heads(q)?, of_heads(k)?, of_heads(v)?]))
            }
            InputTensors::Latent(latent) => InputTensors::Latent(Box::new(latent.part(shard)?)),
            InputTensors::ShortConv(_) | InputTensors::DeltaRule(_) => unreachable!("such layers are refused before"),
        };
        let mlp = match &self.mlp {
            MlpTensors::Dense(dense) => {
                let DenseTensors { gate, up, down } = &**dense;
                let gate = gate.as_ref().map(|gate| gate.part(shard, 1)).transpose()?;
                MlpTensors::Dense(Box::new(DenseTensors { gate, up: up.part(shard, 1)?, down: down.part(shard, 1)? }))
            }
            MlpTensors::Experts(experts) => MlpTensors::Experts(Box::new(experts.part(shard)?)),
        };
        Ok(Self {
            attention_norm: self.attention_norm.clone(),
            inputs,
            output_gate: self.output_gate.as_ref().map(of_heads).transpose()?,
            output: self.output.part(shard, 1)?,
            qk_norm: self.qk_norm.clone(),
            sinks: self.sinks.as_ref().map(|sinks| sinks[part_of(shard, sinks.len())].to_vec()),
            after_attention: self.after_attention.clone(),
            mlp_norm: self.mlp_norm.clone(),
            mlp,
            after_mlp: self.after_mlp.clone(),
        })
    }
}

impl LatentTensors {
    /// The part of one rank: its heads' projections, and all of those that make what every head reads.
    fn part(&self, shard: Shard) -> Result<Self, ModelError> {
        let Self { compress, query, latent, norm, rotated, heads } = self;
        let compress = compress.as_ref().map(|(down, norm)| Ok::<_, ModelError>((down.whole()?, norm.clone())));
        let of_head = |[key, value]: &[Linear; 2]| Ok::<_, ModelError>([key.whole()?, value.whole()?]);
        Ok(Self {
            compress: compress.transpose()?,
            query: query.part(shard, query.weight.rows() / heads.len())?,
            latent: latent.whole()?,
            norm: norm.clone(),
            rotated: rotated.whole()?,
            heads: heads[part_of(shard, heads.len())].iter().map(of_head).collect::<Result<_, _>>()?,
        })
    }
}

impl ExpertTensors {
    /// The part of one rank: whole experts, with all of the router, and the shared expert's rows.
    fn part(&self, shard: Shard) -> Result<Self, ModelError> {
        let Self { router, correction, experts, shared } = self;
        let whole = |[gate, up, down]: &[Linear; 3]| Ok::<_, ModelError>([gate.whole()?, up.whole()?, down.whole()?]);
        let shared = shared.as_ref().map(|SharedTensors { gate, projections: [gate_of, up, down] }| {
            let gate = gate.as_ref().map(Linear::whole).transpose()?;
            let projections = [gate_of.part(shard, 1)?, up.part(shard, 1)?, down.part(shard, 1)?];
            Ok::<_, ModelError>(SharedTensors { gate, projections })
        });
        Ok(Self {
            router: router.whole()?,
            correction: correction.clone(),
            experts: experts[part_of(shard, experts.len())].iter().map(whole).collect::<Result<_, _>>()?,
            shared: shared.transpose()?,
        })
    }
}

/// The part of `len` rows, columns or heads that belongs to a rank. Parts are in the order of ranks, and of nearly equal size.
pub(crate) fn part_of(shard: Shard, len: usize) -> Range<usize> {
    let start = |index: u32| len * index as usize / shard.count as usize;
    start(shard.index)..start(shard.index + 1)
}

/// Takes the tensors of one layer.
struct TakeLayer<'a> {
    checkpoint: &'a mut Checkpoint,
    config: &'a ModelConfig,
    storage: &'a Storage<'a>,
    index: usize,
    /// The prefix of the layer's tensors.
    prefix: String,
}

impl TakeLayer<'_> {
    fn take(mut self) -> Result<LayerTensors, ModelError> {
        let config = self.config;
        let d = config.head_dim;
        let (q_rows, kv_rows) = (config.heads * d, config.kv_heads * d);
        let recurrent = config.recurrent.as_ref().filter(|recurrent| recurrent.is_recurrent(self.index)).map(|recurrent| recurrent.kind);
        let (inputs, output_gate) = match (recurrent, config.latent) {
            (Some(kind), _) => (self.recurrent(kind)?, None),
            (None, Some(latent)) => (InputTensors::Latent(Box::new(self.latent(latent)?)), None),
            (None, None) => self.heads([q_rows, kv_rows, kv_rows])?,
        };
        let output = match recurrent {
            Some(RecurrentKind::ShortConv { channels, has_bias, .. }) => self.linear("conv.out_proj", config.hidden, channels, has_bias)?,
            Some(RecurrentKind::DeltaRule { heads, .. }) => self.linear("linear_attn.out_proj", config.hidden, heads.outputs(), false)?,
            None => {
                let attended = config.heads * config.latent.map_or(d, |latent| latent.value);
                self.linear(config.family.output, config.hidden, attended, config.output_bias)?
            }
        };
        let mlp = match config.experts_of(self.index) {
            Some(experts) => MlpTensors::Experts(Box::new(self.experts(experts)?)),
            None => MlpTensors::Dense(Box::new(self.dense()?)),
        };
        let norms = config.family.norms;
        let attention_norm = self.norm(norms.before_attention)?;
        let mlp_norm = self.norm(norms.before_mlp)?;
        let widths = match config.family.qk_norm {
            _ if !config.qk_norm || recurrent.is_some() => None,
            QkNorm::All => Some((q_rows, kv_rows)),
            QkNorm::None | QkNorm::Heads | QkNorm::HeadsIf(_) => Some((d, d)),
        };
        let qk_norm = match widths {
            Some((q, k)) => {
                let [q_norm, k_norm] = config.family.qk_norm_names;
                Some((self.norm_over(q_norm, q)?, self.norm_over(k_norm, k)?))
            }
            None => None,
        };
        let sinks = match config.family.has_sinks {
            true => Some(self.checkpoint.vector(&self.name("self_attn.sinks"), config.heads)?),
            false => None,
        };
        let (after_attention, after_mlp) = (self.norm(norms.after_attention)?, self.norm(norms.after_mlp)?);
        for scale in ["k_scale", "v_scale"].map(|scale| self.name(&format!("self_attn.{scale}"))) {
            if self.checkpoint.has(&scale) {
                let problem = "scales for K and V in FP8 are not supported: use a checkpoint without them".into();
                return Err(self.checkpoint.problem_of(&scale, problem));
            }
        }
        Ok(LayerTensors { attention_norm, inputs, output_gate, output, qk_norm, sinks, after_attention, mlp_norm, mlp, after_mlp })
    }

    /// The projections to queries, keys and values, and the one to the gates of the attention's outputs, if the family has these.
    fn heads(&mut self, rows: [usize; 3]) -> Result<(InputTensors, Option<Linear>), ModelError> {
        let ([mut q, mut k, v], gate) = match self.config.family.has_output_gate {
            true => {
                let [q, k, v, gate] = self.gated_qkv(rows)?;
                ([q, k, v], Some(gate))
            }
            false => (self.qkv(rows)?, None),
        };
        if self.config.family.is_interleaved {
            let head_dim = self.config.head_dim;
            let order = RowOrder::EvenFirst { head_dim, rotated: self.config.rope.rotated(head_dim) };
            q.reorder(order);
            k.reorder(order);
        }
        Ok((InputTensors::Heads(Box::new([q, k, v])), gate))
    }

    fn recurrent(&mut self, kind: RecurrentKind) -> Result<InputTensors, ModelError> {
        match kind {
            RecurrentKind::ShortConv { channels, taps, has_bias } => {
                let projections = self.fused("conv.in_proj", [channels; 3], has_bias)?;
                let bias = self.name("conv.conv.bias");
                let taps = self.taps("conv.conv", channels, taps)?;
                let bias = if has_bias { Some(self.checkpoint.vector(&bias, channels)?) } else { None };
                Ok(InputTensors::ShortConv(Box::new(ConvTensors { projections, taps, bias })))
            }
            RecurrentKind::DeltaRule { heads, taps } => Ok(InputTensors::DeltaRule(Box::new(self.delta_rule(heads, taps)?))),
        }
    }

    fn delta_rule(&mut self, heads: DeltaHeads, taps: usize) -> Result<DeltaTensors, ModelError> {
        let Some(Recurrence::DeltaRule(storage)) = self.config.family.recurrence else { unreachable!("the family has such layers") };
        let (projections, rates) = match storage {
            DeltaStorage::ByKeyHead => self.delta_projections(heads)?,
            DeltaStorage::Apart => {
                let hidden = self.config.hidden;
                let mixed = self.linear("linear_attn.in_proj_qkv", heads.channels(), hidden, false)?;
                let gates = self.linear("linear_attn.in_proj_z", heads.outputs(), hidden, false)?;
                let mut rates = Vec::new();
                for part in ["linear_attn.in_proj_b", "linear_attn.in_proj_a"] {
                    rates.push(self.linear(part, heads.value_heads, hidden, false)?);
                }
                ([mixed, gates], rates)
            }
        };
        let taps = self.taps("linear_attn.conv1d", heads.channels(), taps)?;
        let [speeds, biases] = ["linear_attn.A_log", "linear_attn.dt_bias"].map(|part| self.name(part));
        Ok(DeltaTensors {
            projections,
            rates,
            taps,
            speeds: self.checkpoint.vector(&speeds, heads.value_heads)?,
            biases: self.checkpoint.vector(&biases, heads.value_heads)?,
            norm: Norm::rms(self.checkpoint, &self.name("linear_attn.norm"), heads.value_dim, self.config.norm_epsilon)?,
        })
    }

    /// The projections of a delta rule's input, taken out of those that are grouped by key head.
    fn delta_projections(&mut self, heads: DeltaHeads) -> Result<([Linear; 2], Vec<Linear>), ModelError> {
        let (groups, shared) = (heads.key_heads, heads.value_heads / heads.key_heads);
        let values = shared * heads.value_dim;
        let of_group = [heads.key_dim, heads.key_dim, values, values];
        let all = self.linear("linear_attn.in_proj_qkvz", groups * of_group.iter().sum::<usize>(), self.config.hidden, false)?;
        let part = |first, end| RowOrder::ByPart { groups, sizes: of_group, first, end };
        let projections = [self.ordered(&all, part(0, 3))?, self.ordered(&all, part(3, 4))?];
        let rates = self.linear("linear_attn.in_proj_ba", 2 * heads.value_heads, self.config.hidden, false)?;
        let rates = rates.reordered(RowOrder::ByPart { groups, sizes: [shared, shared, 0, 0], first: 0, end: 2 });
        Ok((projections, vec![rates]))
    }

    /// The taps of a convolution of channels, `[taps, channels]`.
    fn taps(&mut self, part: &str, channels: usize, taps: usize) -> Result<Vec<f32>, ModelError> {
        let weight = self.name(&format!("{part}.weight"));
        let stored = self.checkpoint.scales(&weight, &[vec![channels, 1, taps]])?;
        Ok((0..taps).flat_map(|tap| stored.iter().skip(tap).step_by(taps).copied()).collect())
    }

    fn latent(&mut self, latent: LatentConfig) -> Result<LatentTensors, ModelError> {
        let LatentConfig { query_rank, rank, plain, rotated, value, is_interleaved } = latent;
        let (hidden, heads, bias) = (self.config.hidden, self.config.heads, self.config.qkv_bias);
        let q_rows = heads * latent.query_dim();
        let (compress, query) = match query_rank {
            None => (None, self.linear("self_attn.q_proj", q_rows, hidden, false)?),
            Some(query_rank) => {
                let down = self.linear("self_attn.q_a_proj", query_rank, hidden, bias)?;
                let norm = self.norm_over("self_attn.q_a_layernorm", query_rank)?.with_epsilon(LATENT_EPSILON);
                (Some((down, norm)), self.linear("self_attn.q_b_proj", q_rows, query_rank, false)?)
            }
        };
        let query = query.reordered(RowOrder::RotatedFirst { plain, rotated, is_interleaved });
        let both = self.linear("self_attn.kv_a_proj_with_mqa", rank + rotated, hidden, bias)?;
        let [compressed, key] = self.parts(&both, [rank, rotated])?;
        let norm = self.norm_over("self_attn.kv_a_layernorm", rank)?.with_epsilon(LATENT_EPSILON);
        let all = self.linear("self_attn.kv_b_proj", heads * (plain + value), rank, false)?;
        let mut of_heads = self.parts_of(&all, [plain, value].repeat(heads).as_slice())?.into_iter();
        let heads = (0..heads).map(|_| std::array::from_fn(|_| of_heads.next().expect("two parts for each head"))).collect();
        let key = if is_interleaved { key.reordered(RowOrder::EvenFirst { head_dim: rotated, rotated }) } else { key };
        Ok(LatentTensors { compress, query, latent: compressed, norm, rotated: key, heads })
    }

    fn dense(&mut self) -> Result<DenseTensors, ModelError> {
        let (hidden, inner, bias, mlp) = (self.config.hidden, self.config.intermediate, self.config.mlp_bias, self.config.family.mlp);
        let (gate, up) = match mlp {
            Mlp::Gated([gate, up, _]) => (Some(self.linear(gate, inner, hidden, bias)?), self.linear(up, inner, hidden, bias)?),
            Mlp::FusedGate => {
                let [gate, up] = self.fused("mlp.gate_up_proj", [inner; 2], bias)?;
                (Some(gate), up)
            }
            Mlp::Plain => (None, self.linear("mlp.c_fc", inner, hidden, bias)?),
        };
        let down = match mlp {
            Mlp::Gated([.., down]) => down,
            Mlp::FusedGate => "mlp.down_proj",
            Mlp::Plain => "mlp.c_proj",
        };
        Ok(DenseTensors { gate, up, down: self.linear(down, hidden, inner, bias)? })
    }

    fn experts(&mut self, experts: &ExpertConfig) -> Result<ExpertTensors, ModelError> {
        let (hidden, rule) = (self.config.hidden, self.config.family.experts.expect("a layer of experts"));
        let ExpertConfig { count, intermediate, shared, .. } = *experts;
        let router = self.linear(&format!("{}.{}", rule.block, rule.router), count, hidden, rule.has_biases)?;
        let correction = match rule.correction {
            Some(part) => Some(self.checkpoint.vector(&self.name(&format!("{}.{part}", rule.block)), count)?),
            None => None,
        };
        let of_layer = format!("{}.experts", rule.block);
        let experts = match rule.storage {
            ExpertStorage::Apart(projections) => self.experts_apart(&of_layer, projections, count, intermediate)?,
            ExpertStorage::Stacked => self.experts_stacked(&of_layer, count, intermediate)?,
            ExpertStorage::StackedRows => self.experts_in_rows(&of_layer, count, intermediate)?,
        };
        let shared = match rule.shared.zip(shared) {
            Some((shared, width)) => {
                let gate = shared.gate.map(|gate| self.linear(&format!("{}.{gate}", rule.block), 1, hidden, false)).transpose()?;
                Some(SharedTensors { gate, projections: self.expert(&format!("{}.{}", rule.block, shared.name), GATED, width)? })
            }
            None => None,
        };
        Ok(ExpertTensors { router, correction, experts, shared })
    }

    fn experts_apart(&mut self, name: &str, projections: [&str; 3], count: usize, inner: usize) -> Result<Vec<[Linear; 3]>, ModelError> {
        let surplus = self.name(&format!("{name}.{count}.{}.weight", projections[0]));
        let experts = (0..count).map(|index| self.expert(&format!("{name}.{index}"), projections, inner)).collect::<Result<_, _>>()?;
        match self.checkpoint.has(&surplus) {
            true => Err(self.checkpoint.problem_of(&surplus, format!("it is of one expert more than config.json counts ({count})"))),
            false => Ok(experts),
        }
    }

    fn experts_stacked(&mut self, name: &str, count: usize, inner: usize) -> Result<Vec<[Linear; 3]>, ModelError> {
        let (module, hidden) = (self.name(name), self.config.hidden);
        let mut take = |part, inputs, outputs| Stack::take(self.checkpoint, self.storage, &module, part, [count, inputs, outputs]);
        let (gate_up, down) = (take("gate_up_proj", hidden, 2 * inner)?, take("down_proj", inner, hidden)?);
        let by_turns = |first| Outputs { first, step: 2, count: inner };
        let all = Outputs { first: 0, step: 1, count: hidden };
        let expert = |index| [gate_up.linear(index, by_turns(0)), gate_up.linear(index, by_turns(1)), down.linear(index, all)];
        Ok((0..count).map(expert).collect())
    }

    fn experts_in_rows(&mut self, name: &str, count: usize, inner: usize) -> Result<Vec<[Linear; 3]>, ModelError> {
        let hidden = self.config.hidden;
        let [gate_up, down] = ["gate_up_proj", "down_proj"].map(|part| self.name(&format!("{name}.{part}")));
        if !self.checkpoint.has(&gate_up) {
            return self.experts_apart(name, GATED, count, inner);
        }
        let of_gates = self.checkpoint.matrices(&gate_up, [count, 2 * inner, hidden])?;
        let of_downs = self.checkpoint.matrices(&down, [count, hidden, inner])?;
        let linear = |name: &str, all: &WeightMatrix, first, rows| Linear {
            name: name.to_owned(),
            weight: Weight::Plain(all.rows_of(first..first + rows)),
            bias: None,
            order: RowOrder::AsStored,
        };
        let expert = |index: usize| {
            let gate = 2 * index * inner;
            [
                linear(&gate_up, &of_gates, gate, inner),
                linear(&gate_up, &of_gates, gate + inner, inner),
                linear(&down, &of_downs, index * hidden, hidden),
            ]
        };
        Ok((0..count).map(expert).collect())
    }

    /// The projections of the expert with this name.
    fn expert(&mut self, name: &str, projections: [&str; 3], inner: usize) -> Result<[Linear; 3], ModelError> {
        let hidden = self.config.hidden;
        let [gate, up, down] = projections.map(|projection| format!("{name}.{projection}"));
        Ok([self.linear(&gate, inner, hidden, false)?, self.linear(&up, inner, hidden, false)?, self.linear(&down, hidden, inner, false)?])
    }

    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    fn norm(&mut self, part: Option<&str>) -> Result<Option<Norm>, ModelError> {
        part.map(|part| self.norm_over(part, self.config.hidden)).transpose()
    }

    fn norm_over(&mut self, part: &str, len: usize) -> Result<Norm, ModelError> {
        let name = self.name(part);
        Norm::take(self.checkpoint, self.config, &name, len)
    }

    fn qkv(&mut self, rows: [usize; 3]) -> Result<[Linear; 3], ModelError> {
        let (hidden, bias) = (self.config.hidden, self.config.qkv_bias);
        if self.config.family.has_fused_qkv {
            return self.fused("self_attn.qkv_proj", rows, bias);
        }
        let [q, k, v] = rows;
        Ok([
            self.linear("self_attn.q_proj", q, hidden, bias)?,
            self.linear("self_attn.k_proj", k, hidden, bias)?,
            self.linear("self_attn.v_proj", v, hidden, bias)?,
        ])
    }

    /// Takes the projections to queries, keys and values, and the one to the gates, whose outputs lie beside each head's query.
    fn gated_qkv(&mut self, [q, k, v]: [usize; 3]) -> Result<[Linear; 4], ModelError> {
        let (hidden, bias, d) = (self.config.hidden, self.config.qkv_bias, self.config.head_dim);
        let both = self.linear("self_attn.q_proj", 2 * q, hidden, bias)?;
        let part = |nth| RowOrder::ByPart { groups: q / d, sizes: [d, d, 0, 0], first: nth, end: nth + 1 };
        Ok([
            self.ordered(&both, part(0))?,
            self.linear("self_attn.k_proj", k, hidden, bias)?,
            self.linear("self_attn.v_proj", v, hidden, bias)?,
            self.ordered(&both, part(1))?,
        ])
    }

    /// The outputs of a projection that `order` uses.
    fn ordered(&self, all: &Linear, order: RowOrder) -> Result<Linear, ModelError> {
        let [whole] = self.parts(all, [all.weight.rows()])?;
        Ok(whole.reordered(order))
    }

    fn linear(&mut self, part: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear, ModelError> {
        let name = self.name(part);
        let weight = self.storage.take(self.checkpoint, &name, rows, cols)?;
        let bias = if bias { Some(self.checkpoint.vector(&format!("{name}.bias"), rows)?) } else { None };
        Ok(Linear { name: format!("{name}.weight"), weight, bias, order: RowOrder::AsStored })
    }

    /// Projections of the layer's input that are stored as one, with the given number of outputs each, one after the other.
    fn fused<const N: usize>(&mut self, part: &str, rows: [usize; N], bias: bool) -> Result<[Linear; N], ModelError> {
        let all = self.linear(part, rows.iter().sum(), self.config.hidden, bias)?;
        self.parts(&all, rows)
    }

    fn parts<const N: usize>(&self, all: &Linear, rows: [usize; N]) -> Result<[Linear; N], ModelError> {
        let parts = self.parts_of(all, &rows)?;
        Ok(parts.try_into().unwrap_or_else(|_| unreachable!("a part for each number of rows")))
    }

    /// Consecutive parts of a projection's outputs, with the given number in each.
    fn parts_of(&self, all: &Linear, rows: &[usize]) -> Result<Vec<Linear>, ModelError> {
        let mut parts = Vec::new();
        let mut start = 0;
        for &rows in rows {
            let range = start..start + rows;
            start = range.end;
            let weight = all.weight.rows_of(range.clone()).map_err(|problem| self.checkpoint.problem_of(&all.name, problem))?;
            let bias = all.bias.as_ref().map(|bias| bias[range].to_vec());
            parts.push(Linear { name: all.name.clone(), weight, bias, order: RowOrder::AsStored });
        }
        Ok(parts)
    }
}

impl LatentTensors {
    fn projections(&self) -> Vec<&Linear> {
        let Self { compress, query, latent, rotated, heads, .. } = self;
        let compress = compress.iter().map(|(linear, _)| linear);
        compress.chain([query, latent, rotated]).chain(heads.iter().flatten()).collect()
    }
}

impl Linear {
    /// The rows of one rank, in whole units of `unit` rows.
    fn part(&self, shard: Shard, unit: usize) -> Result<Self, ModelError> {
        let is_within_heads = !matches!(self.order, RowOrder::ByPart { .. });
        assert!(is_within_heads, "rows are reordered within a head at most");
        let units = part_of(shard, self.weight.rows() / unit);
        let rows = units.start * unit..units.end * unit;
        let refuse = |problem| ModelError::Ranks { ranks: shard.count as usize, problem: format!("tensor {}: {problem}", self.name) };
        let weight = self.weight.rows_of(rows.clone()).map_err(refuse)?;
        let bias = self.bias.as_ref().map(|bias| bias[rows].to_vec());
        Ok(Self { name: self.name.clone(), weight, bias, order: self.order })
    }

    /// The same projection for another rank.
    fn whole(&self) -> Result<Self, ModelError> {
        self.part(Shard::WHOLE, 1)
    }

    fn reordered(mut self, order: RowOrder) -> Self {
        self.reorder(order);
        self
    }

    fn reorder(&mut self, order: RowOrder) {
        self.order = order;
        if let Some(bias) = &mut self.bias {
            *bias = (0..order.outputs(bias.len())).map(|row| bias[order.stored(row)]).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_outputs_of_a_heads_rotated_part_come_first() {
        let order = RowOrder::EvenFirst { head_dim: 8, rotated: 6 };
        assert_eq!((0..16).map(|row| order.stored(row)).collect::<Vec<_>>(), [0, 2, 4, 1, 3, 5, 6, 7, 8, 10, 12, 9, 11, 13, 14, 15]);
        assert_eq!(RowOrder::AsStored.stored(5), 5);
        let order = |is_interleaved| RowOrder::RotatedFirst { plain: 3, rotated: 4, is_interleaved };
        assert_eq!((0..14).map(|row| order(true).stored(row)).collect::<Vec<_>>(), [3, 5, 4, 6, 0, 1, 2, 10, 12, 11, 13, 7, 8, 9]);
        assert_eq!((0..7).map(|row| order(false).stored(row)).collect::<Vec<_>>(), [3, 4, 5, 6, 0, 1, 2]);
    }

    #[test]
    fn parts_are_in_order_and_nearly_equal() {
        let parts = |len, count| (0..count).map(|index| part_of(Shard { index, count }, len)).collect::<Vec<_>>();
        assert_eq!(parts(8, 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(parts(10, 3), [0..3, 3..6, 6..10]);
        assert_eq!(parts(7, 2), [0..3, 3..7]);
    }

    #[test]
    fn parts_of_groups_come_one_after_the_other() {
        // Two groups of 1 + 2 + 3 outputs.
        let rows = |first, end| {
            let order = RowOrder::ByPart { groups: 2, sizes: [1, 2, 3, 0], first, end };
            (0..order.outputs(12)).map(|row| order.stored(row)).collect::<Vec<_>>()
        };
        assert_eq!(rows(0, 3), [0, 6, 1, 2, 7, 8, 3, 4, 5, 9, 10, 11]);
        assert_eq!(rows(1, 2), [1, 2, 7, 8]);
        assert_eq!(rows(2, 3), [3, 4, 5, 9, 10, 11]);
    }
}
