//! A client's options, checked: each error names the field.

use crate::{
    cache::semantic::Inquiry,
    generation::TextRules,
    requests::{
        error::ApiError,
        generate::{GenerateRequest, SafetySetting, Seed, StopField},
        parse::{at_most, in_range},
        structured::RequestedGrammar,
    },
    text::{
        TextModel,
        config::{self, SamplingDefaults},
        output::OutputRules,
    },
};
use std::{fmt::Display, sync::Arc, time::Instant};
use tidemill_cluster::class::{ClassId, Classes};
use tidemill_proto::{block::Token, grammar::Constraint, sampling::Sampling, thought::ThoughtLimit};
use tidemill_safety::{
    category::{Category, Threshold},
    judge::Doubt,
    pii::vault::Vault,
};

/// The maximum number of choices per prompt.
const CHOICES_MAX: u32 = 128;
const STOPS_MAX: usize = 16;
/// The maximum length of a stop string. The text held back is at most this long.
const STOP_BYTES_MAX: usize = 1024;
const STOP_TOKENS_MAX: usize = 256;
const LOGIT_BIASES_MAX: usize = 1024;
const SALT_BYTES_MAX: usize = 256;
/// The maximum number of likeliest tokens that are reported per position.
pub const TOP_LOGPROBS_MAX: u32 = 20;

/// A client's options, besides its prompt.
#[derive(Clone, Debug)]
pub struct Options {
    /// The time at which the request arrived.
    pub arrived: Instant,
    pub choices: u32,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    /// The client's limit on tokens; the endpoint has its own default.
    pub max_tokens: Option<u32>,
    /// Whether a `max_tokens` that does not fit after the prompt is reduced to the room, rather than refused.
    pub max_tokens_shrinks: bool,
    pub rules: TextRules,
    /// The grammar that every choice's text must follow.
    pub constraint: Option<Constrained>,
    /// The limit on every choice's thought.
    pub thought: Option<ThoughtLimit>,
    pub return_token_ids: bool,
    pub salt: Vec<u8>,
    /// Whether the same request has the same answer: it is greedy, or has a client's seed.
    pub repeatable: bool,
    /// Whether the answer to a similar question is acceptable, if the prompt is a single question.
    pub similar_will_do: bool,
    /// The cache query for that question.
    pub inquiry: Option<Inquiry>,
    pub class: ClassId,
    /// The class's tier, if the client asked for one.
    pub service_tier: Option<String>,
    /// Stricter thresholds of the safety checks.
    pub safety: Vec<(Category, Threshold)>,
    /// Uncertain findings in the prompt, to be moderated.
    pub doubts: Vec<Doubt>,
    /// The originals of the prompt's placeholders.
    pub vault: Option<Arc<Vault>>,
    /// Sampling, without log-probabilities, which the endpoints spell differently.
    pub sampling: Sampling,
}

impl Options {
    /// Checks a request. Missing fields have the model author's defaults, or else the API's.
    pub fn check(arrived: Instant, request: GenerateRequest, model: &TextModel, classes: &Classes) -> Result<Self, ApiError> {
        let vocab_size = model.config.identity.vocab_size;
        let choices = in_range("n", request.n.unwrap_or(1), 1..=CHOICES_MAX)?;
        if request.best_of.is_some_and(|best_of| best_of > choices) {
            return Err(ApiError::unsupported("best_of"));
        }
        let stops = match request.stop {
            None => Vec::new(),
            Some(StopField::One(stop)) => vec![stop],
            Some(StopField::Many(stops)) => stops,
        };
        at_most("stop", stops.len(), STOPS_MAX)?;
        for stop in &stops {
            at_most("stop", stop.len(), STOP_BYTES_MAX)?;
        }
        let mut stop_tokens = request.stop_token_ids.unwrap_or_default();
        at_most("stop_token_ids", stop_tokens.len(), STOP_TOKENS_MAX)?;
        let eos_tokens = if request.ignore_eos.unwrap_or(false) { Vec::new() } else { model.eos_tokens() };
        stop_tokens.extend(&eos_tokens);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let stream_options = request.stream_options.unwrap_or_default();
        let salt = request.cache_salt.unwrap_or_default().into_bytes();
        at_most("cache_salt", salt.len(), SALT_BYTES_MAX)?;

        let tier = request.service_tier.as_deref();
        let class = classes.by_tier(tier).ok_or_else(|| {
            let tiers = classes.iter().map(|(_, class)| format!("`{}`", class.service_tier)).collect::<Vec<_>>().join(", ");
            ApiError::invalid(
                "service_tier",
                format!("`service_tier` is `{}`: it must be `auto` or one of {tiers}", tier.unwrap_or_default()),
            )
        })?;
        let service_tier = tier.map(|_| classes.get(class).service_tier.clone());

        let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = model.config.sampling;
        let top_k = request.top_k.or(top_k).unwrap_or(0);
        let sampling = Sampling {
            temperature: in_range("temperature", request.temperature.or(temperature).unwrap_or(1.0), config::TEMPERATURE)?,
            top_p: in_range("top_p", request.top_p.or(top_p).unwrap_or(1.0), config::TOP_P)?,
            top_k: in_range("top_k", top_k, config::TOP_K)?.max(0) as u32,
            min_p: in_range("min_p", request.min_p.or(min_p).unwrap_or(0.0), config::MIN_P)?,
            seed: request.seed.map_or_else(rand::random, |Seed(seed)| seed),
            presence_penalty: in_range("presence_penalty", request.presence_penalty.unwrap_or(0.0), -2.0..=2.0)?,
            frequency_penalty: in_range("frequency_penalty", request.frequency_penalty.unwrap_or(0.0), -2.0..=2.0)?,
            repetition_penalty: in_range(
                "repetition_penalty",
                request.repetition_penalty.or(repetition_penalty).unwrap_or(1.0),
                config::REPETITION_PENALTY,
            )?,
            logit_bias: logit_bias(request.logit_bias.unwrap_or_default(), vocab_size)?,
            logprobs: None,
        };
        Ok(Self {
            arrived,
            choices,
            stream: request.stream.unwrap_or(false),
            include_usage: stream_options.include_usage.unwrap_or(false),
            continuous_usage: stream_options.continuous_usage_stats.unwrap_or(false),
            // Each is an upper bound, so both apply.
            max_tokens: [request.max_tokens, request.max_completion_tokens].into_iter().flatten().min(),
            max_tokens_shrinks: true,
            rules: TextRules {
                stops,
                include_stop: request.include_stop_str_in_output.unwrap_or(false),
                min_tokens: request.min_tokens.unwrap_or(0),
                stop_tokens,
                eos_tokens,
                skip_special: request.skip_special_tokens.unwrap_or(true),
                logprobs_of_text: false,
                output: OutputRules::default(),
            },
            constraint: None,
            thought: None,
            return_token_ids: request.return_token_ids.unwrap_or(false),
            salt,
            repeatable: request.seed.is_some() || sampling.temperature == 0.0,
            similar_will_do: false,
            inquiry: None,
            class,
            service_tier,
            safety: safety(request.safety_settings.unwrap_or_default())?,
            doubts: Vec::new(),
            vault: None,
            sampling,
        })
    }
}

