//! Metadata to `config.json` and `generation_config.json`.

use crate::{
    GgufError,
    family::{FAMILIES, Family, Sizes},
    file::{Gguf, Tensor, by_name},
};
use serde_json::{Map, Value, json};
use std::f64::consts::PI;

/// The settings of a model, and those that the rest of a conversion needs by themselves.
pub(crate) struct Config {
    pub(crate) family: &'static Family,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) context_tokens: u64,
    pub(crate) json: Value,
}

/// Frequencies scaled as Llama 3.1 and 3.2 have it: factor, and positions of the original.
const LLAMA3_SCALINGS: [(f64, f64); 2] = [(8.0, 8192.0), (32.0, 8192.0)];
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;

impl Config {
    pub(crate) fn read(file: &Gguf) -> Result<Self, GgufError> {
        let name = file.text("general.architecture")?.ok_or_else(|| file.malformed("general.architecture is missing".into()))?;
        let family = Family::find(name).ok_or_else(|| {
            let supported = FAMILIES.map(|family| family.name).join(", ");
            file.unsupported(format!("architecture {name} in GGUF files is not supported; supported are {supported}"))
        })?;
        let read = Settings { file, prefix: name };
        let tensors = by_name(file.tensors());
        let embedding = tensors.get("token_embd.weight").ok_or_else(|| file.malformed("tensor token_embd.weight is missing".into()))?;
        let &[vocab, hidden] = &embedding.shape[..] else {
            return Err(file.malformed("tensor token_embd.weight is no matrix".into()));
        };
        let heads = read.must("attention.head_count")?;
        let kv_heads = read.number("attention.head_count_kv")?.unwrap_or(heads);
        if heads == 0 || kv_heads == 0 {
            return Err(file.malformed(format!("it has {heads} attention heads and {kv_heads} KV heads")));
        }
        let sizes = Sizes {
            layers: read.must("block_count")?,
            hidden: hidden as u64,
            heads,
            head_dim: read.number("attention.key_length")?.unwrap_or(hidden as u64 / heads),
            window: read.number("attention.sliding_window")?,
            attention_cap: read.float("attn_logit_softcapping")?,
            final_cap: read.float("final_logit_softcapping")?,
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
            "rms_norm_eps": read.float("attention.layer_norm_rms_epsilon")?.map(shortest),
            "rope_theta": shortest(theta),
            "rope_scaling": read.scaling(&tensors, theta, sizes.head_dim)?,
            "tie_word_embeddings": !tensors.contains_key("output.weight"),
            "attention_bias": tensors.contains_key("blk.0.attn_q.bias"),
            "mlp_bias": tensors.contains_key("blk.0.ffn_up.bias"),
            "dtype": "bfloat16",
        });
        let more = (family.more)(&sizes);
        let fields = json.as_object_mut().expect("an object");
        fields.extend(more.as_object().cloned().unwrap_or_default());
        Ok(Self { family, heads, kv_heads, context_tokens, json })
    }
}

/// Settings are f32 in the file: the number that was meant is the shortest that rounds to it.
fn shortest(number: f64) -> f64 {
    (number as f32).to_string().parse().unwrap_or(number)
}

/// Settings under the architecture's prefix.
struct Settings<'a> {
    file: &'a Gguf,
    prefix: &'a str,
}

impl Settings<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn number(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.file.number(&self.key(key))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.file.float(&self.key(key))
    }

    fn must(&self, key: &str) -> Result<u64, GgufError> {
        self.number(key)?.ok_or_else(|| self.file.malformed(format!("{} is missing", self.key(key))))
    }

    /// `rope_scaling` of `config.json`.
    fn scaling(&self, tensors: &std::collections::HashMap<&str, &Tensor>, theta: f64, head_dim: u64) -> Result<Value, GgufError> {
        if let Some(factors) = tensors.get("rope_freqs.weight") {
            return self.llama3(factors, theta, head_dim);
        }
        let kind = self.file.text(&self.key("rope.scaling.type"))?;
        let factor = self.float("rope.scaling.factor")?.or(self.float("rope.scale_linear")?);
        let mut scaling = Map::new();
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
        if let Some(positions) = self.number("rope.scaling.original_context_length")? {
            scaling.insert("original_max_position_embeddings".into(), json!(positions));
        }
        Ok(Value::Object(scaling))
    }

    /// The file has the factors that each frequency is divided by; which settings they come from is found by trying.
    fn llama3(&self, factors: &Tensor, theta: f64, head_dim: u64) -> Result<Value, GgufError> {
        let mut found = vec![0.0; factors.shape.iter().product()];
        factors.kind.expand(self.file.bytes(factors), &mut found);
        let same = |factor: f64, positions: f64| {
            found.len() as u64 == head_dim / 2
                && found.iter().enumerate().all(|(i, found)| {
                    let wavelength = 2.0 * PI * theta.powf(2.0 * i as f64 / head_dim as f64);
                    let smooth = (positions / wavelength - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
                    let expected = match wavelength {
                        w if w < positions / HIGH_FREQ_FACTOR => 1.0,
                        w if w > positions / LOW_FREQ_FACTOR => factor,
                        _ => 1.0 / ((1.0 - smooth) / factor + smooth),
                    };
                    (f64::from(*found) / expected - 1.0).abs() < 1e-3
                })
        };
        match LLAMA3_SCALINGS.into_iter().find(|(factor, positions)| same(*factor, *positions)) {
            Some((factor, positions)) => Ok(json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW_FREQ_FACTOR,
                "high_freq_factor": HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": positions,
            })),
            None => Err(self.file.unsupported("rope_freqs.weight has factors of no scaling that is known".into())),
        }
    }
}
