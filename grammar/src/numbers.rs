//! Bounds on the digits of JSON's numbers. The compiler's own numbers have no end, and models are known to get lost in endless digits as they
//! do in endless white space.
//!
//! The bounds apply to lexemes: each lexeme of a JSON schema that may be a number is intersected with the numbers that have few digits.
//! Every number of a grammar is read by such a lexeme, wherever its schema comes from. A client's own expressions are left as they are.

use crate::schema::WHITESPACE;
use llguidance::{
    api::{GrammarInit, ParserLimits, SkipSpec, TopLevelGrammar},
    derivre::{
        ExprRef, RegexAst,
        raw::{DerivCache, RelevanceCache},
    },
    earley::lexerspec::{LexemeSpec, LexerSpec},
    panic_utils::catch_unwind,
};
use std::panic::AssertUnwindSafe;
use toktrie::TokEnv;

/// The most digits before the point: all integers of 128 bits.
pub const INTEGER_DIGITS_MAX: usize = 40;
/// The most digits after the point: all floating-point numbers of 64 bits from 10^-23 on, without an exponent.
pub const FRACTION_DIGITS_MAX: usize = 40;
/// The most digits of an exponent: all floating-point numbers of 64 bits in their shortest form.
pub const EXPONENT_DIGITS_MAX: usize = 3;
/// The first characters of numbers.
const BEGINNINGS: &[u8] = b"-0123456789";
/// The compiler's white space for schemas that name none: those within a client's own grammar.
const WHITESPACE_OF_OTHERS: &str = r"[\x20\x0A\x0D\x09]+";
/// The work of finding out whether any number is left. It takes a few hundred units for bounds of any size.
const FUEL: u64 = 100_000;

/// A grammar in the compiler's form, with bounded numbers. The error is the compiler's message, or this crate's own.
pub(crate) fn bounded(input: TopLevelGrammar, tokens: Option<TokEnv>, limits: ParserLimits) -> Result<GrammarInit, String> {
    let internal = catch_unwind(AssertUnwindSafe(|| GrammarInit::Serialized(input).to_internal(tokens, limits)));
    let (grammar, mut lexer) = internal.map_err(|error| error.to_string())?;
    bound(&mut lexer)?;
    Ok(GrammarInit::Internal(grammar, lexer))
}

/// As [`bounded`], to see whether a grammar is accepted at all.
pub(crate) fn check(input: TopLevelGrammar, limits: ParserLimits) -> Result<(), String> {
    bounded(input, None, limits).map(drop)
}

fn bound(lexer: &mut LexerSpec) -> Result<(), String> {
    let numeric = numeric(lexer);
    if numeric.is_empty() {
        return Ok(());
    }
    let number = number();
    let any_other = RegexAst::Concat(vec![RegexAst::ByteSet(other_beginnings()), RegexAst::ExprRef(ExprRef::ANY_BYTE_STRING)]);
    let few_digits = RegexAst::Or(vec![RegexAst::Regex(number.clone()), any_other]);
    let mut make = |ast: RegexAst| lexer.regex_builder.mk(&ast).map_err(|error| error.to_string());
    let (number, few_digits) = (make(RegexAst::Regex(number))?, make(few_digits)?);
    let mut replaced = Vec::new();
    for (place, expression) in numeric {
        let with = |other| RegexAst::And(vec![RegexAst::ExprRef(expression), RegexAst::ExprRef(other)]);
        replaced.push((place, make(with(few_digits))?, make(with(number))?));
    }
    // A number that no longer exists would lead an answer to where no token is allowed.
    let mut expressions = lexer.regex_builder.exprset().clone();
    let mut relevance = RelevanceCache::new();
    if replaced.iter().any(|&(.., numbers)| !relevance.is_non_empty_limited(&mut expressions, numbers, FUEL).unwrap_or(true)) {
        return Err(format!(
            "each of its numbers would have more than {INTEGER_DIGITS_MAX} digits before its point, or {FRACTION_DIGITS_MAX} after it"
        ));
    }
    replace(lexer, replaced.into_iter().map(|(place, bounded, _)| (place, bounded)))
}

