//! `config.json`, checked, with the family's rules applied: everything that decides which tensors there are and how
//! they are used.

mod experts;

pub(crate) use self::experts::{ExpertConfig, ExpertGroups};

use crate::{
    error::ModelError,
    family::{self, FAMILIES, Factor, Family, Flag, QkNorm, RopeRule, WidthRule, WindowRule},
    generation::{self, TokenIds},
    json::read_json,
    latent::LatentConfig,
    quantization::Scheme,
    recurrent::RecurrentConfig,
    rope::{Beside, RopeConfig},
};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use std::{ops::Range, path::Path};
use tidemill_kernels::cpu::activation::Activation;
use tidemill_proto::{
    block::{KvDtype, KvShape, Token},
    files::packed,
    message::VOCAB_MAX,
};

/// A model's dimensions and settings. The serialized fields, besides the weights, decide the arithmetic. Fields that came with later
/// families are omitted at their defaults, so that the layouts of earlier families stay the same.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelConfig {
    /// The name of the architecture, which decides everything in the family's row.
    pub(crate) architecture: &'static str,
    #[serde(skip)]
    pub(crate) family: &'static Family,
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    /// The number of KV heads; 1 for latent attention.
    pub(crate) kv_heads: usize,
    /// The dimension of a head; for latent attention, that of the part that rotates.
    pub(crate) head_dim: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latent: Option<LatentConfig>,
    /// The layers that keep a state instead of keys and values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recurrent: Option<RecurrentConfig>,
    pub(crate) norm_epsilon: f32,
    pub(crate) rope: RopeConfig,
    /// The rotation of layers with a window, where theirs differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) windowed_rope: Option<RopeConfig>,
    /// Layers that do not rotate queries and keys.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) unrotated: Vec<usize>,
    /// The sliding window of each layer, in tokens; `None` for layers that attend to all.
    pub(crate) windows: Vec<Option<usize>>,
    /// Whether the head shares the embedding's weights.
    pub(crate) tied: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) output_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) qk_norm: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) experts: Option<ExpertConfig>,
    #[serde(skip_serializing_if = "is_silu", serialize_with = "as_debug")]
    pub(crate) activation: Activation,
    /// The factor of scores; `1 / sqrt(head_dim)` if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) score_factor: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) score_cap: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) query_growth: Option<QueryGrowth>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) embedding_factor: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) residual_factor: Option<f32>,
    /// The factor of logits. This and the cap change a worker's answers, but not its KV blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) logit_factor: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) logit_cap: Option<f32>,
    /// The storage of weights in FP8 or in 4 bits, if some are; serialized as a field with the scheme's name.
    #[serde(flatten)]
    pub(crate) quantization: Option<Scheme>,
    /// The number of layers after the model's own that predict draft tokens. They are not loaded.
    #[serde(skip)]
    pub(crate) draft_layers: usize,
    #[serde(skip)]
    pub(crate) context_tokens: usize,
    /// Tokens that end a sequence, ascending.
    #[serde(skip)]
    pub(crate) eos: Vec<Token>,
}

/// The growth of queries with their position, by `1 + beta ln(1 + floor(position / positions))`, as in Llama 4.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct QueryGrowth {
    beta: f32,
    positions: f32,
}

impl QueryGrowth {
    pub(crate) fn factor(&self, position: usize) -> f32 {
        1.0 + self.beta * (1.0 + (position as f32 / self.positions).floor()).ln()
    }
}

/// Fields of `config.json` with fixed names; a family's row names others.
#[derive(Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
    rotary_dim: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    sliding_window_pattern: Option<Value>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    decoder_sparse_step: Option<usize>,
    first_k_dense_replace: Option<usize>,
    num_nextn_predict_layers: Option<usize>,
    quantization_config: Option<Value>,
    eos_token_id: Option<TokenIds>,
}

/// The fields of a text model.
pub(crate) type Fields = Map<String, Value>;

impl RawConfig {
    /// The rotary settings, in the older layout or the newer one.
    fn rope_section(&self) -> Option<&Value> {
        self.rope_scaling.as_ref().filter(|section| !section.is_null()).or(self.rope_parameters.as_ref())
    }
}

