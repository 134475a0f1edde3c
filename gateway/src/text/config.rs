//! A Hugging Face model directory's settings: `config.json`, `generation_config.json`,
//! `tokenizer_config.json`, `chat_template.jinja`. Weights are not read.

use crate::text::error::ModelError;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    ops::{Bound, RangeBounds, RangeInclusive},
    path::Path,
    sync::Arc,
};
use tidemill_proto::{
    files::{SETTINGS_BYTES_MAX, packed, read_at_most},
    message::{IdentityKeys, ModelIdentity},
};

#[derive(Clone, Debug, Default)]
pub struct ModelConfig {
    /// Must be equal at workers.
    pub identity: ModelIdentity,
    /// The longest sequence that the model was made for.
    pub context_tokens: u32,
    pub eos_ids: Vec<u32>,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub unk_token: Option<String>,
    pub pad_token: Option<String>,
    pub chat_template: Option<String>,
    pub sampling: SamplingDefaults,
    /// The tokenizer's settings as JSON, with the chat template.
    pub tokenizer_info: Arc<[u8]>,
    /// A classifier's labels, in the order of its outputs.
    pub labels: Vec<String>,
}

/// The model author's sampling settings, which are the defaults of requests (as in vLLM).
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

pub const TEMPERATURE: RangeInclusive<f32> = 0.0..=2.0;
pub const TOP_P: (Bound<f32>, Bound<f32>) = (Bound::Excluded(0.0), Bound::Included(1.0));
/// The range of `top_k`: -1 is vLLM's way to turn it off.
pub const TOP_K: RangeInclusive<i64> = -1..=u32::MAX as i64;
pub const MIN_P: RangeInclusive<f32> = 0.0..=1.0;
pub const REPETITION_PENALTY: (Bound<f32>, Bound<f32>) = (Bound::Excluded(0.0), Bound::Included(100.0));

/// Returns `value`, or the reason to refuse it.
pub fn in_range<T: PartialOrd + std::fmt::Display>(name: &str, value: T, range: impl RangeBounds<T>) -> Result<T, String> {
    if range.contains(&value) {
        return Ok(value);
    }
    let bound = |bound: Bound<&T>, inclusive: &str, exclusive: &str| match bound {
        Bound::Included(bound) => format!("{inclusive} {bound}"),
        Bound::Excluded(bound) => format!("{exclusive} {bound}"),
        Bound::Unbounded => "unbounded".to_owned(),
    };
    let (low, high) = (bound(range.start_bound(), "at least", "more than"), bound(range.end_bound(), "at most", "less than"));
    Err(format!("`{name}` is {value}: it must be {low} and {high}"))
}

impl SamplingDefaults {
    fn check(&self) -> Result<(), String> {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty } = *self;
        temperature.map(|value| in_range("temperature", value, TEMPERATURE)).transpose()?;
        top_p.map(|value| in_range("top_p", value, TOP_P)).transpose()?;
        top_k.map(|value| in_range("top_k", value, TOP_K)).transpose()?;
        min_p.map(|value| in_range("min_p", value, MIN_P)).transpose()?;
        repetition_penalty.map(|value| in_range("repetition_penalty", value, REPETITION_PENALTY)).transpose()?;
        Ok(())
    }
}

#[derive(Deserialize)]
struct ConfigJson {
    #[serde(flatten)]
    identity: IdentityKeys,
    eos_token_id: Option<OneOrMany>,
    id2label: Option<Map<String, Value>>,
}

#[derive(Default, Deserialize)]
struct GenerationJson {
    eos_token_id: Option<OneOrMany>,
    #[serde(flatten)]
    sampling: SamplingDefaults,
}

