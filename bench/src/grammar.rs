//! `tidemill-bench grammar`: the cost of constrained decoding. Random walks through grammars, with each step timed: advancing by the token,
//! and the mask of the next one.

use crate::{model::tokenizer, record};
use anyhow::{Context, anyhow};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde::Serialize;
use serde_json::json;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};
use tidemill_grammar::{Compiler, Matcher, Vocabulary, compiler::json_schema, gbnf, schema::Whitespace};
use tidemill_proto::{
    block::Token,
    grammar::{Constraint, Grammar},
};
use tokenizers::Tokenizer;

/// Time masks of constrained decoding at given vocabulary sizes.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct GrammarArgs {
    /// Vocabulary sizes.
    #[arg(long, value_delimiter = ',', default_values_t = [32_000, 128_256])]
    pub vocab: Vec<usize>,
    /// Tokens drawn under each grammar, over as many answers as necessary.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Tokens after which an answer is abandoned for the next.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub answer_len: u32,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write settings and results to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The result of one grammar at one vocabulary size.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub vocab: usize,
    pub grammar: &'static str,
    /// The time of the first compilation; later requests find the grammar compiled.
    pub compile_ms: f64,
    /// The time before a sequence's first token: a copy of the compiled grammar, and its first mask.
    pub begin_us: f64,
    pub step_p50_us: f64,
    pub step_p99_us: f64,
    pub step_max_us: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    settings: &'a GrammarArgs,
    rows: &'a [Row],
}

pub fn run(args: &GrammarArgs) -> anyhow::Result<()> {
    println!(
        "{:>8}  {:<16}  {:>10}  {:>9}  {:>8}  {:>8}  {:>8}",
        "vocab", "grammar", "compile ms", "begin µs", "p50 µs", "p99 µs", "max µs"
    );
    let mut rows = Vec::new();
    for &vocab in &args.vocab {
        let tokenizer = Tokenizer::from_bytes(tokenizer::train(vocab)?).map_err(|error| anyhow!("{error}"))?;
        let started = Instant::now();
        let compiler = Compiler::new(&Vocabulary::new(&tokenizer, vocab));
        let ready = started.elapsed();
        let first = rows.len();
        for (name, grammar) in grammars()? {
            let row = measure(args, vocab, &compiler, name, grammar).with_context(|| name)?;
            println!(
                "{:>8}  {:<16}  {:>10.1}  {:>9.0}  {:>8.0}  {:>8.0}  {:>8.0}",
                row.vocab, row.grammar, row.compile_ms, row.begin_us, row.step_p50_us, row.step_p99_us, row.step_max_us
            );
            rows.push(row);
        }
        let worst = |of: fn(&Row) -> f64| rows[first..].iter().map(of).fold(0.0, f64::max);
        println!("{vocab:>8}  trie in {:.0} ms; worst p99 {:.0} µs\n", ready.as_secs_f64() * 1e3, worst(|row| row.step_p99_us));
    }
    record::write(args.json.as_ref(), "grammar", &Report { settings: args, rows: &rows })
}

/// The constraints that clients ask for, from the cheapest to the most expensive.
fn grammars() -> anyhow::Result<Vec<(&'static str, Grammar)>> {
    let person = json!({
        "type": "object", "required": ["name", "age", "email"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": {"type": "string", "format": "email"},
            "role": {"enum": ["reader", "writer", "owner"]},
        },
    });
    let tree = json!({
        "$ref": "#/$defs/node",
        "$defs": {"node": {
            "type": "object", "required": ["value"], "additionalProperties": false,
            "properties": {"value": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        }},
    });
    let wide: serde_json::Map<_, _> = (0..60).map(|i| (format!("field_{i}"), json!({"type": ["string", "number", "null"]}))).collect();
    let wide = json!({"type": "object", "properties": wide, "additionalProperties": false});
    let bounded = json!({"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 500, "pattern": "^[a-z0-9 ,.-]*$"}});
    let lines = "root ::= line+\nline ::= [a-z]+ \" = \" ([1-9] [0-9]* | \"\\\"\" [^\"\\n]* \"\\\"\") \"\\n\"";
    let schema = |schema| json_schema(&schema, Whitespace::default());
    Ok(vec![
        ("choice", tidemill_grammar::lark::choice(&["positive", "negative", "neutral"])),
        ("expression", Grammar::Regex(r"\d{4}-\d{2}-\d{2}( [a-z]+)*".into())),
        ("schema", schema(person.clone())?),
        ("list of schemas", schema(json!({"type": "array", "items": person}))?),
        ("recursive", schema(tree)?),
        ("60 optional", schema(wide)?),
        ("bounded strings", schema(bounded)?),
        ("any JSON", schema(json!({"type": "object"}))?),
        ("GBNF lines", Grammar::Lark(gbnf::to_lark(lines)?.into())),
    ])
}

fn measure(args: &GrammarArgs, vocab: usize, compiler: &Compiler, name: &'static str, grammar: Grammar) -> anyhow::Result<Row> {
    let started = Instant::now();
    let compiled = compiler.compile(&grammar)?;
    let compile = started.elapsed();
    let constraint = Constraint { grammar, end_tokens: vec![tokenizer::END_OF_TURN], ends_late: true };
    let mut rng = SmallRng::seed_from_u64(args.seed);
    let (mut steps, mut begins) = (Vec::new(), Vec::new());
    while steps.len() < args.tokens as usize {
        let started = Instant::now();
        let mut matcher = Matcher::new(&compiled, &constraint, &[])?;
        let mut mask = matcher.mask()?;
        begins.push(started.elapsed());
        for _ in 0..args.answer_len {
            let allowed: Vec<Token> = mask.tokens().collect();
            let token = allowed[rng.random_range(0..allowed.len())];
            if constraint.end_tokens.contains(&token) {
                break;
            }
            let started = Instant::now();
            matcher.advance(token)?;
            mask = matcher.mask()?;
            steps.push(started.elapsed());
        }
    }
    steps.sort_unstable();
    begins.sort_unstable();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let at = |times: &[Duration], share: f64| micros(times[((times.len() - 1) as f64 * share) as usize]);
    Ok(Row {
        vocab,
        grammar: name,
        compile_ms: micros(compile) / 1e3,
        begin_us: at(&begins, 0.5),
        step_p50_us: at(&steps, 0.5),
        step_p99_us: at(&steps, 0.99),
        step_max_us: at(&steps, 1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_grammar_is_walked_through() {
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("grammar.json");
        run(&GrammarArgs { vocab: vec![2000], tokens: 30, answer_len: 20, seed: 1, json: Some(json.clone()) }).unwrap();
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert_eq!(report["result"]["rows"].as_array().unwrap().len(), grammars().unwrap().len());
    }
}