/// The largest size that is accepted. No real model is larger, and products of three sizes stay far from overflow.
pub(crate) const SIZE_MAX: usize = 1 << 20;
/// The longest context: f32 counts positions exactly up to here.
const CONTEXT_MAX: usize = 1 << 24;
const LAYERS_MAX: usize = 1 << 12;

/// The default of [`RopeRule::ExceptListed`].
const NO_ROPE_INTERVAL: usize = 4;

impl ModelConfig {
    /// Reads `config.json` and `generation_config.json` of a checkpoint.
    pub(crate) fn load(dir: &Path) -> Result<Self, ModelError> {
        packed(dir).map_or(Ok(()), |reason| Err(ModelError::Packed(reason)))?;
        let path = dir.join("config.json");
        // The architecture decides how to read the rest, so it is checked first.
        let (family, fields) = family_and_fields(&path, read_json(&path)?)?;
        let raw: RawConfig =
            serde_json::from_value(fields.clone().into()).map_err(|source| ModelError::Json { path: path.clone(), source })?;
        let eos = generation::eos_ids(dir, raw.eos_token_id.clone(), raw.vocab_size)?;
        Self::new(family, raw, &fields, eos).map_err(|problem| ModelError::Config { path, problem })
    }

    fn new(family: &'static Family, raw: RawConfig, fields: &Fields, eos: Vec<Token>) -> Result<Self, String> {
        let within = |name: &str, n: usize, max: usize| {
            if (1..=max).contains(&n) { Ok(n) } else { Err(format!("{name} is {n}, which is not within 1..={max}")) }
        };
        let layers = within("num_hidden_layers", raw.num_hidden_layers, LAYERS_MAX)?;
        let hidden = within("hidden_size", raw.hidden_size, SIZE_MAX)?;
        let heads = within("num_attention_heads", raw.num_attention_heads, SIZE_MAX)?;
        let kv_heads = within("num_key_value_heads", raw.num_key_value_heads.unwrap_or(heads), SIZE_MAX)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!("num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"));
        }
        let latent = if family.has_latent { Some(LatentConfig::parse(fields)?) } else { None };
        if latent.is_some() && kv_heads != heads {
            return Err(format!("num_key_value_heads {kv_heads} is not num_attention_heads {heads}, where each head has keys of its own"));
        }
        let kv_heads = if latent.is_some() { 1 } else { kv_heads };
        let head_dim = latent.map_or(raw.head_dim.unwrap_or(hidden / heads), |latent| latent.rotated);
        let head_dim = within("head_dim", head_dim, SIZE_MAX)?;
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {head_dim} is odd: the rotary embedding turns pairs"));
        }
        let columns = Columns { fields, hidden };
        let recurrent = family.recurrence.map(|rule| RecurrentConfig::parse(rule, fields, layers, hidden)).transpose()?;
        let norm_epsilon = columns.number(family.norm_epsilon)?.unwrap_or_default() as f32;
        if !(norm_epsilon.is_finite() && norm_epsilon >= 0.0) {
            return Err(format!("{} {norm_epsilon} makes no sense", family.norm_epsilon));
        }
        let windows = windows(family.window, &raw, layers)?;
        let (rope, windowed_rope) = ropes(family.rope, &raw, fields)?;
        for rope in [Some(&rope), windowed_rope.as_ref()].into_iter().flatten() {
            rope.check_heads(head_dim)?;
        }
        let positions = within("max_position_embeddings", raw.max_position_embeddings, CONTEXT_MAX)?;
        let context_tokens = rope.extended_positions().map_or(positions, |extended| positions.max((extended as usize).min(CONTEXT_MAX)));
        Ok(Self {
            architecture: family.architecture,
            family,
            vocab: within("vocab_size", raw.vocab_size, VOCAB_MAX as usize)?,
            hidden,
            intermediate: columns.mlp_width(family.mlp_width, within("intermediate_size", raw.intermediate_size, SIZE_MAX)?)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            latent,
            recurrent,
            norm_epsilon,
            unrotated: unrotated(family.rope, &raw, &windows)?,
            rope,
            windowed_rope,
            windows,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            qkv_bias: columns.flag(family.qkv_bias)?,
            output_bias: columns.flag(family.output_bias)?,
            mlp_bias: columns.flag(family.mlp_bias)?,
            qk_norm: columns.qk_norm(family.qk_norm)?,
            experts: columns.experts(family.experts.as_ref(), &raw)?,
            activation: columns.activation(family)?,
            score_factor: match latent {
                Some(latent) => Some(latent.score_factor(raw.rope_section())?),
                None => columns.factor(family.score_factor)?,
            },
            score_cap: columns.cap(family.score_cap)?,
            query_growth: if family.has_query_growth { query_growth(&raw)? } else { None },
            embedding_factor: columns.factor(family.embedding_factor)?,
            residual_factor: columns.factor(family.residual_factor)?.filter(|factor| *factor != 1.0),
            logit_factor: columns.factor(family.logit_factor)?.filter(|factor| *factor != 1.0),
            logit_cap: columns.cap(family.logit_cap)?,
            quantization: Scheme::parse(raw.quantization_config.as_ref())?,
            draft_layers: raw.num_nextn_predict_layers.unwrap_or(0),
            context_tokens,
            eos,
        })
    }

    /// The configuration of consecutive layers alone, in a model whose layers keep no states. Layers are counted from the first of these.
    pub(crate) fn of_layers(&self, layers: Range<usize>) -> Self {
        let within = |all: &[usize]| all.iter().filter(|layer| layers.contains(layer)).map(|layer| layer - layers.start).collect();
        let dense_layers = |experts: &ExpertConfig| ExpertConfig { dense_layers: within(&experts.dense_layers), ..experts.clone() };
        Self {
            layers: layers.len(),
            unrotated: within(&self.unrotated),
            windows: self.windows[layers.clone()].to_vec(),
            experts: self.experts.as_ref().map(dense_layers),
            ..self.clone()
        }
    }

    /// The shape of a KV block with this storage.
    pub(crate) fn kv_shape(&self, dtype: KvDtype) -> KvShape {
        let head_dim = self.latent.map_or(self.head_dim, |latent| latent.stored_dim());
        let layers = self.layers - self.recurrent.as_ref().map_or(0, |recurrent| recurrent.layers().len());
        KvShape { layers, kv_heads: self.kv_heads, head_dim, dtype, latent: self.latent.map(|latent| latent.rank) }
    }

    /// The index of a layer's K and V in a block: its index among the layers that attend.
    pub(crate) fn kv_layer(&self, layer: usize) -> usize {
        layer - self.recurrent.as_ref().map_or(0, |recurrent| recurrent.layers_before(layer))
    }

    /// The experts of a layer; `None` if it is dense.
    pub(crate) fn experts_of(&self, layer: usize) -> Option<&ExpertConfig> {
        self.experts.as_ref().filter(|experts| experts.dense_layers.binary_search(&layer).is_err())
    }

    /// The index of a layer's rotary settings: 0 for [`rope`](Self::rope), 1 for [`windowed_rope`](Self::windowed_rope).
    pub(crate) fn rope_of(&self, layer: usize) -> Option<usize> {
        let is_windowed = self.windowed_rope.is_some() && self.windows[layer].is_some();
        (!self.unrotated.contains(&layer)).then_some(usize::from(is_windowed))
    }

    /// Tokens in the vocabulary; ids are below this.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Tokens that end a sequence, ascending.
    pub fn eos(&self) -> &[Token] {
        &self.eos
    }

    /// The longest sequence, prompt and completion together.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }
}

