//! Schemas, expressions and grammars: the helper compiles or refuses each within its limits. Accepted ones are also compiled here, as in a
//! worker, and followed for some tokens.

use super::tree;
use crate::{
    dice::Dice,
    mutate::{json, text},
    target::{Subject, Target},
};
use serde_json::{Map, Value, json};
use std::time::Duration;
use tidemill_gateway::text::TextModel;
use tidemill_grammar::{
    Compiler, GrammarError, MatchError, Matcher, Vocabulary, gbnf,
    helper::{
        CPU_S, MEMORY_BYTES, Model, Question,
        handle::{AskError, Handle},
    },
    schema::{Terms, Whitespace},
};
use tidemill_proto::grammar::{Constraint, Grammar};

pub(crate) const SCHEMAS: Target = Target {
    name: "schemas",
    about: "JSON schemas of clients, through the helper that judges them, and what has passed in a worker",
    open: || open(|dice| Question::Schema { schema: schema_text(dice), terms: terms(dice), model: 0 }),
    cpu_max: CPU_MAX,
    bytes_max: BYTES_MAX,
    short: 150,
};

pub(crate) const EXPRESSIONS: Target = Target {
    name: "expressions",
    about: "regular expressions of clients, in the same way",
    open: || open(|dice| Question::Grammar { grammar: Grammar::Regex(expression(dice).into()), model: 0 }),
    cpu_max: CPU_MAX,
    bytes_max: BYTES_MAX,
    short: 150,
};

pub(crate) const GRAMMARS: Target = Target {
    name: "grammars",
    about: "Lark and GBNF grammars of clients, in the same way",
    open: || open(|dice| Question::Grammar { grammar: Grammar::Lark(grammar(dice).into()), model: 0 }),
    cpu_max: CPU_MAX,
    bytes_max: BYTES_MAX,
    short: 150,
};

/// The CPU time of a case: grammars that the helper accepts are also compiled here, which takes at most a second, and then followed.
const CPU_MAX: Duration = Duration::from_secs(5);
const BYTES_MAX: usize = 2 * MEMORY_BYTES;
/// The most tokens for which a grammar is followed.
const TOKENS: usize = 40;

fn open(ask: fn(&mut Dice) -> Question) -> anyhow::Result<Box<dyn Subject>> {
    let dir = tree::path("model/tests/fixtures/llama3");
    let (tokenizer, width) = (dir.join("tokenizer.json"), TextModel::load(&dir)?.config.identity.vocab_size as usize);
    let compiler = Compiler::new(&Vocabulary::load(&tokenizer, width)?);
    let helper = Handle::start(std::env::current_exe()?, vec![Model { tokenizer, width }])?;
    Ok(Box::new(move |dice: &mut Dice| {
        let question = ask(dice);
        dice.show("question", format!("{question:?}").as_bytes());
        let mut session = match helper.session() {
            Ok(session) => session,
            Err(error) => return Err(format!("there is no helper: {error}")),
        };
        let answer = session.ask(&question);
        if session.cpu() > Duration::from_millis(1000 * CPU_S + 300) {
            return Err(format!("it took {:?}", session.cpu()));
        }
        let passed = match (answer, &question) {
            (Ok(text), Question::Schema { .. }) => Grammar::JsonSchema(text.into()),
            (Ok(_), Question::Parts { .. }) => return Ok(()),
            (Ok(_), Question::Grammar { grammar, .. }) => grammar.clone(),
            (Err(AskError::Refused(GrammarError::Invalid(problem))), _) if problem.contains("report this") => return Err(problem),
            (Err(AskError::Refused(_)), _) => return Ok(()),
            // The machine was too busy.
            (Err(AskError::Unavailable(error)), _) if error.kind() == std::io::ErrorKind::TimedOut => return Ok(()),
            (Err(AskError::Unavailable(error)), _) => return Err(format!("there is no answer: {error}")),
        };
        follow(&compiler, passed, dice)
    }))
}