fn safety(settings: Vec<SafetySetting>) -> Result<Vec<(Category, Threshold)>, ApiError> {
    let setting = |(i, SafetySetting { category, threshold }): (usize, SafetySetting)| {
        let wrong = |field: &str, error: &dyn Display| {
            let param = format!("safety_settings[{i}].{field}");
            ApiError::invalid(&*param, format!("`{param}`: {error}"))
        };
        let category = category.parse().map_err(|error| wrong("category", &error))?;
        Ok((category, threshold.parse().map_err(|error| wrong("threshold", &error))?))
    };
    settings.into_iter().enumerate().map(setting).collect()
}

/// A constraint, and the field of the request that asked for it.
#[derive(Clone, Debug)]
pub struct Constrained {
    pub constraint: Constraint,
    pub param: &'static str,
    /// Whether the grammar may be sent to workers. Only the [gateway](crate::serving::gateway::Gateway::check_constraint) sets it.
    pub has_passed: bool,
}

/// The `param` of a constraint that no client asked for: calls of tools must follow it, and other text is free.
pub const FORM_OF_CALLS: &str = "tools";

impl Options {
    /// Whether the client has requested a format for the text.
    pub fn has_form(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constrained| constrained.param != FORM_OF_CALLS)
    }

    /// Ends answers at further tokens, unless the client wants no end.
    pub fn end_at(&mut self, tokens: &[Token]) {
        let TextRules { stop_tokens, eos_tokens, .. } = &mut self.rules;
        if eos_tokens.is_empty() {
            return;
        }
        for known in [stop_tokens, eos_tokens] {
            known.extend(tokens);
            known.sort_unstable();
            known.dedup();
        }
    }

    /// Makes every choice's text follow a grammar, which has to pass before the request is started. The text ends with the model's end of
    /// sequence, which a client can then only delay by ignoring it. The last call counts: it may wrap an earlier grammar.
    pub fn constrain(&mut self, RequestedGrammar { grammar, param }: RequestedGrammar, model: &TextModel) {
        let end_tokens = model.eos_tokens();
        let TextRules { stop_tokens, eos_tokens, .. } = &mut self.rules;
        let ends_late = self.constraint.as_ref().map_or(eos_tokens.is_empty(), |earlier| earlier.constraint.ends_late);
        stop_tokens.extend(&end_tokens);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        eos_tokens.clone_from(&end_tokens);
        self.constraint = Some(Constrained { constraint: Constraint { grammar, end_tokens, ends_late }, param, has_passed: false });
    }
}

fn logit_bias(
    biases: impl IntoIterator<Item = (String, f32), IntoIter: ExactSizeIterator>,
    vocab_size: u32,
) -> Result<Vec<(Token, f32)>, ApiError> {
    let biases = biases.into_iter();
    at_most("logit_bias", biases.len(), LOGIT_BIASES_MAX)?;
    let check = |(key, bias): (String, f32)| {
        let token = key.parse().ok().filter(|&token| token < vocab_size);
        let token =
            token.ok_or_else(|| ApiError::invalid("logit_bias", format!("`logit_bias`: `{key}` is not a token id of this model")))?;
        Ok((token, in_range("logit_bias", bias, -100.0..=100.0)?))
    };
    biases.map(check).collect()
}
