//! Metadata to `config.json` and `generation_config.json`.

use crate::{
    GgufError,
    blocks::BlockType,
    family::{FAMILIES, Family, Sizes, shortest},
    file::{self, Gguf, Tensor, by_name},
};
use serde_json::{Map, Value, json};
use std::{collections::HashMap, f64::consts::PI};

/// The settings of a model, and the individual settings that the rest of a conversion needs.
pub(crate) struct Config {
    pub(crate) family: &'static Family,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) context_tokens: u64,
    pub(crate) json: Value,
}

/// The factors with which Llama 3's frequency scaling was published.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
/// The original positions, if no frequency lies between the two factors to derive them from.
const LLAMA3_POSITIONS: f64 = 8192.0;

/// The largest number in a setting. No model has a larger size or context, and products of two stay far from overflow.
const NUMBER_MAX: u64 = 1 << 26;
/// The most factors of a rotation: half of a head's numbers.
const FACTORS_MAX: usize = 1 << 16;

/// The names of a scaling's settings in both formats.
const SCALINGS: [(&str, &str); 7] = [
    ("rope.scaling.attn_factor", "attention_factor"),
    ("rope.scaling.yarn_attn_factor", "attention_factor"),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ("rope.scaling.yarn_log_multiplier", "mscale"),
    ("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
    ("attention.temperature_scale", "llama_4_scaling_beta"),
];

impl Config {
    pub(crate) fn read(file: &Gguf) -> Result<Self, GgufError> {
        let name = file.text("general.architecture")?.ok_or_else(|| file.malformed("general.architecture is missing".into()))?;
        let read = Settings { file, prefix: name, tensors: by_name(file.tensors()) };
        let family = Family::find(name, |key| file.has(&read.key(key))).ok_or_else(|| {
            let mut supported: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
            supported.dedup();
            file.unsupported(format!("architecture {name} in GGUF files is not supported; supported are {}", supported.join(", ")))
        })?;
        let embedding =
            read.tensors.get("token_embd.weight").ok_or_else(|| file.malformed("tensor token_embd.weight is missing".into()))?;
        let &[vocab, hidden] = &embedding.shape[..] else {
            return Err(file.malformed("tensor token_embd.weight is no matrix".into()));
        };
        let heads = read.must("attention.head_count")?;
        let kv_heads = read.number("attention.head_count_kv")?.unwrap_or(heads);
        if heads == 0 || kv_heads == 0 {
            return Err(file.malformed(format!("it has {heads} attention heads and {kv_heads} KV heads")));
        }
        // Layers that draft tokens come last, and are left out.
        let drafting = read.number("nextn_predict_layers")?.unwrap_or(0);
        let blocks = read.must("block_count")?;
        if blocks > file.tensors().len() as u64 {
            return Err(file.malformed(format!("it claims {blocks} layers, and has {} tensors", file.tensors().len())));
        }
        let sizes = Sizes {
            layers: blocks.saturating_sub(drafting),
            hidden: hidden as u64,
            heads,
            head_dim: read.number("attention.key_length")?.unwrap_or(hidden as u64 / heads),
            window: read.number("attention.sliding_window")?,
        };
        let context_tokens = read.must("context_length")?;
        let theta = read.float("rope.freq_base")?.unwrap_or(10_000.0);
        let mut json = json!({
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": read.must("feed_forward_length")?,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": context_tokens,
            "hidden_act": "silu",
            "rope_theta": shortest(theta),
            "rope_scaling": read.scaling(theta, sizes.head_dim)?,
            "tie_word_embeddings": !read.has("output.weight"),
            "attention_bias": read.has("blk.0.attn_q.bias"),
            "mlp_bias": read.has("blk.0.ffn_up.bias"),
            "dtype": "bfloat16",
        });
        let (epsilon, name) = family.epsilon;
        json[name] = json!(read.float(epsilon)?.map(shortest));
        if let Some(rotated) = read.number("rope.dimension_count")?.filter(|rotated| *rotated != sizes.head_dim) {
            json["partial_rotary_factor"] = json!(rotated as f64 / sizes.head_dim as f64);
        }
        for (key, value) in (family.more)(&sizes, &read)?.as_object().into_iter().flatten() {
            match (json[key].as_object_mut(), value.as_object()) {
                (Some(fields), Some(more)) => fields.extend(more.clone()),
                _ => json[key] = value.clone(),
            }
        }
        Ok(Self { family, layers: sizes.layers, heads, kv_heads, context_tokens, json })
    }
}

/// The settings under the architecture's prefix, and the tensors from which other settings follow.
pub(crate) struct Settings<'a> {
    file: &'a Gguf,
    prefix: &'a str,
    tensors: HashMap<&'a str, &'a Tensor>,
}

