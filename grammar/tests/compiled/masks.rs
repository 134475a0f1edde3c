//! Whole grammars over a real tokenizer: random walks through their masks, checked by independent parsers.

use serde_json::{Value, json};
use std::path::Path;
use tidemill_grammar::{
    Compiler, GrammarError, MatchError, Matcher, Vocabulary, compiler::json_schema, gbnf, helper::Question, lark, schema::Whitespace,
};
use tidemill_proto::{
    block::Token,
    grammar::{Constraint, Grammar},
};
use tokenizers::Tokenizer;

const EOS: Token = 1;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama3/tokenizer.json")).unwrap()
}

struct World {
    tokenizer: Tokenizer,
    compiler: Compiler,
    numbers: u64,
}

impl World {
    fn new() -> Self {
        let tokenizer = tokenizer();
        let width = tokenizer.get_vocab_size(true) + 5;
        let compiler = Compiler::new(&Vocabulary::new(&tokenizer, width));
        Self { tokenizer, compiler, numbers: 7 }
    }

    fn constraint(grammar: &Grammar) -> Constraint {
        Constraint { grammar: grammar.clone(), end_tokens: vec![EOS], ends_late: false }
    }

    fn random(&mut self, below: usize) -> usize {
        self.numbers = self.numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.numbers >> 33) as usize % below
    }

    /// Draws tokens at random until the end; `None` if there is none within `most`.
    fn walk(&mut self, constraint: &Constraint, most: usize) -> Option<Vec<Token>> {
        let compiled = self.compiler.compile(&constraint.grammar).unwrap_or_else(|e| panic!("{:?}: {e}", constraint.grammar));
        let mut matcher = Matcher::new(&compiled, constraint, &[]).unwrap();
        let mut tokens = Vec::new();
        for _ in 0..most {
            let allowed: Vec<Token> = matcher.mask().unwrap().tokens().collect();
            let token = allowed[self.random(allowed.len())];
            matcher.advance(token).unwrap();
            if token == EOS {
                return Some(tokens);
            }
            tokens.push(token);
        }
        None
    }

    fn text(&self, tokens: &[Token]) -> String {
        self.tokenizer.decode(tokens, false).unwrap()
    }

    fn texts(&mut self, grammar: &Grammar, count: usize) -> Vec<String> {
        let walks: Vec<_> = (0..count).filter_map(|_| self.walk(&Self::constraint(grammar), 200)).collect();
        walks.iter().map(|tokens| self.text(tokens)).collect()
    }
}

#[test]
fn walks_through_a_schema_are_values_of_it() {
    let mut world = World::new();
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["kind", "n"],
        "properties": {
            "kind": {"enum": ["a", "bé", "\"q\""]}, "n": {"type": "integer", "minimum": -3, "maximum": 12},
            "list": {"type": "array", "maxItems": 2, "items": {"type": ["boolean", "null"]}},
        },
    });
    for whitespace in [Whitespace::Some, Whitespace::None] {
        let texts = world.texts(&json_schema(&schema, whitespace).unwrap(), 60);
        assert!(texts.len() > 30);
        for text in texts {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert!(["a", "bé", "\"q\""].contains(&value["kind"].as_str().unwrap_or_else(|| panic!("{text}"))), "{text}");
            assert!((-3.0..=12.0).contains(&value["n"].as_f64().unwrap()), "{text}");
            assert!(value.get("list").is_none_or(|list| list.as_array().unwrap().len() <= 2), "{text}");
            assert!(whitespace == Whitespace::Some || !text.contains([' ', '\n']), "{text}");
            assert_eq!(text.trim(), text, "nothing around it");
        }
    }
}

#[test]
fn expressions_choices_and_grammars_are_matched_whole() {
    let mut world = World::new();
    for (grammar, fits) in [
        (Grammar::Regex("[ab]{2,3}x?".into()), (|text: &str| text.starts_with(['a', 'b']) && text.len() <= 4) as fn(&str) -> bool),
        (Grammar::Regex(r"^(no|yes)\$?$".into()), |text| ["no", "yes", "no$", "yes$"].contains(&text)),
        (Grammar::Regex("^a|b$".into()), |text| ["a", "b"].contains(&text)),
        (lark::choice(&["one", "o\"n\u{7f}\n", "ü"]), |text| ["one", "o\"n\u{7f}\n", "ü"].contains(&text)),
        (Grammar::Lark(gbnf::to_lark("root ::= \"<\" [^<>]{0,3} \">\" | \"(\" root \")\"").unwrap().into()), |text| {
            let inner = text.trim_start_matches('(').trim_end_matches(')');
            inner.starts_with('<') && inner.ends_with('>') && inner.chars().count() <= 5
        }),
        (Grammar::Lark("start: \"say \" word\nword: /[a-c]{1,4}/".into()), |text| text.starts_with("say ")),
    ] {
        let texts = world.texts(&grammar, 40);
        assert!(texts.len() >= 20, "{grammar:?}");
        texts.iter().for_each(|text| assert!(fits(text), "{grammar:?}: {text:?}"));
    }
}

