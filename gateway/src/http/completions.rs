//! `/v1/completions`: text or token ids in, text out; with `echo` and `logprobs`, also scoring as evaluation harnesses do it. With a `suffix`,
//! the text between two others.

use super::{
    endpoint::{Call, Endpoint},
    openai::{CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse, Prompt},
    stored::Stored,
};
use crate::{
    http::logprob::json_logprob,
    metrics::usage::Usage,
    requests::{
        error::ApiError,
        fields::row::Door,
        options::{Options, TOP_LOGPROBS_MAX},
        parse::in_range,
    },
    serving::{answer::Delta, gateway::Gateway},
    text::{
        TextModel,
        detokenizer::Detokenizer,
        tokenizer::{EncodeError, printable},
    },
    traces::names::Operation,
};
use std::{collections::BTreeMap, sync::Arc};
use tidemill_proto::{block::Token, sampling::TokenLogprob};

/// OpenAI's default length.
const MAX_TOKENS: u32 = 16;
/// The maximum number of prompts in one request.
const PROMPTS_MAX: usize = 1024;

#[derive(Debug)]
pub struct Completions {
    echo: bool,
    /// The number of leading characters of each choice's text that belong to the prompt.
    echoed: BTreeMap<u32, usize>,
}

impl Endpoint for Completions {
    type Body = CompletionRequest;
    type Whole = CompletionResponse;
    type Chunk = CompletionResponse;
    const PATH: &'static str = "/v1/completions";
    const DOOR: Door = Door::Completions;
    const OPERATION: Operation = Operation::TextCompletion;
    const ID_PREFIX: &'static str = "cmpl";
    const PROMPT: &'static str = "prompt";

    fn understand(
        gateway: &Gateway,
        completion: CompletionRequest,
        _: Stored,
        options: &mut Options,
    ) -> Result<(Self, Vec<Vec<Token>>), ApiError> {
        let suffix = completion.suffix.filter(|suffix| !suffix.is_empty());
        if completion.thinking_token_budget.is_some() {
            let message = "`thinking_token_budget`: a completion continues a text and knows no thought: use /v1/chat/completions";
            return Err(ApiError::invalid("thinking_token_budget", message));
        }
        let echo = completion.echo.unwrap_or(false);
        if echo && suffix.is_some() {
            return Err(ApiError::invalid("echo", "`echo` is not possible with `suffix`: the prompt is the text on both sides of the gap"));
        }
        options.sampling.logprobs = completion.logprobs.map(|n| in_range("logprobs", n, 0..=TOP_LOGPROBS_MAX)).transpose()?;
        if echo && options.sampling.logprobs.is_some() && options.choices > 1 {
            return Err(ApiError::invalid("n", "`echo` with `logprobs` needs `n` = 1"));
        }
        let prompts = match suffix {
            Some(suffix) => around_a_gap(gateway, completion.prompt, suffix, options)?,
            None => tokenize(gateway, completion.prompt, options)?,
        };
        if prompts.is_empty() || prompts.len() > PROMPTS_MAX {
            return Err(ApiError::invalid("prompt", format!("`prompt` must hold 1 to {PROMPTS_MAX} prompts")));
        }
        Ok((Self { echo, echoed: BTreeMap::new() }, prompts))
    }

    fn max_tokens_default(room: u32) -> u32 {
        MAX_TOKENS.min(room)
    }

    fn scores_prompt(&self) -> bool {
        self.echo
    }

    fn whole(&mut self, call: &Call, choices: Vec<Delta>, usage: Usage) -> CompletionResponse {
        let choices = choices.into_iter().map(|delta| {
            let opening = self.opening_choice(call, delta.index);
            let choice = self.choice(call, delta);
            CompletionChoice { text: opening.text + &choice.text, prompt_token_ids: opening.prompt_token_ids, ..choice }
        });
        let choices = choices.collect();
        response(call, choices, Some(Some(usage)))
    }

