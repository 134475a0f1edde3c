//! `config.json`, checked, with a family's rules applied: everything that decides which tensors there are and what is
//! computed from them.

use crate::{
    error::ModelError,
    family::{FAMILIES, Family, Flag, WindowRule},
    generation::{self, TokenIds},
    rope::RopeConfig,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{fs, path::Path};
use tidemill_proto::block::Token;

/// A model's dimensions and settings. What is serialized is what changes the arithmetic, besides the weights.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelConfig {
    pub architecture: &'static str,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm_epsilon: f32,
    pub rope: RopeConfig,
    /// Tokens that each layer attends to; `None`: all.
    pub windows: Vec<Option<usize>>,
    /// The head is the embedding.
    pub tied: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub qk_norm: bool,
    #[serde(skip)]
    context_tokens: usize,
    /// Tokens that end a sequence, ascending.
    #[serde(skip)]
    pub eos: Vec<Token>,
}

/// As in the file.
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
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
    eos_token_id: Option<TokenIds>,
}

/// Nothing sensible is larger; products of three stay far from overflow.
const SIZE_MAX: usize = 1 << 20;
/// f32 counts positions exactly up to here.
const CONTEXT_MAX: usize = 1 << 24;
const LAYERS_MAX: usize = 1 << 12;
const VOCAB_MAX: usize = 1 << 24;

/// Where `config.json` does not say.
const NORM_EPSILON_DEFAULT: f64 = 1e-6;

impl ModelConfig {
    /// Reads `config.json` and `generation_config.json` of a checkpoint.
    pub(crate) fn load(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        // What the file is decides how to read it, so the architecture is looked at before anything else is asked for.
        let value: Value = read_json(&path)?;
        let family = family(&path, &value)?;
        let raw: RawConfig = serde_json::from_value(value).map_err(|source| ModelError::Json { path: path.clone(), source })?;
        let eos = generation::eos_ids(dir, raw.eos_token_id.clone(), raw.vocab_size)?;
        Self::new(family, raw, eos).map_err(|problem| ModelError::Config { path, problem })
    }

    fn new(family: &Family, raw: RawConfig, eos: Vec<Token>) -> Result<Self, String> {
        if raw.quantization_config.as_ref().is_some_and(|q| !q.is_null()) {
            return Err("quantization_config: quantized checkpoints are not supported; use the unquantized one".into());
        }
        let activation = raw.hidden_act.as_deref().unwrap_or("silu");
        if !["silu", "swish"].contains(&activation) {
            return Err(format!("hidden_act {activation:?} is not supported; supported is silu"));
        }
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
        let head_dim = within("head_dim", raw.head_dim.or(family.head_dim).unwrap_or(hidden / heads), SIZE_MAX)?;
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {head_dim} is odd: the rotary embedding turns pairs"));
        }
        let norm_epsilon = raw.rms_norm_eps.unwrap_or(NORM_EPSILON_DEFAULT) as f32;
        if !(norm_epsilon.is_finite() && norm_epsilon >= 0.0) {
            return Err(format!("rms_norm_eps {norm_epsilon} makes no sense"));
        }
        let flag = |flag| match flag {
            Flag::Never => false,
            Flag::Always => true,
            Flag::AttentionBias => raw.attention_bias.unwrap_or(false),
            Flag::MlpBias => raw.mlp_bias.unwrap_or(false),
        };
        Ok(Self {
            architecture: family.architecture,
            vocab: within("vocab_size", raw.vocab_size, VOCAB_MAX)?,
            hidden,
            intermediate: within("intermediate_size", raw.intermediate_size, SIZE_MAX)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            norm_epsilon,
            rope: RopeConfig::parse(raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref()), raw.rope_theta)?,
            windows: windows(family.window, &raw, layers)?,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            qkv_bias: flag(family.qkv_bias),
            output_bias: flag(family.output_bias),
            mlp_bias: flag(family.mlp_bias),
            qk_norm: family.qk_norm,
            context_tokens: within("max_position_embeddings", raw.max_position_embeddings, CONTEXT_MAX)?,
            eos,
        })
    }

    /// The longest sequence, prompt and answer together.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }
}

fn family(path: &Path, config: &Value) -> Result<&'static Family, ModelError> {
    let names: Vec<&str> = config["architectures"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    FAMILIES.iter().find(|family| names.contains(&family.architecture)).ok_or_else(|| ModelError::Architecture {
        path: path.to_owned(),
        found: names.join(", "),
        supported: FAMILIES.map(|family| family.architecture).join(", "),
    })
}

/// The sliding window of each layer.
fn windows(rule: WindowRule, raw: &RawConfig, layers: usize) -> Result<Vec<Option<usize>>, String> {
    let window = match rule {
        WindowRule::Never => None,
        WindowRule::Everywhere => raw.sliding_window,
        WindowRule::ByLayer => raw.sliding_window.filter(|_| raw.use_sliding_window == Some(true)),
    };
    let Some(window) = window else { return Ok(vec![None; layers]) };
    if window == 0 {
        return Err("sliding_window is 0: leave it out for full attention".into());
    }
    match (rule, &raw.layer_types) {
        (WindowRule::ByLayer, Some(types)) if types.len() != layers => {
            Err(format!("layer_types has {} entries for {layers} layers", types.len()))
        }
        (WindowRule::ByLayer, Some(types)) => types
            .iter()
            .map(|kind| match kind.as_str() {
                "full_attention" => Ok(None),
                "sliding_attention" => Ok(Some(window)),
                other => Err(format!("layer_types: {other:?} is not supported; supported are full_attention and sliding_attention")),
            })
            .collect(),
        (WindowRule::ByLayer, None) => {
            let first = raw.max_window_layers.ok_or("use_sliding_window needs max_window_layers or layer_types")?;
            Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect())
        }
        _ => Ok(vec![Some(window); layers]),
    }
}

/// Largest JSON file that is read. Real ones are below 100 kB; an index of thousands of tensors is a few MB.
const JSON_BYTES_MAX: u64 = 64 << 20;

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let bytes = fs::metadata(path).map_err(io)?.len();
    if bytes > JSON_BYTES_MAX {
        let problem = format!("{bytes} bytes are more than the {JSON_BYTES_MAX} that are read");
        return Err(ModelError::Config { path: path.to_owned(), problem });
    }
    serde_json::from_slice(&fs::read(path).map_err(io)?).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}