fn is_silu(activation: &Activation) -> bool {
    *activation == Activation::Silu
}

fn as_debug<S: Serializer>(activation: &Activation, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{activation:?}"))
}

/// The family of a checkpoint, and the fields of its text model with the family's defaults.
fn family_and_fields(path: &Path, config: Value) -> Result<(&'static Family, Map<String, Value>), ModelError> {
    let names: Vec<&str> = config["architectures"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let unknown = |found: String| {
        let supported = family::architectures().collect::<Vec<_>>().join(", ");
        let nearest = family::nearest(&found).to_owned();
        ModelError::Architecture { path: path.to_owned(), found, nearest, supported }
    };
    let (family, fields) = if names.iter().any(|name| family::MULTIMODAL.contains(name)) {
        let mut text = config["text_config"].clone();
        let model_type = text["model_type"].as_str().unwrap_or_default();
        let family = family::of_model_type(model_type).ok_or_else(|| ModelError::Config {
            path: path.to_owned(),
            problem: format!(
                "text_config's model_type {model_type:?} is not supported; supported are {}",
                FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ")
            ),
        })?;
        for key in ["tie_word_embeddings", "quantization_config", "eos_token_id"] {
            if text.get(key).is_none() && config.get(key).is_some() {
                text[key] = config[key].clone();
            }
        }
        (family, text)
    } else {
        let family = names.iter().find_map(|name| family::of_architecture(name)).ok_or_else(|| unknown(names.join(", ")))?;
        (family, config)
    };
    let Value::Object(mut fields) = fields else { unreachable!("what has fields is an object") };
    for (older, key) in family.older_keys {
        if let Some(value) = fields.get(*older).filter(|value| !value.is_null()).cloned() {
            fields.insert((*key).to_owned(), value);
        }
    }
    let defaults: Map<String, Value> = serde_json::from_str(family.defaults).expect("a row's defaults are an object");
    for (key, value) in defaults {
        fields.entry(key).or_insert(value);
    }
    Ok((family, fields))
}

/// The fields that a family's row names.
struct Columns<'a> {
    fields: &'a Fields,
    hidden: usize,
}

