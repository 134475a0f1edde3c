//! Compiles grammars, with bounds on size and work, and keeps the results for the next request with the same grammar.
//!
//! The bounds here are those that the compiler offers. They do not hold everywhere: intersections of expressions take time and memory that
//! none of its limits counts. So a client's grammar is compiled in a helper ([`crate::helper`]) first, and elsewhere only once its cost is
//! known from there.

use crate::{
    helper,
    matcher::{Allowance, MatchError, Matcher},
    numbers,
    schema::{self, Prepared, SchemaError, Terms},
    vocabulary::Vocabulary,
    wording,
};
use llguidance::{
    ParserFactory,
    api::{GrammarInit, ParserLimits, StopReason, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::InferenceCapabilities,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::VecDeque, fmt, sync::Arc, thread};
use tidemill_proto::{block::Token, grammar::Grammar};

/// The most bytes of a grammar. Larger public schemas are rare, and no answer needs them.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// The most texts of which an answer may be one: each begins a row of its own in the parser, which takes 2,000.
pub const CHOICES_MAX: usize = 1900;
/// The most bytes of a schema's parts: one grammar of parts, and the whole beside it.
const PARTS_BYTES_MAX: usize = 2 * GRAMMAR_BYTES_MAX;
/// The most compiled grammars that are kept.
const KEPT_MAX: usize = 64;
/// The most bytes of the kept grammars' texts, to which the compiled size is mostly proportional.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// The stack of compilation, which recurses, as do its parsers: enough for the deepest grammar of the largest size.
const STACK_BYTES: usize = 256 << 20;
/// The most characters of the compiler's message in an error.
const MESSAGE_MAX: usize = 500;
/// The most tokens of a trial: most ambiguous grammars are as slow by then as they will be, and an ordinary one takes a millisecond or two.
const TRIAL_TOKENS: usize = 32;
/// The most parts of a schema that are compiled separately to find the one at fault.
const TRIALS_MAX: usize = 200;
/// The most keywords and values of all these parts together.
const TRIED_MAX: usize = 1 << 18;

/// The limits on a grammar's cost. None depends on a clock: a grammar that is refused is refused everywhere.
fn limits() -> ParserLimits {
    ParserLimits {
        // A large public schema (FHIR's) takes half of this, 10 ms.
        initial_lexer_fuel: 1_000_000,
        max_grammar_size: 200_000,
        // Expressions take 35 ms of one mask at most. Almost all masks take 1/100,000 of it. Items can take far longer, as the time is
        // not proportional to their number: see `try_out`.
        step_lexer_fuel: 500_000,
        step_max_items: 100_000,
        // Each takes one or two kilobytes, for each sequence.
        max_lexer_states: 30_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// The reason why a grammar is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GrammarError {
    #[error("it has {bytes} bytes, and {GRAMMAR_BYTES_MAX} is the most")]
    TooLarge { bytes: usize },
    #[error(transparent)]
    Schema(#[from] SchemaError),
    #[error("{0}")]
    Invalid(String),
    /// Returned by the caller of the helper, which was ended before it could answer.
    #[error(
        "it takes more than {} s of computing, or {} MiB of memory, to be compiled and tried out: make it smaller, with fewer expressions \
         for one text (`pattern` in `allOf`) and fewer options",
        helper::CPU_S,
        helper::MEMORY_BYTES >> 20
    )]
    TooMuchWork,
    /// The trial of a grammar that compiles took too long.
    #[error("it would take too long at each token of an answer: {0}")]
    Slow(String),
}

/// Refuses a text that is too large, before it is parsed.
pub fn check_size(bytes: usize) -> Result<(), GrammarError> {
    if bytes > GRAMMAR_BYTES_MAX { Err(GrammarError::TooLarge { bytes }) } else { Ok(()) }
}

impl GrammarError {
    /// The place in the schema, if it is known: `.properties.tags.items`.
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::Schema(error) => Some(&error.path),
            Self::TooLarge { .. } | Self::Invalid(_) | Self::TooMuchWork | Self::Slow(_) => None,
        }
    }
}

/// A grammar ready for use; the prototype itself is never advanced.
pub struct Compiled {
    prototype: Mutex<llguidance::Matcher>,
    pub(crate) width: usize,
}

impl Compiled {
    /// A copy that shares no mutable state.
    pub(crate) fn fresh(&self) -> llguidance::Matcher {
        self.prototype.lock().deep_clone()
    }