#[test]
fn any_grammar_can_follow_another_text() {
    let mut world = World::new();
    let schema = json_schema(&json!({"type": "boolean"}), Whitespace::None).unwrap();
    let choice = lark::choice(&["true", "false"]);
    for grammar in [schema, Grammar::Regex("^(true|false)$".into()), choice] {
        let whole =
            Grammar::Lark(format!("start: thought answer\nthought: \"<\" /[a-z]{{0,3}}/ \">\"\nanswer: {}", lark::part(&grammar)).into());
        for text in world.texts(&whole, 20) {
            let answer = text.split_once('>').unwrap().1;
            assert!(text.starts_with('<') && ["true", "false"].contains(&answer), "{grammar:?}: {text}");
        }
    }
}

#[test]
fn special_tokens_are_allowed_where_they_are_named_and_nowhere_else() {
    let mut world = World::new();
    let special = tokenizer().get_added_vocabulary().get_added_tokens_decoder().clone();
    let (&id, token) = special.iter().find(|(id, token)| token.special && **id != EOS).expect("a special token");
    let named = Grammar::Lark(format!("start: \"a\" {} \"b\"", token.content).into());
    let tokens = world.walk(&World::constraint(&named), 10).unwrap();
    assert_eq!(tokens[1], id);
    let numbered = Grammar::Lark(format!("start: \"a\" <[{id}]>").into());
    assert_eq!(world.walk(&World::constraint(&numbered), 10).unwrap()[1], id);
    let anything = Grammar::Regex(r"(?s:.)*".into());
    let compiled = world.compiler.compile(&anything).unwrap();
    let mask = Matcher::new(&compiled, &World::constraint(&anything), &[]).unwrap().mask().unwrap();
    assert!(special.iter().all(|(&id, token)| !token.special || id == EOS || !mask.allows(id)));
    assert!(mask.allows(EOS) && mask.tokens().count() > 100);
    assert!(mask.tokens().all(|token| world.tokenizer.id_to_token(token).is_some()), "padding is never allowed");
}

#[test]
fn the_end_is_allowed_where_the_grammar_may_end_and_late_only_where_it_must() {
    let world = World::new();
    let grammar = Grammar::Regex("a{1,2}".into());
    let compiled = world.compiler.compile(&grammar).unwrap();
    let a = world.tokenizer.token_to_id("a").unwrap();
    let ends = |ends_late, end_tokens: &[Token], generated: &[Token]| {
        let constraint = Constraint { grammar: grammar.clone(), end_tokens: end_tokens.to_vec(), ends_late };
        Matcher::new(&compiled, &constraint, generated).unwrap().mask().map(|mask| (mask.allows(EOS), mask.allows(a)))
    };
    assert_eq!(ends(false, &[EOS], &[]), Ok((false, true)));
    assert_eq!(ends(false, &[EOS], &[a]), Ok((true, true)));
    assert_eq!(ends(true, &[EOS], &[a]), Ok((false, true)));
    assert_eq!(ends(true, &[EOS], &[a, a]), Ok((true, false)));
    assert!(ends(false, &[], &[a, a]).unwrap_err().to_string().contains("no end-of-sequence"));
}

#[test]
fn a_matcher_rebuilt_from_its_tokens_goes_on_as_before() {
    let mut world = World::new();
    let schema = json!({"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}, "maxProperties": 3});
    let constraint = World::constraint(&json_schema(&schema, Whitespace::Some).unwrap());
    for _ in 0..10 {
        let compiled = world.compiler.compile(&constraint.grammar).unwrap();
        let mut live = Matcher::new(&compiled, &constraint, &[]).unwrap();
        let mut tokens = Vec::new();
        for _ in 0..40 {
            let mask = live.mask().unwrap();
            // The sequence moves to a worker on which the grammar was never compiled.
            if tokens.len() % 8 == 0 {
                let elsewhere = World::new().compiler.compile(&constraint.grammar).unwrap();
                assert_eq!(Matcher::new(&elsewhere, &constraint, &tokens).unwrap().mask().unwrap(), mask);
            }
            let allowed: Vec<Token> = mask.tokens().collect();
            let token = allowed[world.random(allowed.len())];
            if token == EOS {
                break;
            }
            live.advance(token).unwrap();
            tokens.push(token);
        }
    }
}

#[test]
fn tokens_that_stray_are_refused() {
    let world = World::new();
    let grammar = Grammar::Regex("a+".into());
    let compiled = world.compiler.compile(&grammar).unwrap();
    let b = world.tokenizer.token_to_id("b").unwrap();
    let error = Matcher::new(&compiled, &World::constraint(&grammar), &[b]).unwrap_err();
    assert!(error.to_string().contains("does not follow the grammar"), "{error}");
}

#[test]
fn grammars_that_cannot_be_compiled_are_refused_with_a_reason() {
    let compiler = World::new().compiler;
    for (grammar, words) in [
        (Grammar::Regex("(".into()), "unclosed"),
        (Grammar::Regex("a(?=b)".into()), "look"),
        (Grammar::Lark("start: missing".into()), "missing"),
        (Grammar::Lark("start: start".into()), ""),
        (Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(60_000), ")".repeat(60_000)).into()), ""),
        (Grammar::Regex(format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000)).into()), ""),
        (Grammar::Regex("a".repeat(300_000).into()), "300000 bytes"),
        (Grammar::JsonSchema("{".into()), "not JSON"),
    ] {
        let error = compiler.compile(&grammar).err().unwrap_or_else(|| panic!("{:.60}", grammar.text())).to_string();
        assert!(error.contains(words), "{:.60}: {error}", grammar.text());
    }
}