impl Columns<'_> {
    fn flag(&self, flag: Flag) -> Result<bool, String> {
        match flag {
            Flag::Never => Ok(false),
            Flag::Always => Ok(true),
            Flag::Key(key) => match self.fields.get(key) {
                None | Some(Value::Null) => Ok(false),
                Some(value) => value.as_bool().ok_or(format!("{key} is {value}, where true or false is needed")),
            },
        }
    }

    fn qk_norm(&self, norm: QkNorm) -> Result<bool, String> {
        match norm {
            QkNorm::None => Ok(false),
            QkNorm::Heads | QkNorm::All => Ok(true),
            QkNorm::HeadsIf(key) => self.flag(Flag::Key(key)),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>, String> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or(format!("{key} is {value}, where a number is needed")),
        }
    }

    fn mlp_width(&self, rule: WidthRule, stored: usize) -> Result<usize, String> {
        if rule == WidthRule::AsStored || !self.flag(Flag::Key("block_auto_adjust_ff_dim"))? {
            return Ok(stored);
        }
        let width = (self.positive("block_ffn_dim_multiplier")? * (2 * stored / 3) as f32) as usize;
        let multiple = self.positive("block_multiple_of")? as usize;
        match width.checked_next_multiple_of(multiple) {
            Some(width) if (1..=SIZE_MAX).contains(&width) => Ok(width),
            _ => Err(format!("intermediate_size {stored}, adjusted as block_auto_adjust_ff_dim says, is not within 1..={SIZE_MAX}")),
        }
    }

    /// A number above zero.
    fn positive(&self, key: &str) -> Result<f32, String> {
        let number = self.number(key)?.ok_or(format!("{key} is missing"))? as f32;
        if number.is_finite() && number > 0.0 { Ok(number) } else { Err(format!("{key} is {number}, which makes no sense")) }
    }

    fn factor(&self, factor: Factor) -> Result<Option<f32>, String> {
        Ok(match factor {
            Factor::One => None,
            Factor::Key(key) => Some(self.positive(key)?),
            Factor::InverseKey(key) => Some(1.0 / self.positive(key)?),
            Factor::InverseRootKey(key) => Some(1.0 / self.positive(key)?.sqrt()),
            Factor::RootOfHidden => Some((self.hidden as f32).sqrt()),
        })
    }

    fn cap(&self, key: Option<&str>) -> Result<Option<f32>, String> {
        match key {
            Some(key) if self.number(key)?.is_some() => Ok(Some(self.positive(key)?)),
            _ => Ok(None),
        }
    }

    fn activation(&self, family: &Family) -> Result<Activation, String> {
        let key = family.activation;
        let named = match self.fields.get(key) {
            None | Some(Value::Null) => Activation::Silu,
            Some(name) => match name.as_str() {
                Some("silu" | "swish") => Activation::Silu,
                Some("gelu") => Activation::Gelu,
                Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeluTanh,
                _ => return Err(format!("{key} {name} is not supported; supported are silu, gelu, gelu_pytorch_tanh and gelu_new")),
            },
        };
        match family.gate_clamp {
            None => Ok(named),
            Some([alpha, limit]) if named == Activation::Silu => {
                Ok(Activation::Clamped { alpha: self.positive(alpha)?, limit: self.positive(limit)? })
            }
            Some(_) => Err(format!("{key} is not supported for this architecture, except silu")),
        }
    }
}