    /// Follows the grammar for the first tokens of an answer, chosen at random but always the same, and refuses it if that takes too long.
    /// Any other error is that of these tokens alone.
    pub(crate) fn try_out(&self) -> Result<(), GrammarError> {
        let mut matcher = Matcher::within(Allowance::TRIAL, self, &[], false);
        let mut random = 7_u64;
        for _ in 0..TRIAL_TOKENS {
            let allowed: Vec<Token> = match matcher.mask() {
                Ok(mask) => mask.tokens().collect(),
                Err(slow @ MatchError::TooSlow { .. }) => return Err(GrammarError::Slow(slow.to_string())),
                Err(_) => return Ok(()),
            };
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let token = allowed[(random >> 33) as usize % allowed.len()];
            if matcher.advance(token).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").field("width", &self.width).finish_non_exhaustive()
    }
}

/// Compiles grammars for one model.
pub struct Compiler {
    factory: ParserFactory,
    width: usize,
    /// The kept grammars, the last used first.
    kept: Mutex<VecDeque<(Grammar, Arc<Compiled>)>>,
}

impl Compiler {
    pub fn new(vocabulary: &Vocabulary) -> Self {
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&vocabulary.env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.expect("the slices are expressions that compile");
        factory.quiet();
        *factory.limits_mut() = limits();
        Self { factory, width: vocabulary.width(), kept: Mutex::default() }
    }

    /// Compiles a grammar, unless it was compiled before. This takes milliseconds, or up to a second for the worst grammar allowed.
    pub fn compile(&self, grammar: &Grammar) -> Result<Arc<Compiled>, GrammarError> {
        if let Some(compiled) = self.kept(grammar) {
            return Ok(compiled);
        }
        check_size(grammar.text().len())?;
        let compiled = Arc::new(on_deep_stack(|| self.compile_anew(grammar))?);
        self.keep(grammar, &compiled);
        Ok(compiled)
    }

    /// Compiles on the caller's stack, without keeping the result.
    pub(crate) fn compile_anew(&self, grammar: &Grammar) -> Result<Compiled, GrammarError> {
        let input = match grammar {
            Grammar::JsonSchema(text) => {
                let schema = serde_json::from_str(text).map_err(|error| GrammarError::Invalid(format!("it is not JSON: {error}")))?;
                TopLevelGrammar::from_json_schema(schema)
            }
            Grammar::Regex(text) => TopLevelGrammar::from_regex(whole(text)),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
        };
        let refused = |error: String| {
            let message = message(&error);
            let is_schema = matches!(grammar, Grammar::JsonSchema(_));
            GrammarError::Invalid(if is_schema { wording::of_schema(&message) } else { message })
        };
        let input = match grammar {
            Grammar::Regex(_) => GrammarInit::Serialized(input),
            Grammar::JsonSchema(_) | Grammar::Lark(_) => {
                numbers::bounded(input, Some(self.factory.tok_env().clone()), limits()).map_err(refused)?
            }
        };
        let matcher = llguidance::Matcher::new(self.factory.create_parser_from_init_default(input));
        if let Some(error) = matcher.get_error() {
            return Err(refused(error));
        }
        // Most grammars that would fail later fail here: those without any text, and those whose first lexeme is too complex.
        let mut trial = matcher.deep_clone();
        match trial.stop_reason() {
            StopReason::NotStopped => {
                trial.compute_mask().map_err(|error| GrammarError::Invalid(first_mask(&error.to_string())))?;
            }
            // Nothing may follow but the end, so the answer is an empty text.
            StopReason::EndOfSentence | StopReason::NoExtension | StopReason::NoExtensionBias => {}
            failed => return Err(GrammarError::Invalid(failed.to_string())),
        }
        Ok(Compiled { prototype: Mutex::new(matcher), width: self.width })
    }

    fn kept(&self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|(known, _)| known == grammar)?;
        let entry = kept.remove(at)?;
        let compiled = Arc::clone(&entry.1);
        kept.push_front(entry);
        Some(compiled)
    }

    fn keep(&self, grammar: &Grammar, compiled: &Arc<Compiled>) {
        let mut kept = self.kept.lock();
        kept.push_front((grammar.clone(), Arc::clone(compiled)));
        let mut bytes = 0;
        let fitting = kept.iter().take_while(|(grammar, _)| {
            bytes += grammar.text().len();
            bytes <= KEPT_BYTES_MAX
        });
        let fitting = fitting.count().min(KEPT_MAX);
        kept.truncate(fitting);
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("width", &self.width).finish_non_exhaustive()
    }
}

/// A client's schema as a grammar. The error names the part at fault.
pub fn json_schema(schema: &Value, terms: impl Into<Terms>) -> Result<Grammar, GrammarError> {
    check_size(schema.to_string().len())?;
    let terms = terms.into();
    on_deep_stack(|| json_schema_here(schema, terms, None))
}

