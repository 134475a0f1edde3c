//! A process that compiles clients' grammars, so that none costs more than the process may use: the compiler's own limits do not bound all
//! of its work, and a thread cannot be stopped.
//!
//! ```text
//!   coordinator ── control (a socket for each session) ──► helper: reads the vocabularies once, and computes nothing
//!        │                                                    │ fork: the vocabularies are shared
//!        └──────────── session: questions, answers ─────► child: limits of CPU time, memory and wall time
//! ```
//!
//! - [`handle`]: the coordinator's side; `process`: the helper and its children; `wire`: the protocol between them
//!
//! The kernel ends a child at its limits, and the coordinator sees its session end without an answer, which means that the question takes
//! too much. The next session has a new child. An answer is a verdict: a grammar that has passed stays within the limits wherever it is
//! compiled, as compiling is a function of the grammar and the vocabulary. It has also been followed for some tokens, so that one that is
//! slow from the start is refused; one that becomes slow later is the worker's to bound.

pub mod handle;
mod process;
mod wire;

pub use process::run;

use crate::{
    compiler::{Compiler, GrammarError, check_size, json_schema_here, json_schema_parts_here},
    schema::Terms,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{path::PathBuf, time::Duration};
use tidemill_proto::grammar::Grammar;

/// The CPU time of a session, and of all sessions of one request.
pub const CPU_S: u64 = 1;
pub const CPU_MAX: Duration = Duration::from_secs(CPU_S);
/// The memory of a session in addition to the vocabularies: a heap and a stack.
pub const MEMORY_BYTES: usize = 256 << 20;
/// The first argument that makes a program the helper.
pub const ARGUMENT: &str = "grammar-helper";

/// A model whose grammars are compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    pub tokenizer: PathBuf,
    /// The number of entries in a row of logits.
    pub width: usize,
}

/// A client's schema or grammar, and the question about it. Models are indices in the helper's list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Question {
    /// Asks how the compiler accepts a schema, and whether it compiles for a model's vocabulary.
    Schema { schema: String, terms: Terms, model: usize },
    /// Asks how the compiler accepts parts of a schema, each the schemas at some places that apply to one value, and whether they compile as
    /// parts of a larger grammar. Parts are pointers.
    Parts { schema: String, parts: Vec<Vec<String>>, terms: Terms },
    /// Asks whether this grammar compiles, and is followed fast enough.
    Grammar { grammar: Grammar, model: usize },
}

/// A question, and the CPU time that its answer may take.
#[derive(Debug, Serialize, Deserialize)]
struct Asked<Q> {
    question: Q,
    cpu_left: Duration,
}

impl Question {
    pub fn check_size(&self) -> Result<(), GrammarError> {
        check_size(match self {
            Self::Schema { schema, .. } => schema.len(),
            Self::Parts { schema, parts, .. } => schema.len() + parts.iter().flatten().map(String::len).sum::<usize>(),
            Self::Grammar { grammar, .. } => grammar.text().len(),
        })
    }

    /// Answers the question in this process, without limits but the compiler's own. The answer is the rewritten schema, or a list of the
    /// rewritten parts' texts; for a grammar it is empty.
    pub fn answer(&self, compilers: &[Compiler]) -> Result<String, GrammarError> {
        self.check_size()?;
        let compiler = |model: usize| compilers.get(model).ok_or_else(|| GrammarError::Invalid(format!("there is no model {model}")));
        let read = |schema: &str| serde_json::from_str(schema).map_err(|error| GrammarError::Invalid(format!("it is not JSON: {error}")));
        match self {
            Self::Schema { schema, terms, model } => {
                let compiler = compiler(*model)?;
                json_schema_here(&read(schema)?, *terms, Some(compiler)).map(|grammar| grammar.text().to_owned())
            }
            Self::Parts { schema, parts, terms } => {
                json_schema_parts_here(&read(schema)?, parts, *terms).map(|texts| Value::from(texts).to_string())
            }
            Self::Grammar { grammar, model } => compiler(*model)?.compile_anew(grammar)?.try_out().map(|()| String::new()),
        }
    }
}
