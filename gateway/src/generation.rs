//! Token ids to an answer's parts, one pure [`Pipeline`] per choice:
//!
//! ```text
//!   token ──► detokenizer ──► stop strings ──► inspection ──► Piece
//! ```
//!
//! No clock, no HTTP: every endpoint, streamed or not, only serializes the same pieces.

use crate::text::{
    TextModel,
    detokenizer::Detokenizer,
    stop::{StopMatcher, Verdict},
};
use serde::Serialize;
use std::{fmt, ops::ControlFlow, sync::Arc};
use tidemill_proto::{block::Token, sampling::TokenLogprob};

/// A client's wishes about the text of its choices.
#[derive(Clone, Debug, Default)]
pub struct TextRules {
    /// Stop strings.
    pub stops: Vec<String>,
    /// Keep the stop string, or the stop token's text, in the answer.
    pub include_stop: bool,
    /// Stop strings count only after this many tokens.
    pub min_tokens: u32,
    pub stop_tokens: Vec<Token>,
    /// Those of `stop_tokens` that are the model's end of sequence, and not the client's wish.
    pub eos_tokens: Vec<Token>,
    pub skip_special: bool,
}

/// A choice's gain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// What the model says.
    pub text: String,
    /// What it thought before.
    pub reasoning: String,
    /// Parts of its calls, in order: a call's first part has its id and name.
    pub calls: Vec<CallDelta>,
    /// Tokens that were a thought.
    pub reasoning_tokens: u64,
    pub tokens: Vec<Token>,
    pub logprobs: Vec<Logprob>,
    /// The choice ends with this piece.
    pub finish: Option<Finish>,
}

/// A part of a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// Of the call among the choice's calls.
    pub index: u32,
    /// With the call's first part only, as is the name.
    pub id: Option<String>,
    pub name: Option<String>,
    /// The next characters of the arguments' JSON text.
    pub arguments: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    pub token: Token,
    pub logprob: TokenLogprob,
    /// Characters of generated text before this token.
    pub offset: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishReason,
    pub stop_reason: Option<StopReason>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    /// The model waits for what its calls return.
    ToolCalls,
}

/// The cause of a choice's end, other than the model's end of sequence: vLLM's extension.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(Token),
    Text(String),
}

/// How a choice's tokens ended in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    StopToken(Token),
    Length,
}

impl Finish {
    pub const LENGTH: Self = Self { reason: FinishReason::Length, stop_reason: None };

    fn stopped_at(stop: String) -> Self {
        Self { reason: FinishReason::Stop, stop_reason: Some(StopReason::Text(stop)) }
    }
}

impl Piece {
    /// Appends the next piece. All pieces together are the whole answer: one delta per call then.
    pub fn append(&mut self, next: Self) {
        self.text += &next.text;
        self.reasoning += &next.reasoning;
        self.reasoning_tokens += next.reasoning_tokens;
        for delta in next.calls {
            match self.calls.last_mut().filter(|call| call.index == delta.index) {
                Some(call) => call.arguments += &delta.arguments,
                None => self.calls.push(delta),
            }
        }
        self.tokens.extend(next.tokens);
        self.logprobs.extend(next.logprobs);
        self.finish = next.finish.or(self.finish.take());
    }
}

/// Sees every piece before the client does, may change it, and may end the choice.
pub trait Inspect: fmt::Debug + Send {
    fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish>;
}

/// One choice on its way from tokens to text.
#[derive(Debug)]
pub struct Pipeline {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    rules: TextRules,
    inspect: Option<Box<dyn Inspect>>,
    tokens: u32,
    /// Of generated text, whether sent or held back.
    characters: usize,
    ended: bool,
}

impl Pipeline {
    /// For the tokens after `prompt`.
    pub fn new(model: &TextModel, prompt: &[Token], rules: &TextRules) -> Self {
        Self {
            detokenizer: Detokenizer::new(Arc::clone(&model.tokenizer), prompt, rules.skip_special),
            stops: StopMatcher::new(rules.stops.clone(), rules.include_stop),
            rules: rules.clone(),
            inspect: None,
            tokens: 0,
            characters: 0,
            ended: false,
        }
    }

    pub fn inspected_by(self, inspect: Box<dyn Inspect>) -> Self {
        Self { inspect: Some(inspect), ..self }
    }

    /// The next token. The piece has a `finish` if the choice must end here, whatever its worker does.
    pub fn push(&mut self, token: Token, logprob: Option<TokenLogprob>) -> Piece {
        debug_assert!(!self.ended, "nothing follows the end");
        self.tokens += 1;
        let offset = self.characters;
        let logprobs = logprob.map(|logprob| Logprob { token, logprob, offset }).into_iter().collect();
        let silent = self.rules.stop_tokens.contains(&token) && !self.rules.include_stop;
        let text = if silent { String::new() } else { self.detokenizer.push(token) };
        self.characters += text.chars().count();
        let (text, finish) = if silent { (text, None) } else { self.stop(&text) };
        self.inspected(Piece { text, tokens: vec![token], logprobs, finish, ..Piece::default() })
    }