fn follow(compiler: &Compiler, grammar: Grammar, dice: &mut Dice) -> Result<(), String> {
    let compiled = compiler.compile(&grammar).map_err(|error| format!("what has passed does not compile in a worker: {error}"))?;
    let constraint = Constraint { grammar, end_tokens: vec![1], ends_late: dice.one_in(2) };
    let Ok(mut matcher) = Matcher::new(&compiled, &constraint, &[]) else { return Ok(()) };
    for _ in 0..TOKENS {
        // A grammar may reach a state in which nothing is allowed, or in which a mask is too complex: the sequence then ends with an error.
        let Ok(mask) = matcher.mask() else { return Ok(()) };
        let allowed: Vec<u32> = mask.tokens().collect();
        if allowed.is_empty() {
            return Err("a mask allows nothing".into());
        }
        let token = *dice.pick(&allowed);
        if constraint.end_tokens.contains(&token) {
            return Ok(());
        }
        match matcher.advance(token) {
            Ok(()) => {}
            Err(MatchError::TooComplex(_)) => return Ok(()),
            Err(error) => return Err(format!("the mask allowed token {token}: {error}")),
        }
    }
    Ok(())
}

fn terms(dice: &mut Dice) -> Terms {
    Terms { whitespace: *dice.pick(&[Whitespace::Some, Whitespace::None]), strict: dice.one_in(2) }
}

fn schema_text(dice: &mut Dice) -> String {
    let mut tree = if dice.one_in(3) { serde_json::from_str(dice.pick::<&str>(SCHEMA_SEEDS)).unwrap_or_default() } else { schema(dice, 0) };
    if dice.one_in(2)
        && let Value::Object(fields) = &mut tree
    {
        let defs = (0..dice.below(5)).map(|i| (DEFINED[i % DEFINED.len()].to_owned(), schema(dice, 1)));
        fields.insert("$defs".into(), Value::Object(defs.collect::<Vec<_>>().into_iter().collect()));
    }
    if dice.one_in(2) {
        let keys: Vec<String> = KEYWORDS.iter().map(|&key| key.to_owned()).collect();
        json::mutate(dice, &mut tree, &keys);
    }
    let text = json::text(dice, &tree);
    // As in a question, the text is JSON that was parsed from a body and serialized again.
    serde_json::from_str::<Value>(&text).unwrap_or(tree).to_string()
}

const DEFINED: &[&str] = &["x", "y", "z"];

fn schema(dice: &mut Dice, depth: usize) -> Value {
    if depth > 5 || dice.one_in(12) {
        return dice.pick(&[json!(true), json!({}), json!(false), json!({"type": "string"}), json!({"$ref": "#/$defs/x"})]).clone();
    }
    let mut fields = Map::new();
    if !dice.one_in(4) {
        fields.insert(
            "type".into(),
            dice.pick(&[
                json!("object"),
                json!("object"),
                json!("array"),
                json!("string"),
                json!("number"),
                json!("integer"),
                json!("null"),
                json!(["string", "null"]),
            ])
            .clone(),
        );
    }
    for _ in 0..dice.few(7) {
        let key = *dice.pick(KEYWORDS);
        let several = |dice: &mut Dice, depth| Value::from((0..dice.few(6)).map(|_| schema(dice, depth + 1)).collect::<Vec<_>>());
        let named = |dice: &mut Dice, depth| {
            let names: Vec<String> = (0..dice.few(6)).map(|i| if dice.one_in(5) { dice.odd_text() } else { format!("p{i}") }).collect();
            Value::Object(names.into_iter().map(|name| (name, schema(dice, depth + 1))).collect())
        };
        let value = match key {
            "properties" | "patternProperties" | "dependentSchemas" | "definitions" | "$defs" => named(dice, depth),
            "allOf" | "anyOf" | "oneOf" | "prefixItems" => {
                let one = several(dice, depth);
                // Repeats the same items several times.
                match (dice.one_in(5), one) {
                    (true, Value::Array(items)) => Value::Array(items.iter().cycle().take(items.len() * dice.few(12)).cloned().collect()),
                    (_, one) => one,
                }
            }
            "items" | "additionalProperties" | "not" | "if" | "then" | "else" | "contains" | "propertyNames" | "unevaluatedProperties" => {
                schema(dice, depth + 1)
            }
            "required" => json!((0..dice.few(6)).map(|i| format!("p{i}")).collect::<Vec<_>>()),
            "enum" => {
                let most = if dice.one_in(20) { 3000 } else { 12 };
                Value::from((0..dice.few(most)).map(|_| json::value(dice, 2)).collect::<Vec<_>>())
            }
            "const" | "default" => json::value(dice, 1),
            "pattern" => Value::from(expression(dice)),
            "format" => json!(dice.pick(&["date", "date-time", "uuid", "ipv4", "ipv6", "email", "uri", "hostname", "duration", "x"])),
            "$ref" => json!(dice.pick(&["#", "#/$defs/x", "#/$defs/y", "#/$defs/z", "#/properties/p0", "http://example.com/x", "#x"])),
            "uniqueItems" => json!(dice.one_in(2)),
            _ if dice.one_in(3) => json!(dice.integer() as i64),
            _ => json!(dice.below(12)),
        };
        fields.insert(key.into(), value);
    }
    Value::Object(fields)
}

