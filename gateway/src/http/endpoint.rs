//! The interface of the generating endpoints, which differ in their wire shapes.

use super::{conversations::turn::Turn, stored::Stored};
use crate::{
    metrics::usage::Usage,
    requests::{error::ApiError, fields::row::Door, options::Options},
    serving::{answer::Delta, gateway::Gateway, rounds::Rounds},
    text::tokenizer::Tokenizer,
    traces::names::Operation,
};
use serde::{Serialize, de::DeserializeOwned};
use std::sync::Arc;
use tidemill_proto::{block::Token, tokens::Tokens};

/// The wire shapes of one request.
pub trait Endpoint: Sized + Send + 'static {
    /// The endpoint's own part of the request body.
    type Body: DeserializeOwned;
    type Whole: Serialize;
    type Chunk: Serialize;
    const PATH: &'static str;
    const DOOR: Door;
    const OPERATION: Operation;
    const ID_PREFIX: &'static str;
    /// The field with the prompts, for errors.
    const PROMPT: &'static str;
    /// Whether its body may name stored data.
    const CONVERSES: bool = false;

    /// Checks the body, completes the options, and makes the prompts.
    fn understand(gateway: &Gateway, body: Self::Body, stored: Stored, options: &mut Options) -> Result<(Self, Vec<Vec<Token>>), ApiError>;
    /// Takes the tools that run on the server for it, if there are any.
    fn rounds(&mut self) -> Option<Rounds> {
        None
    }
    /// The turn of a conversation that the answer is part of.
    fn turn(&mut self) -> Option<&mut Turn> {
        None
    }
    /// The number of tokens to generate if the client gives none; `room` of them fit.
    fn max_tokens_default(room: u32) -> u32;
    /// Whether log-probabilities of the prompt are requested as well.
    fn scores_prompt(&self) -> bool {
        false
    }

    /// Writes the whole answer. `choices` are the sums of each choice's increments.
    fn whole(&mut self, call: &Call, choices: Vec<Delta>, usage: Usage) -> Self::Whole;
    /// Writes a stream's first chunk of a choice, if it has one.
    fn opening(&mut self, call: &Call, index: u32) -> Option<Self::Chunk>;
    /// Writes a chunk. `usage` has running totals, if the client asked for them.
    fn chunk(&mut self, call: &Call, delta: Delta, usage: Option<Usage>) -> Self::Chunk;
    /// Writes a stream's last chunk.
    fn closing(&mut self, call: &Call, usage: Usage) -> Self::Chunk;
}

/// A request that was read and checked.
#[derive(Debug)]
pub struct Call {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub options: Options,
    pub prompts: Vec<Tokens>,
    pub tokenizer: Arc<Tokenizer>,
}

impl Call {
    /// Counts the choices of all prompts together.
    pub fn choices(&self) -> u32 {
        self.prompts.len() as u32 * self.options.choices
    }

    /// Returns the prompt of a choice.
    pub fn prompt(&self, index: u32) -> &Tokens {
        &self.prompts[(index / self.options.choices) as usize]
    }
}