    fn opening(&mut self, call: &Call, index: u32) -> Option<CompletionResponse> {
        let choice = self.opening_choice(call, index);
        let says_something = !choice.text.is_empty() || choice.prompt_token_ids.is_some();
        says_something.then(|| chunk(call, vec![choice], None))
    }

    fn chunk(&mut self, call: &Call, delta: Delta, usage: Option<Usage>) -> CompletionResponse {
        let choice = self.choice(call, delta);
        let logprobs = choice.logprobs.filter(|logprobs| !logprobs.tokens.is_empty());
        chunk(call, vec![CompletionChoice { logprobs, ..choice }], usage)
    }

    fn closing(&mut self, call: &Call, usage: Usage) -> CompletionResponse {
        chunk(call, Vec::new(), Some(usage))
    }
}

impl Completions {
    /// Writes a choice before its first token: with `echo`, the prompt's text.
    fn opening_choice(&mut self, call: &Call, index: u32) -> CompletionChoice {
        let prompt = call.prompt(index);
        let text = if self.echo { call.tokenizer.decode(prompt, call.options.rules.skip_special) } else { String::new() };
        self.echoed.insert(index, text.chars().count());
        CompletionChoice {
            index,
            text,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: call.options.return_token_ids.then(Vec::new),
            prompt_token_ids: call.options.return_token_ids.then(|| prompt.clone()),
        }
    }

    /// Writes a choice's increment.
    fn choice(&self, call: &Call, delta: Delta) -> CompletionChoice {
        let logprobs = call.options.sampling.logprobs.map(|_| self.logprobs(call, &delta));
        let Delta { index, piece, .. } = delta;
        let (finish_reason, stop_reason) = piece.finish.map_or((None, None), |finish| (Some(finish.reason), finish.stop_reason));
        CompletionChoice {
            index,
            text: piece.text,
            logprobs,
            finish_reason,
            stop_reason,
            token_ids: call.options.return_token_ids.then_some(piece.tokens),
            prompt_token_ids: None,
        }
    }

    fn logprobs(&self, call: &Call, delta: &Delta) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        if let Some(prompt_logprobs) = &delta.prompt_logprobs {
            let mut detokenizer = Detokenizer::new(Arc::clone(&call.tokenizer), &[], call.options.rules.skip_special);
            let mut offset = 0;
            for (token, logprob) in call.prompt(delta.index).iter().zip(prompt_logprobs) {
                push_logprob(call, &mut logprobs, *token, logprob.as_ref(), offset);
                offset += detokenizer.push(*token).chars().count();
            }
        }
        let echoed = self.echoed.get(&delta.index).copied().unwrap_or(0);
        for generated in &delta.piece.logprobs {
            push_logprob(call, &mut logprobs, generated.token, Some(&generated.logprob), echoed + generated.offset);
        }
        logprobs
    }
}

fn tokenize(gateway: &Gateway, prompt: Prompt, options: &mut Options) -> Result<Vec<Vec<Token>>, ApiError> {
    let tokenizer = &gateway.text().tokenizer;
    match sorted(prompt) {
        Sorted::Tokens(prompts) => checked(gateway, prompts, options),
        Sorted::Texts(texts) => {
            let encode = |text: String| tokenizer.encode(&text, true).map_err(|e| ApiError::invalid("prompt", e.to_string()));
            shown(gateway, texts, None, options)?.into_iter().map(encode).collect()
        }
    }
}

