//! Constrained decoding: from a client's schema, expression or grammar to the set of tokens that may be drawn next.
//!
//! - [`schema`]: a client's JSON Schema, checked and rewritten for the compiler; `disjoint`: proofs that `oneOf` is `anyOf`;
//!   `expression`: patterns without look-around; `wording`: the compiler's messages, in terms of schemas
//! - [`gbnf`]: llama.cpp's grammars to Lark; [`lark`]: pieces of Lark
//! - [`vocabulary`]: the bytes of each token, and their trie
//! - [`compiler`]: grammars to compiled ones, bounded and cached; [`numbers`]: bounds on JSON's numbers
//! - [`matcher`]: one sequence on its way through a grammar
//! - [`helper`]: a process that compiles clients' grammars first, under strict limits; [`confinement`]: the pieces of such processes
//!
//! There is no clock and no entropy except in the helper. A mask is a function of the grammar and the tokens so far: a [`Matcher`] starts
//! as an unused copy of a compiled grammar, and does the same work in the same order wherever a sequence continues, so even a failure is
//! the same everywhere. The parser is [llguidance](https://github.com/guidance-ai/llguidance).

pub mod compiler;
pub mod confinement;
mod disjoint;
mod expression;
pub mod gbnf;
pub mod helper;
pub mod lark;
pub mod matcher;
pub mod numbers;
pub mod schema;
pub mod vocabulary;
mod wording;

pub use compiler::{Compiled, Compiler, GrammarError};
pub use matcher::{MatchError, Matcher};
pub use vocabulary::{TokenBytes, Vocabulary, read_tokenizer};
