//! An encoder's `config.json` and pooling, checked, with the family's rules applied.

use super::family::{Biases, ENCODERS, EncoderFamily, HeadFunction, Positions};
use crate::{
    error::ModelError,
    json::read_json,
    rope::{Beside, RopeConfig, RopeScaling},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;
use tidemill_kernels::cpu::activation::Activation;
use tidemill_proto::{files::packed, message::ModelKind};

/// An encoder's dimensions and settings. The serialized fields, besides the weights, decide the arithmetic.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct EncoderConfig {
    architecture: String,
    #[serde(skip)]
    pub(crate) family: &'static EncoderFamily,
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) norm_epsilon: f32,
    #[serde(skip)]
    pub(crate) activation: Activation,
    activation_name: String,
    /// Rows of the table of token types.
    pub(crate) types: usize,
    /// Rows of the table of positions.
    pub(crate) position_rows: usize,
    /// The row of the first position.
    pub(crate) first_position: usize,
    /// The rotations of layers that attend to everything, and of those with a window if these differ.
    pub(crate) ropes: Vec<RopeConfig>,
    /// The number of tokens that each layer attends to in either direction; `None` for layers that attend to everything.
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) attention_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) norm_bias: bool,
    pub(crate) pooling: Pooling,
    pub(crate) head: Option<HeadConfig>,
    #[serde(skip)]
    pub(crate) context_tokens: usize,
}

/// The reduction of a text's rows to one row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) enum Pooling {
    /// The first row.
    First,
    Mean,
    /// The last row.
    Last,
    Max,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct HeadConfig {
    pub(crate) labels: usize,
    /// The function between the two projections; tanh if `None`.
    #[serde(skip)]
    pub(crate) activation: Option<Activation>,
    activation_name: Option<String>,
    pub(crate) dense_bias: bool,
}

/// The fields of `config.json`.
#[derive(Deserialize)]
struct Raw {
    vocab_size: usize,
    #[serde(alias = "n_embd")]
    hidden_size: usize,
    #[serde(alias = "n_inner")]
    intermediate_size: usize,
    #[serde(alias = "n_layer")]
    num_hidden_layers: usize,
    #[serde(alias = "n_head")]
    num_attention_heads: usize,
    #[serde(alias = "n_positions")]
    max_position_embeddings: usize,
    #[serde(alias = "norm_eps", alias = "layer_norm_epsilon")]
    layer_norm_eps: Option<f32>,
    type_vocab_size: Option<usize>,
    pad_token_id: Option<usize>,
    #[serde(alias = "hidden_activation", alias = "activation_function")]
    hidden_act: Option<String>,
    position_embedding_type: Option<String>,
    #[serde(default)]
    is_decoder: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    norm_bias: bool,
    id2label: Option<Map<String, Value>>,
    classifier_pooling: Option<String>,
    classifier_activation: Option<String>,
    #[serde(default)]
    classifier_bias: bool,
    layer_types: Option<Vec<String>>,
    global_attn_every_n_layers: Option<usize>,
    local_attention: Option<usize>,
    rope_parameters: Option<Value>,
    #[serde(alias = "rotary_emb_base")]
    rope_theta: Option<f64>,
    global_rope_theta: Option<f64>,
    local_rope_theta: Option<f64>,
}

/// The pooling as sentence-transformers writes it, in `1_Pooling/config.json`.
#[derive(Deserialize)]
struct RawPooling {
    #[serde(default)]
    pooling_mode_cls_token: bool,
    #[serde(default)]
    pooling_mode_mean_tokens: bool,
    #[serde(default)]
    pooling_mode_max_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_sqrt_len_tokens: bool,
    #[serde(default)]
    pooling_mode_weightedmean_tokens: bool,
    #[serde(default)]
    pooling_mode_lasttoken: bool,
}

/// A step of sentence-transformers' `modules.json`.
#[derive(Deserialize)]
struct Module {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

/// The bases of rotations that `config.json` does not give.
const THETA: f64 = 1_000.0;
const GLOBAL_THETA: f64 = 160_000.0;
const LOCAL_THETA: f64 = 10_000.0;
/// The number of labels of a classifier that names none, as in transformers.
const LABELS: usize = 2;

impl EncoderConfig {
    /// Reads the settings of an encoder; `None` if the directory holds another kind of model.
    pub(crate) fn load(dir: &Path) -> Result<Option<Self>, ModelError> {
        packed(dir).map_or(Ok(()), |reason| Err(ModelError::Packed(reason)))?;
        let path = dir.join("config.json");
        let value: Value = read_json(&path)?;
        let architecture = value["architectures"][0].as_str().unwrap_or_default().to_owned();
        if ModelKind::of_architecture(&architecture) == ModelKind::Decoder {
            return Ok(None);
        }
        let invalid = |problem| ModelError::Config { path: path.clone(), problem };
        let raw = serde_json::from_value(value).map_err(|source| ModelError::Json { path: path.clone(), source })?;
        let family = ENCODERS.iter().find(|family| family.has(&architecture)).ok_or_else(|| unknown(&path, &architecture))?;
        let mut config = Self::new(raw, architecture, family).map_err(invalid)?;
        if config.head.is_none() {
            config.pooling = pooling(dir)?;
        }
        Ok(Some(config))
    }