const KEYWORDS: &[&str] = &[
    "properties",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentSchemas",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "allOf",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "enum",
    "const",
    "default",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "$ref",
    "$ref",
    "$defs",
    "definitions",
    "unevaluatedProperties",
];

const SCHEMA_SEEDS: &[&str] = &[
    r##"{"oneOf":[{"$ref":"#/$defs/x"},{"$ref":"#/$defs/x"}],"$defs":{"x":{"allOf":[{"$ref":"#/$defs/x"},{"$ref":"#/$defs/x"}]}}}"##,
    r#"{"allOf":[{"type":"string","pattern":".*10.*"},{"type":"string","pattern":".*11.*"},{"type":"string","pattern":".*12.*"}]}"#,
    r##"{"type":"object","properties":{"name":{"type":"string","maxLength":40},"tags":{"type":"array","items":{"enum":["a","b"]},"maxItems":5},"next":{"$ref":"#"}},"required":["name"],"additionalProperties":false}"##,
    r#"{"oneOf":[{"type":"object","properties":{"kind":{"const":"a"},"n":{"type":"integer","minimum":-5,"maximum":500}},"required":["kind"]},{"type":"object","properties":{"kind":{"const":"b"}},"required":["kind"]}]}"#,
    r#"{"type":"array","prefixItems":[{"type":"number","multipleOf":0.01},{"type":"string","format":"date-time"}],"items":false,"minItems":2}"#,
    r#"{"type":"object","patternProperties":{"^x-":{"type":"boolean"}},"minProperties":1,"additionalProperties":{"type":"number"}}"#,
];

fn expression(dice: &mut Dice) -> String {
    let made = piece(dice, 0);
    if dice.one_in(3) { text::mutate(dice, &made, EXPRESSION_WORDS) } else { made }
}

fn piece(dice: &mut Dice, depth: usize) -> String {
    if depth > 5 || dice.one_in(3) {
        return (*dice.pick(EXPRESSION_WORDS)).to_owned();
    }
    let one = piece(dice, depth + 1);
    let count = |dice: &mut Dice| *dice.pick(&[0usize, 1, 2, 3, 10, 100, 1000, 65_535, 100_000]);
    match dice.below(9) {
        0 => format!("({one})*"),
        1 => format!("({one})+"),
        2 => format!("(?:{one}){{{},{}}}", count(dice), count(dice)),
        3 => format!("({one}){{{}}}", count(dice)),
        4 => format!("({one}|{})", piece(dice, depth + 1)),
        5 => format!("({one})?"),
        6 => format!("(?i:{one})"),
        _ => format!("{one}{}", piece(dice, depth + 1)),
    }
}

