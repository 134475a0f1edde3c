//! `/v1/completions`: text or token ids in, text out; with `echo` and `logprobs` also the way evaluation harnesses score.

use super::{
    FrontDoor,
    answer::{Answer, Delta, Finish},
    errors::ApiError,
    openai::{CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse, GenerateRequest, Prompt, Usage},
    parse::{self, Options, TOP_LOGPROBS_MAX, in_range},
    sse,
};
use crate::text::{
    detokenizer::Detokenizer,
    tokenizer::{Tokenizer, printable},
};
use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use std::{collections::BTreeMap, sync::Arc, time::Instant};
use tidemill_proto::{block::Token, sampling::TokenLogprob};

/// OpenAI's default.
const MAX_TOKENS: u32 = 16;
/// Prompts of one request.
const PROMPTS_MAX: usize = 1024;

pub async fn completions(State(front): State<Arc<FrontDoor>>, body: Body) -> Result<Response, ApiError> {
    let (answer, call) = front.counted(start(&front, body)).await?;
    call.respond(answer).await
}

/// One request, understood.
struct Call {
    id: String,
    created: u64,
    model: String,
    options: Options,
    prompts: Vec<Vec<Token>>,
    echo: bool,
    tokenizer: Arc<Tokenizer>,
    /// Characters of each choice's text that are the prompt's.
    echoed: Vec<usize>,
}

async fn start(front: &Arc<FrontDoor>, body: Body) -> Result<(Answer, Call), ApiError> {
    let arrived = Instant::now();
    let body = front.read(body).await?;
    let worker = Arc::clone(front);
    let (mut options, prompts, echo) = front.compute(move || understand(&worker, arrived, &body)).await?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u32;
    // The default shrinks to what fits; a number that the client gave must fit.
    let room = front.context_tokens()?.saturating_sub(longest).max(1);
    let max_tokens = options.max_tokens.unwrap_or(MAX_TOKENS.min(room));
    let prompt_logprobs = options.sampling.logprobs.filter(|_| echo);
    let answer = front.start("prompt", prompts.clone(), &mut options, max_tokens, prompt_logprobs)?;
    let (id, model, tokenizer) = (front.draw_id("cmpl"), front.model_name().to_owned(), Arc::clone(&front.text().tokenizer));
    let echoed = vec![0; answer.choices()];
    Ok((answer, Call { id, created: super::unix_seconds(), model, options, prompts, echo, tokenizer, echoed }))
}

/// Parses and tokenizes.
fn understand(front: &FrontDoor, arrived: Instant, body: &[u8]) -> Result<(Options, Vec<Vec<Token>>, bool), ApiError> {
    let request: GenerateRequest = parse::json(body)?;
    front.check_model(request.model.as_deref())?;
    let completion: CompletionRequest = parse::json(body)?;
    let mut options = Options::check(arrived, request, front.text())?;
    if completion.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix"));
    }
    let echo = completion.echo.unwrap_or(false);
    options.sampling.logprobs = completion.logprobs.map(|n| in_range("logprobs", n, 0..=TOP_LOGPROBS_MAX)).transpose()?;
    if echo && options.sampling.logprobs.is_some() && options.choices > 1 {
        return Err(ApiError::invalid("n", "`echo` with `logprobs` needs `n` = 1"));
    }
    let prompts = tokenize(front, completion.prompt)?;
    if prompts.is_empty() || prompts.len() > PROMPTS_MAX {
        return Err(ApiError::invalid("prompt", format!("`prompt` must hold 1 to {PROMPTS_MAX} prompts")));
    }
    Ok((options, prompts, echo))
}

fn tokenize(front: &FrontDoor, prompt: Prompt) -> Result<Vec<Vec<Token>>, ApiError> {
    let texts = match prompt {
        Prompt::Text(text) => vec![text],
        Prompt::Texts(texts) => texts,
        Prompt::Tokens(tokens) => return Ok(vec![tokens]),
        Prompt::TokenLists(lists) => return Ok(lists),
    };
    let encode = |text: String| {
        front.check_text_length("prompt", &text)?;
        front.text().tokenizer.encode(&text, true).map_err(|e| ApiError::invalid("prompt", e.to_string()))
    };
    texts.into_iter().map(encode).collect()
}

impl Call {
    async fn respond(mut self, mut answer: Answer) -> Result<Response, ApiError> {
        if self.options.stream {
            answer.settle().await?;
            let continuous_usage = self.options.continuous_usage;
            return Ok(sse::respond(answer, self, continuous_usage));
        }
        let mut choices: Vec<_> = (0..answer.choices() as u32).map(|index| self.first_choice(index)).collect();
        while let Some(delta) = answer.next().await? {
            let choice = &mut choices[delta.index as usize];
            self.extend_logprobs(choice.logprobs.as_mut(), &delta);
            choice.text += &delta.text;
            if let Some(tokens) = &mut choice.token_ids {
                tokens.extend(&delta.tokens);
            }
            if let Some(Finish { reason, stop_reason }) = delta.finish {
                (choice.finish_reason, choice.stop_reason) = (Some(reason), stop_reason);
            }
        }
        let usage = Some(Some(answer.usage().clone()));
        Ok(Json(self.response(choices, usage)).into_response())
    }

