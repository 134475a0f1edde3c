//! Grammars that clients request for their answers, checked before any answer has to follow them: each question goes to a process with
//! limits ([`helper`]), and its verdict is cached.
//!
//! - `turns`: the order of questions; `verdicts`: cached verdicts
//!
//! All calls block, and must not run on the event loop. This process compiles no client's grammar otherwise; decode workers do, once it has
//! passed here.

mod turns;
mod verdicts;

pub use tidemill_grammar::helper;

use crate::metrics;
use helper::{
    Model, Question,
    handle::{AskError, Handle, Session},
};
use parking_lot::Mutex;
use serde_json::Value;
use std::{io, num::NonZero, path::PathBuf, thread, time::Duration};
use tidemill_grammar::{GrammarError, schema::Terms};
use tidemill_proto::grammar::Grammar;
use turns::{Turn, Turns};
use verdicts::{Key, Verdicts};

/// The longest wait for a turn.
const TURN_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Grammars {
    helper: Handle,
    turns: Turns,
    verdicts: Verdicts,
}

impl Grammars {
    /// Starts `program` as the helper. `models` are in the gateway's order.
    pub fn start(program: PathBuf, models: Vec<Model>) -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        // One more than a single tenant may have at a time.
        Ok(Self { helper: Handle::start(program, models)?, turns: Turns::new(cores + 1), verdicts: Verdicts::default() })
    }

    /// Opens one request's questions about a model's grammars. `spent` is the CPU time of its other questions.
    pub fn hearing<'a>(&'a self, tenant: Option<&str>, model: usize, spent: Option<&'a Spent>) -> Hearing<'a> {
        Hearing { grammars: self, tenant: tenant.unwrap_or_default().to_owned(), model, spent, open: None }
    }

    pub fn helper(&self) -> &Handle {
        &self.helper
    }
}

/// CPU time that the grammars of one request have taken in all its questions: [`helper::CPU_MAX`] is their common limit.
#[derive(Debug, Default)]
pub struct Spent(Mutex<Duration>);

impl Spent {
    fn left(&self) -> Duration {
        helper::CPU_MAX.saturating_sub(*self.0.lock())
    }

    fn add(&self, cpu: Duration) {
        *self.0.lock() += cpu;
    }
}

/// The least time of a verdict that a grammar takes too much: one that was ended earlier has not shown this by itself.
const CPU_TELLING: Duration = Duration::from_millis(750);

/// One request's questions. They share the limits of one child process of the helper, which is started by the first question whose verdict
/// is not cached.
#[derive(Debug)]
pub struct Hearing<'a> {
    grammars: &'a Grammars,
    tenant: String,
    model: usize,
    /// The CPU time of the request's other questions, if there are any.
    spent: Option<&'a Spent>,
    open: Option<(Session, Turn<'a>)>,
}

impl Hearing<'_> {
    /// Returns a schema as a grammar of its own, which has passed.
    pub fn schema(&mut self, schema: &Value, terms: Terms) -> Result<Grammar, AskError> {
        let question = Question::Schema { schema: schema.to_string(), terms, model: self.model };
        let text = self.ask(question)?;
        let grammar = Grammar::JsonSchema(text.into());
        // It was compiled for that.
        let passed = Question::Grammar { grammar: grammar.clone(), model: self.model };
        self.grammars.verdicts.keep(&self.tenant, Key::of(&passed), Ok(String::new()));
        Ok(grammar)
    }

    /// Returns parts of a schema as parts of a grammar that has yet to pass. Each is made of the schemas at its places, which are pointers.
    pub fn parts(&mut self, schema: &Value, parts: &[Vec<String>], terms: Terms) -> Result<Vec<String>, AskError> {
        let texts = self.ask(Question::Parts { schema: schema.to_string(), parts: parts.to_vec(), terms })?;
        serde_json::from_str(&texts).map_err(|error| AskError::Unavailable(io::Error::new(io::ErrorKind::InvalidData, error)))
    }

    /// Checks whether a grammar may be used.
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
        let left = self.spent.map_or(helper::CPU_MAX, Spent::left);
        let answer = self.ask_helper(&question, left);
        metrics::count_grammar(match &answer {
            Ok(_) => "passed",
            Err(AskError::Refused(GrammarError::TooMuchWork | GrammarError::Slow(_))) => "too_much_work",
            Err(AskError::Refused(_)) => "refused",
            Err(AskError::Unavailable(error)) => {
                tracing::warn!(%error, "could not check a grammar; its request is refused");
                "unavailable"
            }
        });
        match answer {
            Ok(text) => {
                self.grammars.verdicts.keep(&self.tenant, key, Ok(text.clone()));
                Ok(text)
            }
            Err(AskError::Refused(error)) => {
                if error != GrammarError::TooMuchWork || left >= CPU_TELLING {
                    self.grammars.verdicts.keep(&self.tenant, key, Err(error.clone()));
                }
                Err(error.into())
            }
            Err(unavailable) => Err(unavailable),
        }
    }

    fn ask_helper(&mut self, question: &Question, left: Duration) -> Result<String, AskError> {
        if left.is_zero() {
            return Err(GrammarError::TooMuchWork.into());
        }
        let (session, _) = match &mut self.open {
            Some(open) => open,
            closed => {
                let turn = self.grammars.turns.take(&self.tenant, TURN_MAX);
                let turn = turn.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "there are too many others before it"))?;
                closed.insert((self.grammars.helper.session_within(left)?, turn))
            }
        };
        let before = session.cpu();
        let answer = session.ask(question);
        if let Some(spent) = self.spent {
            // A child that was ended does not report its CPU time. Whichever limit it reached, its request has had all that it may have.
            let ended = matches!(answer, Err(AskError::Refused(GrammarError::TooMuchWork)));
            spent.add(if ended { left } else { session.cpu() - before });
        }
        if matches!(answer, Err(AskError::Unavailable(_) | AskError::Refused(GrammarError::TooMuchWork))) {
            self.open = None;
        }
        answer
    }
}