/// The sliding window of each layer.
fn windows(rule: WindowRule, raw: &RawConfig, layers: usize) -> Result<Vec<Option<usize>>, String> {
    let window = match rule {
        WindowRule::Never => None,
        WindowRule::Everywhere | WindowRule::AllBut(_) => raw.sliding_window,
        WindowRule::IfUsed => raw.sliding_window.filter(|_| raw.use_sliding_window == Some(true)),
    };
    let Some(window) = window else { return Ok(vec![None; layers]) };
    if window == 0 {
        return Err("sliding_window is 0: leave it out for full attention".into());
    }
    match (rule, &raw.layer_types) {
        (WindowRule::Everywhere | WindowRule::Never, _) => Ok(vec![Some(window); layers]),
        (_, Some(types)) if types.len() != layers => Err(format!("layer_types has {} entries for {layers} layers", types.len())),
        (_, Some(types)) => types
            .iter()
            .map(|kind| match kind.as_str() {
                "full_attention" => Ok(None),
                "sliding_attention" => Ok(Some(window)),
                other => Err(format!("layer_types: {other:?} is not supported; supported are full_attention and sliding_attention")),
            })
            .collect(),
        (WindowRule::IfUsed, None) => {
            let first = raw.max_window_layers.ok_or("use_sliding_window needs max_window_layers or layer_types")?;
            Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect())
        }
        (WindowRule::AllBut(default), None) => {
            let every = match &raw.sliding_window_pattern {
                None | Some(Value::Null) => default,
                Some(every) => every.as_u64().filter(|every| *every > 0).ok_or_else(|| {
                    format!("sliding_window_pattern is {every}, which is not a number of layers: give layer_types instead")
                })? as usize,
            };
            Ok((1..=layers).map(|nth| (!nth.is_multiple_of(every)).then_some(window)).collect())
        }
    }
}

/// The rotary settings, and those of layers with a window where they have their own.
fn ropes(rule: RopeRule, raw: &RawConfig, fields: &Fields) -> Result<(RopeConfig, Option<RopeConfig>), String> {
    let beside = Beside {
        theta: raw.rope_theta,
        part: raw.partial_rotary_factor.or_else(|| Some(raw.rotary_dim? / raw.head_dim? as f64)),
        positions: raw.max_position_embeddings,
        original_positions: raw.original_max_position_embeddings,
        has_axes: rule == RopeRule::Axes,
    };
    let section = raw.rope_section();
    let RopeRule::ByWindow { local_theta } = rule else { return Ok((RopeConfig::parse(section, beside)?, None)) };
    let local = Beside { theta: fields.get(local_theta).and_then(Value::as_f64), ..beside };
    let (full, windowed) = match &raw.rope_parameters {
        Some(Value::Object(by_kind)) if by_kind.values().any(Value::is_object) => {
            (by_kind.get("full_attention"), by_kind.get("sliding_attention"))
        }
        _ => (section, None),
    };
    Ok((RopeConfig::parse(full, beside)?, Some(RopeConfig::parse(windowed, local)?)))
}

/// The layers that do not rotate queries and keys.
fn unrotated(rule: RopeRule, raw: &RawConfig, windows: &[Option<usize>]) -> Result<Vec<usize>, String> {
    let layers = 0..windows.len();
    match (rule, &raw.no_rope_layers) {
        (RopeRule::Everywhere | RopeRule::Axes | RopeRule::ByWindow { .. }, _) => Ok(Vec::new()),
        (RopeRule::Windowed, _) if raw.sliding_window.is_none() => Ok(Vec::new()),
        (RopeRule::Windowed, _) => Ok(layers.filter(|&layer| windows[layer].is_none()).collect()),
        (RopeRule::ExceptListed, Some(listed)) if listed.len() != windows.len() => {
            Err(format!("no_rope_layers has {} entries for {} layers", listed.len(), windows.len()))
        }
        (RopeRule::ExceptListed, Some(listed)) => Ok(layers.filter(|&layer| listed[layer] == 0).collect()),
        (RopeRule::ExceptListed, None) => match raw.no_rope_layer_interval.unwrap_or(NO_ROPE_INTERVAL) {
            0 => Err("no_rope_layer_interval is 0: give no_rope_layers instead".into()),
            every => Ok(layers.filter(|layer| (layer + 1).is_multiple_of(every)).collect()),
        },
    }
}