#[derive(Default, Deserialize)]
struct TokenizerJson {
    bos_token: Option<Value>,
    eos_token: Option<Value>,
    unk_token: Option<Value>,
    pad_token: Option<Value>,
    chat_template: Option<TemplateJson>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateJson {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ModelConfig {
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        packed(dir).map_or(Ok(()), |reason| Err(ModelError::Packed(reason)))?;
        let path = dir.join("config.json");
        let config: ConfigJson = required(&path)?;
        let (identity, context_tokens) = config.identity.identity().map_err(|reason| ModelError::Invalid { path, reason })?;
        let generation: GenerationJson = optional(&dir.join("generation_config.json"))?.unwrap_or_default();
        let tokenizer_path = dir.join("tokenizer_config.json");
        let tokenizer_info: Map<String, Value> = optional(&tokenizer_path)?.unwrap_or_default();
        let tokenizer: TokenizerJson = TokenizerJson::deserialize(&tokenizer_info)
            .map_err(|error| ModelError::Invalid { path: tokenizer_path, reason: error.to_string() })?;
        let file = read_optional(&dir.join("chat_template.jinja"))?;
        let chat_template = file.or_else(|| match tokenizer.chat_template {
            Some(TemplateJson::One(template)) => Some(template),
            Some(TemplateJson::Named(list)) => list.into_iter().find(|named| named.name == "default").map(|named| named.template),
            None => None,
        });
        let eos_ids = match generation.eos_token_id.or(config.eos_token_id) {
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
            None => Vec::new(),
        };
        generation.sampling.check().map_err(|reason| ModelError::Invalid { path: dir.join("generation_config.json"), reason })?;
        Ok(Self {
            identity,
            context_tokens,
            tokenizer_info: shown(tokenizer_info, chat_template.as_deref()),
            eos_ids,
            bos_token: content(tokenizer.bos_token),
            eos_token: content(tokenizer.eos_token),
            unk_token: content(tokenizer.unk_token),
            pad_token: content(tokenizer.pad_token),
            chat_template,
            sampling: generation.sampling,
            labels: labels(config.id2label.unwrap_or_default()),
        })
    }
}

/// Writes a tokenizer's settings, with the chat template that has a file of its own.
fn shown(mut settings: Map<String, Value>, chat_template: Option<&str>) -> Arc<[u8]> {
    if let Some(template) = chat_template {
        settings.entry("chat_template").or_insert_with(|| template.into());
    }
    Value::Object(settings).to_string().into_bytes().into()
}

/// The labels of `id2label`, whose keys are numbers as text.
fn labels(named: Map<String, Value>) -> Vec<String> {
    let numbered = named.into_iter().filter_map(|(id, label)| Some((id.parse().ok()?, label)));
    let numbered: BTreeMap<u32, Value> = numbered.collect();
    numbered.into_values().map(|label| label.as_str().map_or_else(|| label.to_string(), str::to_owned)).collect()
}

/// Reads a special token, which is given as its text, or as an object with `content` (a serialized `AddedToken`).
fn content(token: Option<Value>) -> Option<String> {
    match token? {
        Value::String(text) => Some(text),
        Value::Object(fields) => fields.get("content")?.as_str().map(str::to_owned),
        _ => None,
    }
}

fn required<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = read(path).map_err(|source| ModelError::File { path: path.to_owned(), source })?;
    parse(path, &text)
}

fn optional<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ModelError> {
    read_optional(path)?.map(|text| parse(path, &text)).transpose()
}

fn read_optional(path: &Path) -> Result<Option<String>, ModelError> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::File { path: path.to_owned(), source }),
    }
}

fn read(path: &Path) -> io::Result<String> {
    let bytes = read_at_most(path, SETTINGS_BYTES_MAX)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ModelError> {
    serde_json::from_str(text).map_err(|e| ModelError::Invalid { path: path.to_owned(), reason: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(files: &[(&str, &str)]) -> Result<ModelConfig, ModelError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        ModelConfig::load(dir.path())
    }

    const CONFIG: (&str, &str) = (
        "config.json",
        r#"{"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64, "eos_token_id": 3}"#,
    );

    #[test]
    fn special_tokens_may_be_objects_and_templates_may_be_named() {
        let tokenizer = r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
            "chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]}"#;
        let config = load(&[CONFIG, ("tokenizer_config.json", tokenizer)]).unwrap();
        assert_eq!((config.bos_token.as_deref(), config.eos_token.as_deref(), config.pad_token), (Some("<s>"), Some("</s>"), None));
        assert_eq!(config.chat_template.as_deref(), Some("a"));
        assert_eq!(config.eos_ids, [3]);
    }

    #[test]
    fn a_template_file_and_the_generation_config_win() {
        let config = load(&[
            CONFIG,
            ("tokenizer_config.json", r#"{"chat_template": "old"}"#),
            ("chat_template.jinja", "new"),
            ("generation_config.json", r#"{"eos_token_id": [4, 5], "temperature": 0.6, "do_sample": true}"#),
        ]);
        let config = config.unwrap();
        assert_eq!((config.chat_template.as_deref(), &config.eos_ids[..]), (Some("new"), &[4, 5][..]));
        assert_eq!(config.sampling, SamplingDefaults { temperature: Some(0.6), ..SamplingDefaults::default() });
    }

    #[test]
    fn a_text_model_inside_another_has_its_own_identity() {
        // huggingface.co/google/gemma-3-4b-it, as published.
        let config = r#"{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
            "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}}"#;
        let config = load(&[("config.json", config)]).unwrap();
        assert_eq!(
            (config.identity.model_type.as_str(), config.identity.vocab_size, config.identity.hidden_size),
            ("gemma3_text", 262_208, 2560)
        );
        assert_eq!((config.context_tokens, &config.eos_ids[..]), (131_072, &[1, 106][..]));
    }

    #[test]
    fn an_unusable_directory_is_named() {
        assert!(load(&[]).unwrap_err().to_string().contains("config.json"));
        let error = load(&[CONFIG, ("generation_config.json", r#"{"temperature": -5}"#)]).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("`temperature` is -5"), "{error}");
        let error = load(&[("config.json", r#"{"vocab_size": 10}"#)]).unwrap_err().to_string();
        assert!(error.contains("max_position_embeddings"), "{error}");
        let config = r#"{"vocab_size": 4000000000, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}"#;
        let error = load(&[("config.json", config)]).unwrap_err().to_string();
        assert!(error.contains("vocab_size is 4000000000"), "{error}");
        let endless = " ".repeat(SETTINGS_BYTES_MAX as usize + 1);
        for name in ["config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"] {
            let error = load(&[CONFIG, (name, &endless)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("more than the"), "{error}");
        }
    }
}
