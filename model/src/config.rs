//! `config.json`, checked, with the family's rules applied: everything that decides which tensors there are and how
//! they are used.

use crate::{
    error::ModelError,
    family::{FAMILIES, Family, Flag, WindowRule},
    generation::{self, TokenIds},
    json::read_json,
    quantization::Fp8Scheme,
    rope::RopeConfig,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use tidemill_proto::block::Token;

/// A model's dimensions and settings. The serialized fields, besides the weights, decide the arithmetic.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelConfig {
    pub(crate) architecture: &'static str,
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) norm_epsilon: f32,
    pub(crate) rope: RopeConfig,
    /// Tokens that each layer attends to; `None`: all.
    pub(crate) windows: Vec<Option<usize>>,
    /// The head shares the embedding's weights.
    pub(crate) tied: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) output_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) qk_norm: bool,
    /// How weights in FP8 are scaled, if some are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fp8: Option<Fp8Scheme>,
    #[serde(skip)]
    pub(crate) context_tokens: usize,
    /// Tokens that end a sequence, ascending.
    #[serde(skip)]
    pub(crate) eos: Vec<Token>,
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

/// No real model is larger, and products of three stay far from overflow.
const SIZE_MAX: usize = 1 << 20;
/// f32 counts positions exactly up to here.
const CONTEXT_MAX: usize = 1 << 24;
const LAYERS_MAX: usize = 1 << 12;
const VOCAB_MAX: usize = 1 << 24;

/// The default for `config.json`.
const NORM_EPSILON_DEFAULT: f64 = 1e-6;

impl ModelConfig {
    /// Reads `config.json` and `generation_config.json` of a checkpoint.
    pub(crate) fn load(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        // The architecture decides how to read the rest, so it is checked first.
        let value: Value = read_json(&path)?;
        let family = family(&path, &value)?;
        let raw: RawConfig = serde_json::from_value(value).map_err(|source| ModelError::Json { path: path.clone(), source })?;
        let eos = generation::eos_ids(dir, raw.eos_token_id.clone(), raw.vocab_size)?;
        Self::new(family, raw, eos).map_err(|problem| ModelError::Config { path, problem })
    }

    fn new(family: &Family, raw: RawConfig, eos: Vec<Token>) -> Result<Self, String> {
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
            tied: raw.tie_word_embeddings.unwrap_or(family.tied),
            qkv_bias: flag(family.qkv_bias),
            output_bias: flag(family.output_bias),
            mlp_bias: flag(family.mlp_bias),
            qk_norm: family.qk_norm,
            fp8: Fp8Scheme::parse(raw.quantization_config.as_ref())?,
            context_tokens: within("max_position_embeddings", raw.max_position_embeddings, CONTEXT_MAX)?,
            eos,
        })
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
        let family = family(Path::new("config.json"), &config).map_err(|e| e.to_string())?;
        ModelConfig::new(family, serde_json::from_value(config).map_err(|e| e.to_string())?, Vec::new())
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
        for family in &FAMILIES {
            let tied = |tie: Value| {
                let config = parse(|c| (c["architectures"], c["tie_word_embeddings"]) = (json!([family.architecture]), tie));
                config.unwrap().tied
            };
            assert_eq!((tied(json!(null)), tied(json!(true)), tied(json!(false))), (family.tied, true, false), "{}", family.architecture);
        }
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
}