    fn new(raw: Raw, architecture: String, family: &'static EncoderFamily) -> Result<Self, String> {
        let sizes = [
            ("vocab_size", raw.vocab_size),
            ("hidden_size", raw.hidden_size),
            ("intermediate_size", raw.intermediate_size),
            ("num_hidden_layers", raw.num_hidden_layers),
            ("num_attention_heads", raw.num_attention_heads),
            ("max_position_embeddings", raw.max_position_embeddings),
        ];
        if let Some((key, value)) = sizes.into_iter().find(|(_, value)| *value == 0 || *value > SIZE_MAX) {
            return Err(format!("{key} is {value}: it must be 1 to {SIZE_MAX}"));
        }
        let (hidden, heads) = (raw.hidden_size, raw.num_attention_heads);
        if !hidden.is_multiple_of(2 * heads) {
            return Err(format!("hidden_size {hidden} is not an even number for each of {heads} heads"));
        }
        if raw.is_decoder {
            return Err("is_decoder is true: only encoders of this architecture are supported".into());
        }
        if let Some(kind) = raw.position_embedding_type.as_deref().filter(|kind| !matches!(*kind, "absolute" | "rotary")) {
            return Err(format!("position_embedding_type {kind:?} is not supported"));
        }
        let first_position = match family.positions {
            Positions::Table { after_padding: true, .. } => raw.pad_token_id.ok_or("pad_token_id is missing")? + 1,
            _ => 0,
        };
        let context_tokens = raw.max_position_embeddings.checked_sub(first_position).filter(|tokens| *tokens > 0);
        let context_tokens = context_tokens.ok_or("max_position_embeddings leaves no position after pad_token_id")?;
        let norm_epsilon = raw.layer_norm_eps.unwrap_or(EPSILON);
        if !norm_epsilon.is_finite() || norm_epsilon <= 0.0 {
            return Err(format!("layer_norm_eps is {norm_epsilon}, which makes no sense"));
        }
        let activation_name = raw.hidden_act.clone().unwrap_or_else(|| "gelu".to_owned());
        let everywhere = family.biases == Biases::Everywhere;
        let by_keys = family.biases == Biases::ByKeys;
        let is_classifier = ModelKind::of_architecture(&architecture) == ModelKind::Classifier;
        Ok(Self {
            family,
            vocab: raw.vocab_size,
            hidden,
            intermediate: raw.intermediate_size,
            heads,
            norm_epsilon,
            activation: activation(&activation_name)?,
            activation_name,
            types: raw.type_vocab_size.unwrap_or(0),
            position_rows: raw.max_position_embeddings,
            first_position,
            ropes: ropes(family, &raw)?,
            windows: windows(family, &raw)?,
            attention_bias: everywhere || by_keys && raw.attention_bias,
            mlp_bias: everywhere || by_keys && raw.mlp_bias,
            norm_bias: !by_keys || raw.norm_bias,
            pooling: classifier_pooling(family, &raw)?,
            head: if is_classifier { Some(head(family, &raw)?) } else { None },
            context_tokens,
            architecture,
        })
    }