impl Settings<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<u64>, GgufError> {
        match self.file.number(&self.key(key))? {
            Some(number) if number > NUMBER_MAX => {
                Err(self.file.malformed(format!("{} is {number}, more than the {NUMBER_MAX} that any model has", self.key(key))))
            }
            number => Ok(number),
        }
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.file.float(&self.key(key))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.file.flag(&self.key(key))
    }

    pub(crate) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, GgufError> {
        let Some(list) = self.file.list(&self.key(key))? else { return Ok(None) };
        let flags: Option<_> = list.map(|value| if let file::Value::Bool(flag) = value { Some(flag) } else { None }).collect();
        flags.map(Some).ok_or_else(|| self.file.malformed(format!("{} is not a list of flags", self.key(key))))
    }

    /// Whether the file has this tensor.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    pub(crate) fn is_mxfp4(&self, tensor: &str) -> bool {
        self.tensors.get(tensor).is_some_and(|tensor| tensor.kind == BlockType::MXFP4)
    }

    pub(crate) fn must(&self, key: &str) -> Result<u64, GgufError> {
        self.number(key)?.ok_or_else(|| self.file.malformed(format!("{} is missing", self.key(key))))
    }

    /// `rope_scaling` of `config.json`.
    fn scaling(&self, theta: f64, head_dim: u64) -> Result<Value, GgufError> {
        if let Some(factors) = self.tensors.get("rope_freqs.weight") {
            return self.llama3(factors, theta, head_dim);
        }
        let mut scaling = Map::new();
        let kind = self.file.text(&self.key("rope.scaling.type"))?;
        let factor = self.float("rope.scaling.factor")?.or(self.float("rope.scale_linear")?);
        if let (Some(long), Some(short)) = (self.tensors.get("rope_factors_long.weight"), self.tensors.get("rope_factors_short.weight")) {
            let factors =
                |tensor| Ok::<_, GgufError>(self.factors(tensor)?.into_iter().map(|factor| shortest(factor.into())).collect::<Vec<_>>());
            scaling.insert("rope_type".into(), json!("longrope"));
            scaling.insert("long_factor".into(), json!(factors(long)?));
            scaling.insert("short_factor".into(), json!(factors(short)?));
        } else {
            match (kind, factor) {
                (None | Some("none"), None) => return Ok(Value::Null),
                (None | Some("linear"), Some(1.0)) => return Ok(Value::Null),
                (kind, Some(factor)) => {
                    scaling.insert("rope_type".into(), json!(kind.unwrap_or("linear")));
                    scaling.insert("factor".into(), json!(shortest(factor)));
                }
                (Some(kind), None) => {
                    return Err(self.file.malformed(format!("{} is {kind}, without a factor", self.key("rope.scaling.type"))));
                }
            }
        }
        if let Some(positions) = self.number("rope.scaling.original_context_length")? {
            scaling.insert("original_max_position_embeddings".into(), json!(positions));
        }
        for (key, name) in SCALINGS {
            if let Some(number) = self.float(key)? {
                scaling.insert(name.into(), json!(shortest(number)));
            }
        }
        Ok(Value::Object(scaling))
    }

    fn factors(&self, tensor: &Tensor) -> Result<Vec<f32>, GgufError> {
        let count = tensor.shape.iter().product();
        if count > FACTORS_MAX {
            return Err(self
                .file
                .malformed(format!("{} has {count} numbers, more than the {FACTORS_MAX} that a rotation has", tensor.name)));
        }
        let mut numbers = vec![0.0; count];
        tensor.kind.expand(self.file.bytes(tensor), &mut numbers);
        Ok(numbers)
    }

    /// The settings of Llama 3's scaling, derived from the factors by which each frequency is divided: 1 for the fast ones, the whole
    /// factor for the slow ones, and between them values that determine the original positions.
    fn llama3(&self, factors: &Tensor, theta: f64, head_dim: u64) -> Result<Value, GgufError> {
        let found = self.factors(factors)?;
        let wavelength = |i: usize| 2.0 * PI * theta.powf(2.0 * i as f64 / head_dim as f64);
        let factor = found.iter().copied().fold(1.0, f32::max);
        let between = found.iter().position(|found| *found > 1.0 && *found < factor);
        let positions = between.map_or(LLAMA3_POSITIONS, |i| {
            let share = (1.0 / f64::from(found[i]) - 1.0 / f64::from(factor)) / (1.0 - 1.0 / f64::from(factor));
            (wavelength(i) * (share * (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR) + LOW_FREQ_FACTOR)).round()
        });
        let expected = |i: usize| {
            let smooth = (positions / wavelength(i) - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
            match wavelength(i) {
                w if w < positions / HIGH_FREQ_FACTOR => 1.0,
                w if w > positions / LOW_FREQ_FACTOR => f64::from(factor),
                _ => 1.0 / ((1.0 - smooth) / f64::from(factor) + smooth),
            }
        };
        let is_same = found.len() as u64 == head_dim / 2
            && found.iter().enumerate().all(|(i, found)| (f64::from(*found) / expected(i) - 1.0).abs() < 1e-3);
        if !is_same || factor <= 1.0 {
            return Err(self.file.unsupported("rope_freqs.weight has factors of no scaling that is known".into()));
        }
        Ok(json!({
            "rope_type": "llama3",
            "factor": shortest(factor.into()),
            "low_freq_factor": LOW_FREQ_FACTOR,
            "high_freq_factor": HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": positions,
        }))
    }
}