fn query_growth(raw: &RawConfig) -> Result<Option<QueryGrowth>, String> {
    let section = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref());
    let number = |key: &str| section.and_then(|section| section.get(key)).and_then(Value::as_f64).map(|number| number as f32);
    let Some(beta) = number("llama_4_scaling_beta").filter(|beta| *beta != 0.0) else { return Ok(None) };
    let positions = number("original_max_position_embeddings").unwrap_or(raw.max_position_embeddings as f32);
    match beta.is_finite() && positions.is_finite() && positions > 0.0 {
        true => Ok(Some(QueryGrowth { beta, positions })),
        false => Err(format!("llama_4_scaling_beta {beta} with original_max_position_embeddings {positions} makes no sense")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(edit: impl FnOnce(&mut Value)) -> Result<ModelConfig, String> {
        let mut config = json!({
            "architectures": ["Qwen2ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": null, "max_position_embeddings": 2048, "rope_scaling": null,
        });
        edit(&mut config);
        let (family, fields) = family_and_fields(Path::new("config.json"), config).map_err(|e| e.to_string())?;
        let raw = serde_json::from_value(fields.clone().into()).map_err(|e| e.to_string())?;
        ModelConfig::new(family, raw, &fields, Vec::new())
    }

    #[test]
    fn what_is_absent_has_the_familys_default() {
        let qwen2 = parse(|_| ()).unwrap();
        assert_eq!((qwen2.kv_heads, qwen2.head_dim, qwen2.norm_epsilon, qwen2.tied), (4, 16, 1e-6, false));
        assert_eq!((qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm), (true, false, false, false));
        let qwen3 = parse(|c| c["architectures"] = json!(["Qwen3ForCausalLM"])).unwrap();
        assert_eq!((qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm), (128, false, true));
    }

    #[test]
    fn a_tie_is_the_files_or_else_the_familys() {
        for (architecture, default) in [("LlamaForCausalLM", false), ("Gemma2ForCausalLM", true), ("Cohere2ForCausalLM", true)] {
            let tied = |edit: fn(&mut Value)| {
                let config = parse(|c| {
                    c["architectures"] = json!([architecture]);
                    edit(c);
                });
                config.unwrap().tied
            };
            let [yes, no]: [fn(&mut Value); 2] = [|c| c["tie_word_embeddings"] = json!(true), |c| c["tie_word_embeddings"] = json!(false)];
            assert_eq!((tied(|_| ()), tied(yes), tied(no)), (default, true, false), "{architecture}");
        }
    }

    #[test]
    fn fields_of_later_families_leave_earlier_fingerprints_as_they_were() {
        let written = serde_json::to_string(&parse(|_| ()).unwrap()).unwrap();
        let expected = r#"{"architecture":"Qwen2ForCausalLM","vocab":100,"hidden":64,"intermediate":128,"layers":4,"heads":4,"kv_heads":4,"head_dim":16,"norm_epsilon":0.000001,"rope":{"theta":10000.0,"scaling":"None"},"windows":[null,null,null,null],"tied":false,"qkv_bias":true,"output_bias":false,"mlp_bias":false,"qk_norm":false}"#;
        assert_eq!(written, expected);
    }

    #[test]
    fn biases_follow_their_flags_where_the_family_has_them() {
        for (architecture, attention, mlp) in
            [("LlamaForCausalLM", true, true), ("MistralForCausalLM", false, false), ("Qwen3ForCausalLM", true, false)]
        {
            let config = parse(|c| {
                c["architectures"] = json!([architecture]);
                c["attention_bias"] = json!(true);
                c["mlp_bias"] = json!(true);
            });
            let config = config.unwrap();
            assert_eq!((config.qkv_bias, config.output_bias, config.mlp_bias), (attention, attention, mlp), "{architecture}");
        }
    }

    #[test]
    fn windows_follow_the_familys_rule() {
        let windows = |edit: fn(&mut Value)| parse(edit).map(|config| config.windows);
        assert_eq!(windows(|c| c["sliding_window"] = json!(8)).unwrap(), [None; 4], "use_sliding_window is off");
        let by_layer = windows(|c| {
            (c["sliding_window"], c["use_sliding_window"], c["max_window_layers"]) = (json!(8), json!(true), json!(3));
        });
        assert_eq!(by_layer.unwrap(), [None, None, None, Some(8)]);
        let by_type = windows(|c| {
            (c["sliding_window"], c["use_sliding_window"], c["max_window_layers"]) = (json!(8), json!(true), json!(0));
            c["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
        });
        assert_eq!(by_type.unwrap(), [Some(8), None, Some(8), None]);
        assert!(
            windows(|c| (c["sliding_window"], c["use_sliding_window"]) = (json!(8), json!(true)))
                .unwrap_err()
                .contains("max_window_layers")
        );
        let mistral = |window: Value| parse(|c| (c["architectures"], c["sliding_window"]) = (json!(["MistralForCausalLM"]), window));
        assert_eq!(mistral(json!(8)).unwrap().windows, [Some(8); 4]);
        assert_eq!(mistral(json!(null)).unwrap().windows, [None; 4]);
    }

    #[test]
    fn older_layouts_of_rotary_settings_mean_the_same_as_newer_ones() {
        let of = |architecture: &'static str, settings: Value| {
            let config = parse(|c| {
                c["architectures"] = json!([architecture]);
                c.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
            });
            let config = config.unwrap();
            (config.rope, config.windowed_rope)
        };
        let linear = json!({"rope_type": "linear", "factor": 8.0});
        let old = of("Gemma3ForCausalLM", json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear}));
        let by_kind = json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        });
        assert_eq!(old, of("Gemma3ForCausalLM", json!({"rope_parameters": by_kind})));
        assert_eq!((old.0.theta, old.1.unwrap().theta), (1e6, 1e4));
        let part = of("Glm4ForCausalLM", json!({"head_dim": 16}));
        assert_eq!(part.0.part, Some(0.5), "the family's default");
        let minimax = json!({"head_dim": 16, "intermediate_size": 32, "num_key_value_heads": 4, "rotary_dim": 8});
        assert_eq!(of("MiniMaxM2ForCausalLM", minimax).0.part, Some(0.5));
        assert_eq!(part, of("Glm4ForCausalLM", json!({"head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5}})));
        let axes = json!({"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}});
        assert_eq!(of("Qwen3_5ForCausalLM", axes), of("Qwen3_5ForCausalLM", json!({"head_dim": 16, "num_key_value_heads": 4})));
    }

    #[test]
    fn layers_without_rotation_and_windows_follow_the_familys_patterns() {
        let of = |architecture: &'static str, settings: Value| {
            let config = parse(|c| {
                c["architectures"] = json!([architecture]);
                c.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
            });
            config.map(|config| (config.windows.iter().map(Option::is_some).collect::<Vec<_>>(), config.unrotated))
        };
        assert_eq!(of("Gemma2ForCausalLM", json!({})).unwrap(), (vec![true, false, true, false], vec![]));
        assert_eq!(of("Gemma3ForCausalLM", json!({"sliding_window_pattern": 3})).unwrap(), (vec![true, true, false, true], vec![]));
        assert_eq!(of("Cohere2ForCausalLM", json!({})).unwrap(), (vec![true, true, true, false], vec![3]));
        let exaone = |settings: Value| {
            let mut settings = settings;
            settings["num_key_value_heads"] = json!(4);
            of("Exaone4ForCausalLM", settings)
        };
        assert_eq!(exaone(json!({"sliding_window": null})).unwrap(), (vec![false; 4], vec![]), "everywhere, without windows");
        assert!(exaone(json!({"sliding_window_pattern": "LLLG"})).unwrap_err().contains("layer_types"));
        assert_eq!(of("SmolLM3ForCausalLM", json!({})).unwrap(), (vec![false; 4], vec![3]));
        assert_eq!(of("SmolLM3ForCausalLM", json!({"no_rope_layers": [0, 1, 1, 0]})).unwrap(), (vec![false; 4], vec![0, 3]));
        assert!(of("SmolLM3ForCausalLM", json!({"no_rope_layers": [0]})).unwrap_err().contains("1 entries for 4 layers"));
    }

    #[test]
    fn yarn_settings_extend_the_context() {
        let config = parse(|c| {
            c["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024});
        });
        assert_eq!(config.unwrap().context_tokens, 4096);
    }
}