/// As [`json_schema`], on the caller's stack, for a schema that is not too large. With a `compiler`, also compiles for that vocabulary, and
/// tries the result out.
pub(crate) fn json_schema_here(schema: &Value, terms: Terms, compiler: Option<&Compiler>) -> Result<Grammar, GrammarError> {
    let prepared = schema::prepare(schema, terms)?;
    let grammar = Grammar::JsonSchema(text(&prepared)?.into());
    let compiled = compiler.map(|compiler| compiler.compile_anew(&grammar));
    if let Some(Ok(compiled)) = compiled {
        return compiled.try_out().map(|()| grammar);
    }
    match try_schema(prepared.document().clone()) {
        Err(problem) => Err(fault(&prepared, problem).into()),
        Ok(()) => compiled.map_or(Ok(()), |compiled| compiled.map(drop)).map(|()| grammar),
    }
}

/// Parts of a client's schema as schemas of their own: those at the places of a list all apply to one value. The error names the part at
/// fault by its place in the whole.
pub fn json_schema_parts(schema: &Value, parts: &[Vec<String>], terms: Terms) -> Result<Vec<String>, GrammarError> {
    check_size(schema.to_string().len())?;
    on_deep_stack(|| json_schema_parts_here(schema, parts, terms))
}

/// As [`json_schema_parts`], on the caller's stack, for a schema that is not too large.
pub(crate) fn json_schema_parts_here(schema: &Value, parts: &[Vec<String>], terms: Terms) -> Result<Vec<String>, GrammarError> {
    let (mut texts, mut bytes) = (Vec::new(), 0);
    for places in parts {
        let prepared = schema::prepare_part(schema, places, terms)?;
        let text = text(&prepared)?;
        bytes += text.len();
        // The parts come with all that they refer to.
        if bytes > PARTS_BYTES_MAX {
            return Err(GrammarError::TooLarge { bytes });
        }
        try_schema(prepared.document().clone()).map_err(|problem| fault(&prepared, problem))?;
        texts.push(text);
    }
    Ok(texts)
}

/// The text of a rewritten schema, unless it is too large.
fn text(prepared: &Prepared) -> Result<String, GrammarError> {
    let text = prepared.document().to_string();
    check_size(text.len())?;
    Ok(text)
}

/// Checks that a schema compiles by itself, without a vocabulary.
fn try_schema(schema: Value) -> Result<(), String> {
    numbers::check(TopLevelGrammar::from_json_schema(schema), limits()).map_err(|error| message(&error))
}

/// Whether no value matches a schema, as far as the compiler can tell.
pub(crate) fn is_unsatisfiable(schema: Value) -> bool {
    try_schema(schema).is_err_and(|problem| wording::is_unsatisfiable(&problem))
}

/// The smallest part of a schema that fails like the whole, as far as some trials can tell. Parts are tried one at a time.
fn fault(prepared: &Prepared, problem: String) -> SchemaError {
    let mut found = SchemaError { path: String::new(), problem };
    let mut left = TRIED_MAX;
    let mut parts = prepared.parts("");
    for _ in 0..TRIALS_MAX {
        let Some(place) = parts.pop() else { break };
        let (part, size) = prepared.alone(&place);
        let Some(rest) = left.checked_sub(size) else { break };
        left = rest;
        if part.is_boolean() {
            continue;
        }
        // An option that no value matches is no fault, unless the whole schema has none.
        if let Err(problem) = try_schema(part)
            && wording::is_unsatisfiable(&problem) == wording::is_unsatisfiable(&found.problem)
        {
            found = SchemaError { path: prepared.path(&place), problem };
            parts = prepared.parts(&place);
        }
    }
    found.problem = wording::of_schema(&found.problem);
    found
}

/// The expression without redundant anchors: an expression matches the whole text, with or without them.
pub(crate) fn whole(expression: &str) -> &str {
    let rest = expression.strip_prefix('^').unwrap_or(expression);
    match rest.strip_suffix('$') {
        Some(inner) if inner.chars().rev().take_while(|&c| c == '\\').count() % 2 == 0 && !has_top_level_choice(inner) => inner,
        _ if has_top_level_choice(rest) => expression,
        _ => rest,
    }
}

/// Whether an expression has alternatives at its top level: `^a|b$` is not `a|b`, as each anchor belongs to one alternative.
pub(crate) fn has_top_level_choice(expression: &str) -> bool {
    let (mut depth, mut in_class, mut escaped) = (0i32, false, false);
    for c in expression.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => in_class = false,
            _ if in_class => {}
            '[' => in_class = true,
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 0 => return true,
            _ => {}
        }
    }
    false
}

fn message(error: &str) -> String {
    let end = error.find("<non-verbose/>").or_else(|| error.find("<backtrace>")).unwrap_or(error.len());
    let message: String = error[..end].trim().chars().take(MESSAGE_MAX).collect();
    if message.is_empty() { "it does not compile".to_owned() } else { message }
}

fn first_mask(error: &str) -> String {
    let message = message(error);
    if message == StopReason::NoExtensionBias.to_string() { "no text follows it".to_owned() } else { message }
}

/// Runs `work` with a stack for deep recursion. The caller waits, so this adds no parallel work.
fn on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        match thread.expect("the system has room for a thread").join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
