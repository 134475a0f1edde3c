//! Pairs of texts for a cross-encoder, which reads both together and gives them one score.

use super::{
    classify::{classifier, sigmoid},
    embeddings,
};
use crate::{
    requests::{computing::checkpoint, error::ApiError},
    serving::gateway::{Gateway, start::EmbeddedText},
};
use std::sync::Arc;
use tidemill_proto::tokens::Tokens;
use tokenizers::Encoding;

/// The lengths to which pairs are cut, in tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// The maximum length of a pair. Its second text is cut.
    pub(super) pair: usize,
    /// The maximum length of a second text.
    pub(super) second: usize,
    /// Whether a text that is too long is refused instead.
    pub(super) is_refused: bool,
}

/// A text that is the first of pairs: tokenized once.
pub(super) struct First(Encoding);

/// Selects the model of this name, which must give pairs a score.
pub(super) fn ranker(gateway: &Gateway, name: Option<&str>) -> Result<Arc<Gateway>, ApiError> {
    let gateway = classifier(gateway, name)?;
    let labels = gateway.text().config.labels.len();
    if labels != 1 {
        let message = format!("`{}` has {labels} labels, where a model that ranks has one: use /v1/classify", gateway.model_name());
        return Err(ApiError::invalid("model", message));
    }
    Ok(gateway)
}

impl Cut {
    /// Cuts pairs to the model's context, or to fewer tokens if the client wants that.
    pub(super) fn of(gateway: &Gateway, truncate_prompt_tokens: Option<i64>) -> Result<Self, ApiError> {
        let context = gateway.context_tokens_max() as usize;
        let pair = embeddings::truncation(gateway, truncate_prompt_tokens)?.unwrap_or(context);
        Ok(Self { pair, second: usize::MAX, is_refused: false })
    }
}

/// Tokenizes the first text of pairs. `param` is its field.
pub(super) fn first(gateway: &Gateway, param: &str, text: &str, cut: Cut) -> Result<First, ApiError> {
    gateway.check_text_length(param, text)?;
    checkpoint()?;
    let first = gateway.text().tokenizer.encode_first(text).map_err(|error| ApiError::invalid(param, error.to_string()))?;
    if first.len() >= cut.pair {
        return Err(ApiError::context_length(param, cut.pair as u32, first.len() as u64, 0));
    }
    Ok(First(first))
}

/// Tokenizes a pair. `param` is the field of its second text.
pub(super) fn pair(gateway: &Gateway, param: &str, First(first): &First, second: &str, cut: Cut) -> Result<EmbeddedText, ApiError> {
    gateway.check_text_length(param, second)?;
    checkpoint()?;
    let most = if cut.is_refused { usize::MAX } else { cut.pair };
    let encoded = gateway.text().tokenizer.encode_pair(first, second, most, cut.second);
    let (tokens, second) = encoded.map_err(|error| ApiError::invalid(param, error.to_string()))?;
    if tokens.len() > cut.pair {
        return Err(ApiError::context_length(param, cut.pair as u32, tokens.len() as u64, 0));
    }
    Ok(EmbeddedText { tokens: Tokens::from(tokens), second_text: second as u32 })
}

/// Returns the score of a pair: the model's own number, or between 0 and 1.
pub(super) fn score(row: &[f32], is_raw: bool) -> f64 {
    let logit = row.first().copied().unwrap_or(f32::NEG_INFINITY);
    if is_raw { f64::from(logit.max(f32::MIN)) } else { sigmoid(logit) }
}
