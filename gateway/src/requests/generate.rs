//! The fields that all generating endpoints share.

use serde::{Deserialize, Deserializer, de::Visitor};
use serde_json::Value;
use std::{collections::BTreeMap, fmt};
use tidemill_proto::block::Token;

/// The fields of all generating endpoints. `None` is "not given" or `null`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct GenerateRequest {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<u32>,
    pub best_of: Option<u32>,
    pub max_tokens: Option<u32>,
    pub max_completion_tokens: Option<u32>,
    pub min_tokens: Option<u32>,
    pub stop: Option<StopField>,
    pub stop_token_ids: Option<Vec<Token>>,
    pub ignore_eos: Option<bool>,
    #[serde(alias = "no_stop_trim")]
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<Seed>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    #[serde(alias = "repeat_penalty")]
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<String, f32>>,
    pub return_token_ids: Option<bool>,
    pub response_format: Option<ResponseFormat>,
    pub structured_outputs: Option<StructuredOutputs>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    /// SGLang's and llama.cpp's schema, or its text.
    pub json_schema: Option<Value>,
    pub regex: Option<String>,
    pub ebnf: Option<String>,
    pub grammar: Option<String>,
    /// Ollama's format: `json`, or a schema.
    pub format: Option<Value>,
    pub nvext: Option<Nvext>,
    /// llama.cpp's `max_tokens`: without a limit if it is negative.
    pub n_predict: Option<i64>,
    /// The salt of cached prefixes: only requests with the same salt share them.
    pub cache_salt: Option<String>,
    /// The tier that selects the service class.
    pub service_tier: Option<String>,
    /// Stricter thresholds of safety checks, as in Gemini's API.
    pub safety_settings: Option<Vec<SafetySetting>>,
}

impl GenerateRequest {
    /// Moves what stands under the names of other APIs to the fields that it means.
    pub(super) fn settle(&mut self) {
        if let Some(nvext) = &self.nvext {
            self.top_k = self.top_k.or(nvext.top_k);
            self.repetition_penalty = self.repetition_penalty.or(nvext.repetition_penalty);
            self.ignore_eos = self.ignore_eos.or(nvext.ignore_eos);
            if nvext.greed_sampling == Some(true) {
                self.temperature = Some(0.0);
            }
        }
        let predicted = self.n_predict.and_then(|tokens| u64::try_from(tokens).ok());
        let predicted = predicted.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        // Each is an upper bound, so both apply.
        self.max_tokens = self.max_tokens.into_iter().chain(predicted).min();
    }
}

/// The 64 bits of a seed, which clients write signed or unsigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = Seed;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an integer of 64 bits")
            }

            fn visit_u64<E>(self, seed: u64) -> Result<Seed, E> {
                Ok(Seed(seed))
            }

            fn visit_i64<E>(self, seed: i64) -> Result<Seed, E> {
                Ok(Seed(seed as u64))
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

#[derive(Debug, Deserialize)]
pub struct SafetySetting {
    pub category: String,
    pub threshold: String,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum StopField {
    One(String),
    Many(Vec<String>),
}

/// vLLM's object of constraints: one of them, and the layout of JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StructuredOutputs {
    /// The schema, or its text.
    pub json: Option<Value>,
    pub regex: Option<String>,
    pub choice: Option<Vec<String>>,
    pub grammar: Option<String>,
    pub json_object: Option<bool>,
    pub disable_any_whitespace: Option<bool>,
}

/// Dynamo's extensions of a request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Nvext {
    pub guided_json: Option<Value>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    pub top_k: Option<i64>,
    pub repetition_penalty: Option<f32>,
    pub ignore_eos: Option<bool>,
    /// Whether the likeliest token is always drawn.
    pub greed_sampling: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub struct ResponseFormat {
    pub r#type: String,
    #[serde(default)]
    pub json_schema: Option<JsonSchema>,
    /// The schema beside the type, as llama.cpp, Together and Fireworks have it.
    #[serde(default)]
    pub schema: Option<Value>,
    /// TGI's schema or expression.
    #[serde(default)]
    pub value: Option<Value>,
    /// Together's expression.
    #[serde(default)]
    pub pattern: Option<String>,
    /// TensorRT-LLM's expression.
    #[serde(default)]
    pub regex: Option<String>,
    /// Fireworks' grammar.
    #[serde(default)]
    pub grammar: Option<String>,
    /// TensorRT-LLM's grammar.
    #[serde(default)]
    pub ebnf: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct JsonSchema {
    #[serde(default)]
    pub schema: Option<Value>,
    /// Whether constraints that could only be relaxed are refused. All others are enforced in any case.
    #[serde(default)]
    pub strict: Option<bool>,
}