    pub(crate) fn layers(&self) -> usize {
        self.windows.len()
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }
}

/// The largest size that is accepted: a larger one is a mistake, and would overflow products of sizes.
const SIZE_MAX: usize = 1 << 24;
const EPSILON: f32 = 1e-12;

impl EncoderFamily {
    fn has(&self, architecture: &str) -> bool {
        let kinds: &[&str] = if self.head.is_some() { &["Model", "ForMaskedLM", "ForSequenceClassification"] } else { &["Model"] };
        architecture.strip_prefix(self.name).is_some_and(|kind| kinds.contains(&kind))
    }
}

fn unknown(path: &Path, architecture: &str) -> ModelError {
    let names: Vec<_> = ENCODERS.iter().map(|family| format!("{}Model", family.name)).collect();
    let problem = format!(
        "encoder architecture {architecture:?} is not supported; supported are {}, and with ForSequenceClassification for Model those with a \
         head",
        names.join(", ")
    );
    ModelError::Config { path: path.to_owned(), problem }
}

fn activation(name: &str) -> Result<Activation, String> {
    match name {
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "silu" | "swish" | "swiglu" => Ok(Activation::Silu),
        _ => Err(format!("activation {name:?} is not supported; supported are gelu, gelu_new, gelu_pytorch_tanh, silu and swiglu")),
    }
}

fn ropes(family: &EncoderFamily, raw: &Raw) -> Result<Vec<RopeConfig>, String> {
    let plain = |theta: f64| RopeConfig { theta: theta as f32, scaling: RopeScaling::None, part: None };
    let of_kind = |kind: &str, theta: f64| {
        let section = raw.rope_parameters.as_ref().and_then(|section| section.get(kind));
        RopeConfig::parse(section, Beside { theta: Some(theta), positions: raw.max_position_embeddings, ..Beside::default() })
    };
    match family.positions {
        Positions::Table { .. } => Ok(Vec::new()),
        Positions::Rotary => match &raw.rope_parameters {
            None => Ok(vec![plain(raw.rope_theta.unwrap_or(THETA))]),
            Some(section) => {
                let beside = Beside { theta: raw.rope_theta.or(Some(THETA)), positions: raw.max_position_embeddings, ..Beside::default() };
                Ok(vec![RopeConfig::parse(Some(section), beside)?])
            }
        },
        Positions::RotaryByWindow => Ok(vec![
            of_kind("full_attention", raw.global_rope_theta.unwrap_or(GLOBAL_THETA))?,
            of_kind("sliding_attention", raw.local_rope_theta.unwrap_or(LOCAL_THETA))?,
        ]),
    }
}

fn windows(family: &EncoderFamily, raw: &Raw) -> Result<Vec<Option<usize>>, String> {
    let layers = raw.num_hidden_layers;
    if family.positions != Positions::RotaryByWindow {
        return Ok(vec![None; layers]);
    }
    // The window includes both ends: of 128 positions, a row sees 64 to either side, and itself.
    let window = raw.local_attention.ok_or("local_attention is missing")? / 2 + 1;
    match &raw.layer_types {
        Some(kinds) if kinds.len() != layers => Err(format!("layer_types has {} entries for {layers} layers", kinds.len())),
        Some(kinds) => Ok(kinds.iter().map(|kind| (kind != "full_attention").then_some(window)).collect()),
        None => match raw.global_attn_every_n_layers.unwrap_or(3) {
            0 => Err("global_attn_every_n_layers is 0".into()),
            every => Ok((0..layers).map(|layer| (!layer.is_multiple_of(every)).then_some(window)).collect()),
        },
    }
}

/// The row that a classifier's head reads.
fn classifier_pooling(family: &EncoderFamily, raw: &Raw) -> Result<Pooling, String> {
    let is_chosen = family.head.as_ref().is_some_and(|head| head.function == HeadFunction::ByKey);
    match raw.classifier_pooling.as_deref().filter(|_| is_chosen) {
        None | Some("cls") => Ok(Pooling::First),
        Some("mean") => Ok(Pooling::Mean),
        Some(other) => Err(format!("classifier_pooling {other:?} is not supported; supported are cls and mean")),
    }
}

fn head(family: &EncoderFamily, raw: &Raw) -> Result<HeadConfig, String> {
    let labels = raw.id2label.as_ref().map_or(LABELS, Map::len);
    if labels == 0 {
        return Err("id2label names no label".into());
    }
    let function = family.head.as_ref().map(|head| head.function);
    let activation_name = (function == Some(HeadFunction::ByKey)).then(|| raw.classifier_activation.clone().unwrap_or("gelu".into()));
    Ok(HeadConfig {
        labels,
        activation: activation_name.as_deref().map(activation).transpose()?,
        activation_name,
        dense_bias: function == Some(HeadFunction::Tanh) || raw.classifier_bias,
    })
}

/// The pooling in `modules.json` and `1_Pooling/config.json`; without them the mean, as sentence-transformers assumes.
fn pooling(dir: &Path) -> Result<Pooling, ModelError> {
    let path = dir.join("modules.json");
    let mut place = "1_Pooling".to_owned();
    if path.exists() {
        let modules: Vec<Module> = read_json(&path)?;
        for Module { path: at, kind } in modules {
            match kind.rsplit('.').next() {
                Some("Transformer" | "Normalize") => {}
                Some("Pooling") => place = at,
                _ => {
                    let problem = format!("{kind} is not supported; supported are Transformer, Pooling and Normalize");
                    return Err(ModelError::Config { path, problem });
                }
            }
        }
    }
    if Path::new(&place).components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        return Err(ModelError::Config { path, problem: format!("{place:?} is not a directory beside it") });
    }
    let path = dir.join(place).join("config.json");
    if !path.exists() {
        return Ok(Pooling::Mean);
    }
    let raw: RawPooling = read_json(&path)?;
    let chosen: Vec<_> = [
        (raw.pooling_mode_cls_token, Some(Pooling::First)),
        (raw.pooling_mode_mean_tokens, Some(Pooling::Mean)),
        (raw.pooling_mode_max_tokens, Some(Pooling::Max)),
        (raw.pooling_mode_lasttoken, Some(Pooling::Last)),
        (raw.pooling_mode_mean_sqrt_len_tokens, None),
        (raw.pooling_mode_weightedmean_tokens, None),
    ]
    .into_iter()
    .filter_map(|(is_set, pooling)| is_set.then_some(pooling))
    .collect();
    match chosen[..] {
        [Some(pooling)] => Ok(pooling),
        _ => {
            let problem = "one of the modes cls, mean, max and lasttoken is needed: others, and several at once, are not supported".into();
            Err(ModelError::Config { path, problem })
        }
    }
}