    /// No more tokens come. The rest of the text may still hold a stop string's last character.
    pub fn finish(&mut self, ended: Ended) -> Piece {
        let finish = match ended {
            Ended::Length => Finish::LENGTH,
            Ended::StopToken(token) => {
                let by_client = !self.rules.eos_tokens.contains(&token);
                Finish { reason: FinishReason::Stop, stop_reason: by_client.then_some(StopReason::Token(token)) }
            }
        };
        let rest = self.detokenizer.finish();
        let (text, finish) = match self.stop(&rest) {
            (text, Some(stopped)) => (text, stopped),
            (text, None) => (text + &self.stops.finish(), finish),
        };
        self.inspected(Piece { text, finish: Some(finish), ..Piece::default() })
    }

    fn stop(&mut self, text: &str) -> (String, Option<Finish>) {
        match self.stops.push(text, self.tokens > self.rules.min_tokens) {
            Verdict::Continue(text) => (text, None),
            Verdict::Stopped { text, stop } => (text, Some(Finish::stopped_at(stop))),
        }
    }

    fn inspected(&mut self, mut piece: Piece) -> Piece {
        if let Some(inspect) = &mut self.inspect
            && let ControlFlow::Break(finish) = inspect.inspect(&mut piece)
        {
            piece.finish = Some(finish);
        }
        self.ended = piece.finish.is_some();
        piece
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        self.detokenizer.check_integrity();
        self.stops.check_integrity();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{config::ModelConfig, tokenizer::tests::sentencepiece};

    fn model() -> TextModel {
        TextModel { config: ModelConfig::default(), tokenizer: Arc::new(sentencepiece()), template: None }
    }

    fn ids(model: &TextModel, text: &str) -> Vec<Token> {
        text.bytes().map(|byte| model.tokenizer.id_of(&format!("<0x{byte:02X}>")).unwrap()).collect()
    }

    fn run(pipeline: &mut Pipeline, tokens: &[Token], ended: Ended) -> Piece {
        let mut whole = Piece::default();
        for &token in tokens {
            whole.append(pipeline.push(token, None));
            pipeline.check_integrity();
            if whole.finish.is_some() {
                return whole;
            }
        }
        whole.append(pipeline.finish(ended));
        pipeline.check_integrity();
        whole
    }

    #[test]
    fn tokens_become_text_up_to_a_stop_string_or_token() {
        let model = model();
        let (tokens, eos) = (ids(&model, "one END two"), ids(&model, "!")[0]);
        let stop = |reason, stop_reason| Some(Finish { reason, stop_reason });
        let rules = TextRules { stops: vec!["END".into()], ..TextRules::default() };
        let piece = run(&mut Pipeline::new(&model, &[], &rules), &tokens, Ended::Length);
        assert_eq!((piece.text.as_str(), piece.tokens.len()), ("one ", 7), "the rest of the tokens is not wanted");
        assert_eq!(piece.finish, stop(FinishReason::Stop, Some(StopReason::Text("END".into()))));

        let unarmed = TextRules { min_tokens: 7, ..rules };
        assert_eq!(run(&mut Pipeline::new(&model, &[], &unarmed), &tokens, Ended::Length).text, "one END two");

        let all = [&tokens[..], &[eos]].concat();
        let rules = TextRules { stop_tokens: vec![eos], eos_tokens: vec![eos], ..TextRules::default() };
        let piece = run(&mut Pipeline::new(&model, &[], &rules), &all, Ended::StopToken(eos));
        assert_eq!((piece.text.as_str(), piece.finish), ("one END two", stop(FinishReason::Stop, None)));
        let rules = TextRules { eos_tokens: vec![], include_stop: true, ..rules };
        let piece = run(&mut Pipeline::new(&model, &[], &rules), &all, Ended::StopToken(eos));
        assert_eq!((piece.text.as_str(), piece.finish), ("one END two!", stop(FinishReason::Stop, Some(StopReason::Token(eos)))));
    }

    #[test]
    fn inspection_sees_what_the_client_would_and_may_change_or_end_it() {
        #[derive(Debug)]
        struct Censor(String);

        impl Inspect for Censor {
            fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish> {
                self.0 += &piece.text;
                piece.text = piece.text.to_uppercase();
                if self.0.ends_with("wo") { ControlFlow::Break(Finish::LENGTH) } else { ControlFlow::Continue(()) }
            }
        }

        let model = model();
        let mut pipeline = Pipeline::new(&model, &[], &TextRules::default()).inspected_by(Box::new(Censor(String::new())));
        let piece = run(&mut pipeline, &ids(&model, "one two three"), Ended::Length);
        assert_eq!((piece.text.as_str(), piece.tokens.len(), piece.finish), ("ONE TWO", 7, Some(Finish::LENGTH)));
    }
}