const EXPRESSION_WORDS: &[&str] = &[
    ".*",
    ".",
    "a",
    "b",
    "[a-z]",
    "[^x]",
    "[\\s\\S]",
    "\\d",
    "\\w",
    "\\W",
    "\\p{L}",
    "\\p{Greek}",
    "[\\u0000-\\u{10ffff}]",
    "10",
    "11",
    "é",
    "𝔘",
    "$",
    "^",
    "\\b",
    "(?=a)",
    "(?!a)",
    "(?<=a)",
    "\\1",
    "{",
    "}",
    "{,5}",
    "{5,}",
    "*",
    "+?",
    "|",
    "(?P<n>a)",
    "(?s).",
    "[",
    "]",
    "[]",
    "[[:alpha:]]",
    "\\x41",
    "\\u0041",
    "\\",
    "&",
    "~(a)",
];

/// A grammar as clients send it. Text that looks like GBNF is first translated to Lark.
fn grammar(dice: &mut Dice) -> String {
    let seed = *dice.pick(GRAMMAR_SEEDS);
    let mut made = match dice.below(3) {
        0 => seed.to_owned(),
        1 => rules(dice, "::=", "root"),
        _ => rules(dice, ":", "start"),
    };
    if dice.one_in(2) {
        made = text::mutate(dice, &made, GRAMMAR_WORDS);
    }
    if gbnf::is_gbnf(&made) {
        return gbnf::to_lark(&made).unwrap_or(made);
    }
    made
}

fn rules(dice: &mut Dice, defines: &str, root: &str) -> String {
    let names = ["a", "b", "c", "d"];
    let rule = |dice: &mut Dice, name: &str| format!("{name} {defines} {}\n", right(dice, &names, 0));
    let mut made = rule(dice, root);
    for name in names {
        made += &rule(dice, name);
    }
    made
}

fn right(dice: &mut Dice, names: &[&str], depth: usize) -> String {
    if depth > 4 || dice.one_in(4) {
        return match dice.below(6) {
            0 => "\"x\"".into(),
            1 => "\"\"".into(),
            2 => "[a-z]".into(),
            3 => format!("/{}/", expression(dice).replace('/', "\\/")),
            _ => (*dice.pick(names)).to_owned(),
        };
    }
    let one = right(dice, names, depth + 1);
    match dice.below(8) {
        0 => format!("({one})*"),
        1 => format!("({one})+"),
        2 => format!("({one})?"),
        3 => format!("({one}){{{},{}}}", dice.below(5), *dice.pick(&[5, 50, 1000, 100_000])),
        4 => format!("{one} | {}", right(dice, names, depth + 1)),
        _ => format!("{one} {}", right(dice, names, depth + 1)),
    }
}

const GRAMMAR_WORDS: &[&str] = &[
    "start",
    "root",
    "::=",
    ":",
    "|",
    "a",
    "\"x\"",
    "/x/",
    "/.*/",
    "&",
    "~",
    "%json",
    "%json {}",
    "%lark",
    "%regex",
    "%ignore",
    "%import",
    "%llguidance",
    "{}",
    "<|eot_id|>",
    "<[5]>",
    "<[0-9]>",
    "[capture]",
    "[max_tokens=5]",
    "[stop=\"x\"]",
    "[lazy]",
    "[suffix=\"\"]",
    "WS",
    "A",
    "->",
    "~5",
    "~0..100000",
    "{1000}",
    "[^\\n]",
    "\"\\u0000\"",
    "\"\\xff\"",
    "#",
    "//",
];

const GRAMMAR_SEEDS: &[&str] = &[
    "root ::= \"yes\" | list\nlist ::= [a-z]+ (\",\" list)?\n",
    "root ::= object\nvalue ::= object | array | string | \"true\"\nobject ::= \"{\" ws ( string \":\" ws value (\",\" ws string \":\" ws value)* )? \"}\" ws\narray ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\nstring ::= \"\\\"\" ( [^\"\\\\] | \"\\\\\" [\"\\\\/bfnrt] )* \"\\\"\" ws\nws ::= [ \\t\\n]{0,20}\n",
    "start: item (\",\" item)*\nitem: NAME \"=\" NUMBER\nNAME: /[a-z]+/\nNUMBER: /[0-9]+/\n%ignore /[ ]+/\n",
    "start: a\na: \"(\" a \")\" | a a | \"x\"\n",
    "start: A & B\nA: /.*1.*/\nB: /.*2.*/\n",
    "start: %json {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}}}\n",
];
