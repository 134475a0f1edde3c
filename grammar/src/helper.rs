//! A process that compiles what clients have written, so that nothing they write costs more than a process may: the compiler's own limits
//! do not bound all of its work, and a thread cannot be stopped.
//!
//! ```text
//!   coordinator ── control (a socket for each session) ──► helper: reads the vocabularies once, and computes nothing
//!        │                                                    │ fork: the vocabularies are there, shared
//!        └──────────── session: questions, answers ─────► child: limits of CPU time, memory and wall time
//! ```
//!
//! - [`handle`]: the coordinator's end; `process`: the helper and its children; `wire`: what is between them
//!
//! The kernel ends a child at its limits, and the coordinator sees its session end without an answer: what was asked takes too much. The
//! next session has a new child. An answer is a verdict: what has passed takes no more than the limits wherever it is compiled, because
//! compiling is a function of the grammar and the vocabulary.

pub mod handle;
mod process;
mod wire;

pub use process::run;

use crate::{
    compiler::{Compiler, GrammarError, check_size, json_schema_here},
    schema::Terms,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tidemill_proto::grammar::Grammar;

/// CPU time of a session.
pub const CPU_S: u64 = 1;
/// Memory of a session, beyond the vocabularies: a heap and a stack.
pub const MEMORY_BYTES: usize = 256 << 20;
/// The first argument of a program that shall be the helper.
pub const ARGUMENT: &str = "grammar-helper";

/// A model whose grammars are compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    pub tokenizer: PathBuf,
    /// Entries of a row of logits.
    pub width: usize,
}

/// What a client has written, and what is to be known of it. Models are numbers in the helper's list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Question {
    /// How the compiler takes this schema, and whether it compiles: for a model's vocabulary, or alone, as a part of a larger grammar.
    Schema { schema: String, terms: Terms, model: Option<usize> },
    /// Whether this grammar compiles.
    Grammar { grammar: Grammar, model: usize },
}

impl Question {
    pub fn check_size(&self) -> Result<(), GrammarError> {
        check_size(match self {
            Self::Schema { schema, .. } => schema.len(),
            Self::Grammar { grammar, .. } => grammar.text().len(),
        })
    }

    /// Answers the question in this process, without limits but the compiler's own. The text is the rewritten schema's; a grammar has none.
    pub fn answer(&self, compilers: &[Compiler]) -> Result<String, GrammarError> {
        self.check_size()?;
        let compiler = |model: usize| compilers.get(model).ok_or_else(|| GrammarError::Invalid(format!("there is no model {model}")));
        match self {
            Self::Schema { schema, terms, model } => {
                let schema = serde_json::from_str(schema).map_err(|error| GrammarError::Invalid(format!("it is not JSON: {error}")))?;
                let compiler = model.map(compiler).transpose()?;
                json_schema_here(&schema, *terms, compiler).map(|grammar| grammar.text().to_owned())
            }
            Self::Grammar { grammar, model } => compiler(*model)?.compile_anew(grammar).map(|_| String::new()),
        }
    }
}