    /// A choice before its first token: with `echo`, the prompt's text.
    fn first_choice(&mut self, index: u32) -> CompletionChoice {
        let prompt = &self.prompts[index as usize / self.options.choices as usize];
        let text = if self.echo { self.tokenizer.decode(prompt, self.options.skip_special) } else { String::new() };
        self.echoed[index as usize] = text.chars().count();
        CompletionChoice {
            index,
            text,
            logprobs: self.options.sampling.logprobs.map(|_| CompletionLogprobs::default()),
            finish_reason: None,
            stop_reason: None,
            token_ids: self.options.return_token_ids.then(Vec::new),
            prompt_token_ids: self.options.return_token_ids.then(|| prompt.clone()),
        }
    }

    fn extend_logprobs(&self, logprobs: Option<&mut CompletionLogprobs>, delta: &Delta) {
        let Some(logprobs) = logprobs else { return };
        if let Some(prompt_logprobs) = &delta.prompt_logprobs {
            let prompt = &self.prompts[delta.index as usize / self.options.choices as usize];
            let mut detokenizer = Detokenizer::new(Arc::clone(&self.tokenizer), &[], self.options.skip_special);
            let mut offset = 0;
            for (token, logprob) in prompt.iter().zip(prompt_logprobs) {
                self.push_logprob(logprobs, *token, logprob.as_ref(), offset);
                offset += detokenizer.push(*token).chars().count();
            }
        }
        for generated in &delta.logprobs {
            let offset = self.echoed[delta.index as usize] + generated.offset;
            self.push_logprob(logprobs, generated.token, Some(&generated.logprob), offset);
        }
    }

    fn push_logprob(&self, logprobs: &mut CompletionLogprobs, token: Token, logprob: Option<&TokenLogprob>, offset: usize) {
        let text = |token| printable(&self.tokenizer.token_bytes(token));
        logprobs.tokens.push(text(token));
        logprobs.token_logprobs.push(logprob.map(|logprob| super::json_logprob(logprob.logprob)));
        logprobs.top_logprobs.push(logprob.map(|logprob| {
            let mut top: BTreeMap<_, _> = logprob.top.iter().map(|(token, p)| (text(*token), super::json_logprob(*p))).collect();
            // The token itself is always among them, as with OpenAI.
            top.entry(text(token)).or_insert(super::json_logprob(logprob.logprob));
            top
        }));
        logprobs.text_offset.push(offset);
    }

    fn response(&self, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> CompletionResponse {
        let Self { id, created, model, .. } = self;
        CompletionResponse { id: id.clone(), object: "text_completion", created: *created, model: model.clone(), choices, usage }
    }

    fn chunk(&self, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> CompletionResponse {
        self.response(choices, self.options.include_usage.then_some(usage))
    }
}

impl sse::Format for Call {
    type Chunk = CompletionResponse;

    fn opening(&mut self, choices: usize) -> Vec<CompletionResponse> {
        let first: Vec<_> = (0..choices as u32).map(|index| self.first_choice(index)).collect();
        let said = |choice: &CompletionChoice| !choice.text.is_empty() || choice.prompt_token_ids.is_some();
        let silent = |choice| CompletionChoice { logprobs: None, ..choice };
        first.into_iter().filter(said).map(|choice| self.chunk(vec![silent(choice)], None)).collect()
    }

    fn delta(&mut self, delta: Delta, usage: Option<Usage>) -> Option<CompletionResponse> {
        let mut logprobs = self.options.sampling.logprobs.map(|_| CompletionLogprobs::default());
        self.extend_logprobs(logprobs.as_mut(), &delta);
        let (finish_reason, stop_reason) = delta.finish.map_or((None, None), |finish| (Some(finish.reason), finish.stop_reason));
        let choice = CompletionChoice {
            index: delta.index,
            text: delta.text,
            logprobs: logprobs.filter(|logprobs| !logprobs.tokens.is_empty()),
            finish_reason,
            stop_reason,
            token_ids: self.options.return_token_ids.then_some(delta.tokens),
            prompt_token_ids: None,
        };
        Some(self.chunk(vec![choice], usage))
    }

    fn closing(&mut self, usage: Usage) -> Option<CompletionResponse> {
        self.options.include_usage.then(|| self.chunk(Vec::new(), Some(usage)))
    }
}