/// The lexemes of schemas that may be numbers, and their expressions.
fn numeric(lexer: &LexerSpec) -> Vec<(usize, ExprRef)> {
    let classes = classes(lexer);
    let mut expressions = lexer.regex_builder.exprset().clone();
    let mut derivatives = DerivCache::new();
    let lexemes = lexer.lexemes.iter().enumerate().filter(|(_, lexeme)| classes.contains(&lexeme.class().as_usize()));
    let lexemes = lexemes.filter_map(|(place, lexeme)| Some((place, expression(lexeme)?)));
    let may_be_number = |&(_, expression): &(usize, ExprRef)| {
        BEGINNINGS.iter().any(|&byte| derivatives.derivative(&mut expressions, expression, byte) != ExprRef::NO_MATCH)
    };
    lexemes.filter(may_be_number).collect()
}

/// The classes of lexemes that belong to schemas: a schema's white space tells its class from others.
fn classes(lexer: &LexerSpec) -> Vec<usize> {
    let mut lexer = lexer.clone();
    // With these, the compiler would not look for a class that exists.
    (lexer.has_max_tokens, lexer.has_temperature) = (false, false);
    let existing = lexer.skip_by_class.len();
    let layouts = [RegexAst::Regex(WHITESPACE.into()), RegexAst::Regex(WHITESPACE_OF_OTHERS.into()), RegexAst::NoMatch];
    let classes = layouts.into_iter().filter_map(|layout| lexer.setup_lexeme_class_with_skip(SkipSpec::once(layout)).ok());
    classes.map(|class| class.as_usize()).filter(|class| *class < existing).collect()
}

/// The expression of a schema's lexeme. The compiler shows it in a lexeme's description only: `[3] [3]  (ExprRef 17)`.
fn expression(lexeme: &LexemeSpec) -> Option<ExprRef> {
    let description = lexeme.to_string(usize::MAX, None);
    let (_, number) = description.strip_suffix(')')?.rsplit_once("(ExprRef ")?;
    number.trim().parse().ok().map(ExprRef::new)
}

/// Replaces the expressions of lexemes. `replaced` is in the lexemes' order.
fn replace(lexer: &mut LexerSpec, replaced: impl Iterator<Item = (usize, ExprRef)>) -> Result<(), String> {
    let Some(&white_space) = lexer.skip_by_class.first() else { return Ok(()) };
    // The compiler numbers a new lexeme by those before it, so it is made behind as many others as its place has: white space, which no
    // other lexeme is equal to.
    let other = lexer.lexemes[white_space.as_usize()].clone();
    let mut others = Vec::new();
    for (place, expression) in replaced {
        others.resize(place, other.clone());
        let (class, most) = (lexer.lexemes[place].class(), lexer.lexemes[place].max_tokens());
        std::mem::swap(&mut lexer.lexemes, &mut others);
        lexer.current_class = class;
        let made = lexer.add_greedy_lexeme(String::new(), RegexAst::ExprRef(expression), false, None, most);
        let lexeme = lexer.lexemes.pop();
        std::mem::swap(&mut lexer.lexemes, &mut others);
        made.map_err(|error| error.to_string())?;
        lexer.lexemes[place] = lexeme.expect("a lexeme was added");
    }
    Ok(())
}

/// All numbers of JSON with few digits, as an expression.
fn number() -> String {
    format!(r"-?[0-9]{{1,{INTEGER_DIGITS_MAX}}}(\.[0-9]{{1,{FRACTION_DIGITS_MAX}}})?([eE][+-]?[0-9]{{1,{EXPONENT_DIGITS_MAX}}})?")
}

/// The terminal, in llguidance's Lark, for a number of JSON.
pub(crate) fn number_terminal() -> String {
    let integer = integer();
    format!(r"/{integer}(\.[0-9]{{1,{FRACTION_DIGITS_MAX}}})?([eE][+-]?[0-9]{{1,{EXPONENT_DIGITS_MAX}}})?/")
}

/// The terminal, in llguidance's Lark, for an integer of JSON.
pub(crate) fn integer_terminal() -> String {
    format!("/{}/", integer())
}

fn integer() -> String {
    format!("-?(0|[1-9][0-9]{{0,{}}})", INTEGER_DIGITS_MAX - 1)
}

/// The set of bytes with which no number begins.
fn other_beginnings() -> Vec<u32> {
    let mut bytes = vec![u32::MAX; 8];
    for &byte in BEGINNINGS {
        bytes[usize::from(byte) / 32] &= !(1 << (byte % 32));
    }
    bytes
}