#[test]
fn a_chain_of_rules_or_references_as_long_as_a_grammar_may_be_does_no_harm() {
    let compiler = World::new().compiler;
    let rules: String = (0..20_000).map(|i| format!("\na{i}: a{}", i + 1)).collect();
    let _ = compiler.compile(&Grammar::Lark(format!("start: a0{rules}\na20000: \"x\"").into()));
    let definitions: serde_json::Map<_, _> =
        (0..1900).map(|i| (format!("d{i}"), json!({"anyOf": [{"type": "null"}, {"$ref": format!("#/$defs/d{}", i + 1)}]}))).collect();
    let mut schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
    schema["$defs"]["d1900"] = json!({"type": "string"});
    if let Ok(grammar) = json_schema(&schema, Whitespace::Some) {
        let _ = compiler.compile(&grammar);
    }
}

#[test]
fn a_part_that_the_compiler_refuses_is_found() {
    for (schema, path, word) in [
        (
            json!({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}}}),
            ".properties.a.anyOf[1]",
            "unclosed",
        ),
        (
            json!({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"properties": {"y": {"pattern": "(?<=a)"}}}}}),
            ".$defs.x.properties.y",
            "look",
        ),
        (
            json!({"type": "object", "additionalProperties": false, "properties": {"a": {"pattern": "a(?<=b)"}, "b": false}}),
            ".properties.a",
            "look",
        ),
        (
            json!({"type": "object", "required": ["b"], "properties": {"b": {"type": "integer", "minimum": 3, "maximum": 2}}}),
            ".properties.b",
            "minimum",
        ),
    ] {
        let error = json_schema(&schema, Whitespace::Some).unwrap_err();
        assert!(
            error.path().is_some_and(|found| found.starts_with(path)) && error.to_string().contains(word),
            "{schema}: {:?} {error}",
            error.path()
        );
    }
}

#[test]
fn the_way_on_from_an_allowed_token_may_be_too_much_work() {
    let world = World::new();
    let constraint = World::constraint(&Grammar::Lark("start: ((((\"x\")?){2,1000})*){0,50}".into()));
    let compiled = world.compiler.compile(&constraint.grammar).unwrap();
    let mut matcher = Matcher::new(&compiled, &constraint, &[]).unwrap();
    let error = loop {
        let token = matcher.mask().unwrap().tokens().find(|&token| token != EOS).unwrap();
        if let Err(error) = matcher.advance(token) {
            break error;
        }
    };
    assert!(matches!(&error, MatchError::TooComplex(reason) if reason.contains("max is 2000")), "{error}");
}

/// Rules that end alike in a row of the parser, which compares each of its items with all others.
fn slow(before: &str) -> Grammar {
    let names: Vec<_> = (0..400).map(|i| format!("r{i}")).collect();
    let rules: String = (0..400).map(|i| format!("\nr{i}: /[a-z]{{1,{}}}/ s?", i + 2)).collect();
    Grammar::Lark(format!("start: {before} s\ns: {}{rules}", names.join(" | ")).into())
}

#[test]
fn a_grammar_that_is_slow_from_the_start_is_refused_when_it_is_judged() {
    let compilers = [World::new().compiler];
    let judged = |grammar| Question::Grammar { grammar, model: 0 }.answer(&compilers);
    let error = judged(slow("")).unwrap_err();
    assert!(matches!(&error, GrammarError::Slow(reason) if reason.contains("simplify the grammar")), "{error}");
    // A trial does not get as far as these rules.
    assert_eq!(judged(slow("\"0\"{200}")), Ok(String::new()));
    for fast in [Grammar::Regex(r"(\w+\s?){1,200}".into()), lark::choice(&["yes", "no"]), Grammar::Lark("start: \"a\"".into())] {
        assert_eq!(judged(fast), Ok(String::new()));
    }
}