/// Makes the prompts of which each is the text before a gap, and `suffix` the one after it.
fn around_a_gap(gateway: &Gateway, prompt: Prompt, suffix: String, options: &mut Options) -> Result<Vec<Vec<Token>>, ApiError> {
    let TextModel { tokenizer, infill, .. } = gateway.text();
    let Some(infill) = infill else {
        let message = format!("`suffix`: `{}` cannot fill a gap: its tokenizer has no marks for the text around one", gateway.model_name());
        return Err(ApiError::invalid("suffix", message));
    };
    options.end_at(infill.ends());
    let refused = |param: &'static str| move |error: EncodeError| ApiError::invalid(param, error.to_string());
    let (prompts, suffix) = match sorted(prompt) {
        Sorted::Tokens(prompts) => {
            let prompts = checked(gateway, prompts, options)?;
            (prompts, shown(gateway, Vec::new(), Some(suffix), options)?.pop())
        }
        Sorted::Texts(texts) => {
            let mut texts = shown(gateway, texts, Some(suffix), options)?;
            let suffix = texts.pop();
            let encoded = texts.iter().map(|text| tokenizer.encode(text, false).map_err(refused("prompt")));
            (encoded.collect::<Result<_, _>>()?, suffix)
        }
    };
    let after = infill.encode_after(tokenizer, &suffix.unwrap_or_default()).map_err(refused("suffix"))?;
    prompts.iter().map(|before| infill.prompt(tokenizer, before, &after).map_err(refused("prompt"))).collect()
}

enum Sorted {
    Texts(Vec<String>),
    Tokens(Vec<Vec<Token>>),
}

fn sorted(prompt: Prompt) -> Sorted {
    match prompt {
        Prompt::Text(text) => Sorted::Texts(vec![text]),
        Prompt::Texts(texts) => Sorted::Texts(texts),
        Prompt::Tokens(tokens) => Sorted::Tokens(vec![tokens]),
        Prompt::TokenLists(lists) => Sorted::Tokens(lists),
    }
}

/// Checks the texts of prompts, and after them the suffix if there is one. Returns them as the model may see them.
fn shown(gateway: &Gateway, texts: Vec<String>, suffix: Option<String>, options: &mut Options) -> Result<Vec<String>, ApiError> {
    let named = texts.iter().map(|text| ("prompt", text)).chain(suffix.iter().map(|suffix| ("suffix", suffix)));
    for (param, text) in named {
        gateway.check_text_length(param, text)?;
        options.doubts.extend(gateway.check_input(param, [text.as_str()], &options.safety)?);
    }
    let mut texts: Vec<String> = texts.into_iter().chain(suffix).collect();
    if let Some(pii) = gateway.pii() {
        pii.hide_texts(&mut texts, options);
    }
    Ok(texts)
}

/// Checks prompts of token ids by the text to which they decode.
fn checked(gateway: &Gateway, prompts: Vec<Vec<Token>>, options: &mut Options) -> Result<Vec<Vec<Token>>, ApiError> {
    if gateway.safety().is_some() {
        for prompt in &prompts {
            let text = gateway.text().tokenizer.decode(prompt, true);
            options.doubts.extend(gateway.check_input("prompt", [text.as_str()], &options.safety)?);
        }
    }
    Ok(prompts)
}

fn push_logprob(call: &Call, logprobs: &mut CompletionLogprobs, token: Token, logprob: Option<&TokenLogprob>, offset: usize) {
    let text = |token| printable(&call.tokenizer.token_bytes(token));
    logprobs.tokens.push(text(token));
    logprobs.token_logprobs.push(logprob.map(|logprob| json_logprob(logprob.logprob)));
    logprobs.top_logprobs.push(logprob.map(|logprob| {
        let mut top: BTreeMap<_, _> = logprob.top.iter().map(|(token, p)| (text(*token), json_logprob(*p))).collect();
        // The token itself is always among them, as with OpenAI.
        top.entry(text(token)).or_insert(json_logprob(logprob.logprob));
        top
    }));
    logprobs.text_offset.push(offset);
}

fn response(call: &Call, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> CompletionResponse {
    let Call { id, created, model, options, .. } = call;
    CompletionResponse {
        id: id.clone(),
        object: "text_completion",
        created: *created,
        model: model.clone(),
        choices,
        usage,
        service_tier: options.service_tier.clone(),
    }
}

fn chunk(call: &Call, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> CompletionResponse {
    response(call, choices, call.options.include_usage.then_some(usage))
}
