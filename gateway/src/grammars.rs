//! What clients want their answers to follow, judged before anything follows it: each question goes to a process that has limits
//! ([`helper`]), and its verdict is kept for whoever asks the same.
//!
//! - `turns`: whose question is next; `verdicts`: those that are kept
//!
//! All of it blocks, and belongs beside the event loop. Nothing else in this process compiles what a client has written; decode workers
//! do, once it has passed here.

mod turns;
mod verdicts;

pub use tidemill_grammar::helper;

use crate::metrics;
use helper::{
    Model, Question,
    handle::{AskError, Handle, Session},
};
use serde_json::Value;
use std::{io, num::NonZero, path::PathBuf, thread, time::Duration};
use tidemill_grammar::{GrammarError, schema::Terms};
use tidemill_proto::grammar::Grammar;
use turns::{Turn, Turns};
use verdicts::{Key, Verdicts};

/// Waiting for a turn.
const TURN_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Grammars {
    helper: Handle,
    turns: Turns,
    verdicts: Verdicts,
}

impl Grammars {
    /// `program` is started as the helper. `models`: in the gateway's order.
    pub fn start(program: PathBuf, models: Vec<Model>) -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        // One more than one tenant may have at a time.
        Ok(Self { helper: Handle::start(program, models)?, turns: Turns::new(cores + 1), verdicts: Verdicts::default() })
    }

    /// For one request's questions about a model's grammars.
    pub fn hearing(&self, tenant: Option<&str>, model: usize) -> Hearing<'_> {
        Hearing { grammars: self, tenant: tenant.unwrap_or_default().to_owned(), model, open: None }
    }

    pub fn helper(&self) -> &Handle {
        &self.helper
    }
}

/// One request's questions. They share the limits of one child of the helper's, which is there from the first question that nobody has
/// asked before.
#[derive(Debug)]
pub struct Hearing<'a> {
    grammars: &'a Grammars,
    tenant: String,
    model: usize,
    open: Option<(Session, Turn<'a>)>,
}

impl Hearing<'_> {
    /// A schema as a grammar of its own, which has passed.
    pub fn schema(&mut self, schema: &Value, terms: Terms) -> Result<Grammar, AskError> {
        let question = Question::Schema { schema: schema.to_string(), terms, model: Some(self.model) };
        let text = self.ask(question)?;
        let grammar = Grammar::JsonSchema(text.into());
        // It was compiled for that.
        let passed = Question::Grammar { grammar: grammar.clone(), model: self.model };
        self.grammars.verdicts.keep(&self.tenant, Key::of(&passed), Ok(String::new()));
        Ok(grammar)
    }

    /// A schema as a part of a grammar that has yet to pass.
    pub fn part(&mut self, schema: &Value, terms: Terms) -> Result<String, AskError> {
        self.ask(Question::Schema { schema: schema.to_string(), terms, model: None })
    }

    /// Whether a grammar may be followed.
    pub fn grammar(&mut self, grammar: &Grammar) -> Result<(), AskError> {
        self.ask(Question::Grammar { grammar: grammar.clone(), model: self.model }).map(drop)
    }

    fn ask(&mut self, question: Question) -> Result<String, AskError> {
        question.check_size()?;
        let key = Key::of(&question);
        if let Some(verdict) = self.grammars.verdicts.get(&key) {
            metrics::count_grammar("known");
            return Ok(verdict?);
        }
        let answer = self.ask_helper(&question);
        metrics::count_grammar(match &answer {
            Ok(_) => "passed",
            Err(AskError::Refused(GrammarError::TooMuchWork)) => "too_much_work",
            Err(AskError::Refused(_)) => "refused",
            Err(AskError::Unavailable(error)) => {
                tracing::warn!(%error, "a grammar could not be checked, and its request was turned away");
                "unavailable"
            }
        });
        match answer {
            Ok(text) => {
                self.grammars.verdicts.keep(&self.tenant, key, Ok(text.clone()));
                Ok(text)
            }
            Err(AskError::Refused(error)) => {
                self.grammars.verdicts.keep(&self.tenant, key, Err(error.clone()));
                Err(error.into())
            }
            Err(unavailable) => Err(unavailable),
        }
    }

    fn ask_helper(&mut self, question: &Question) -> Result<String, AskError> {
        let (session, _) = match &mut self.open {
            Some(open) => open,
            closed => {
                let turn = self.grammars.turns.take(&self.tenant, TURN_MAX);
                let turn = turn.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "there are too many others before it"))?;
                closed.insert((self.grammars.helper.session()?, turn))
            }
        };
        let answer = session.ask(question);
        if !matches!(
            answer,
            Ok(_) | Err(AskError::Refused(GrammarError::Schema(_) | GrammarError::Invalid(_) | GrammarError::TooLarge { .. }))
        ) {
            self.open = None;
        }
        answer
    }
}
