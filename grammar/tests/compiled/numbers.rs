//! Numbers are long enough for every one that a model means, and end.

use super::schemas::World;
use serde_json::{Value, json};
use tidemill_grammar::{
    compiler::json_schema,
    numbers::{EXPONENT_DIGITS_MAX, FRACTION_DIGITS_MAX, INTEGER_DIGITS_MAX},
    schema::Whitespace,
};
use tidemill_proto::{
    block::Token,
    grammar::{Constraint, Grammar},
};

const EOS: Token = 1;

fn constraint(grammar: Grammar) -> Constraint {
    Constraint { grammar, end_tokens: vec![EOS], ends_late: false }
}

fn nines(count: usize) -> String {
    "9".repeat(count)
}

/// Schemas that allow any number, and the text of an answer around it.
fn doors() -> Vec<(Value, &'static str, &'static str)> {
    vec![
        (json!({}), "", ""),
        (json!({"type": "number"}), "", ""),
        (json!({"type": ["number", "null"]}), "", ""),
        (json!({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "number"}]}), "", ""),
        (json!({"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "array"}]}), "", ""),
        (json!({"oneOf": [{"type": "boolean"}, {"allOf": [{"type": "number"}, {}]}]}), "", ""),
        (json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}), "", ""),
        (json!({"not": {"type": "string"}}), "", ""),
        (json!({"type": "object"}), "{\"a\":", "}"),
        (json!({"type": "object", "properties": {"b": {}}}), "{\"b\":[", "]}"),
        (json!({"type": "object", "additionalProperties": {"type": "number"}}), "{\"a\":1,\"b\":", "}"),
        (json!({"type": "array", "items": {"type": "number"}}), "[0,", "]"),
    ]
}

#[test]
fn digits_end_wherever_a_number_may_be() {
    let world = World::new();
    let (whole, fraction, exponent) = (nines(INTEGER_DIGITS_MAX), nines(FRACTION_DIGITS_MAX), nines(EXPONENT_DIGITS_MAX));
    for (schema, before, after) in doors() {
        for whitespace in [Whitespace::Some, Whitespace::None] {
            let grammar = json_schema(&schema, whitespace).unwrap();
            let inside = Grammar::Lark(format!("start: \"x\" %json {}", grammar.text()).into());
            for (constraint, mark) in [(constraint(grammar), ""), (constraint(inside), "x")] {
                let follow = |number: &str| world.follow(&constraint, &format!("{mark}{before}{number}{after}"));
                for number in [format!("-{whole}.{fraction}e-{exponent}"), format!("{whole}E+{exponent}")] {
                    assert_eq!(follow(&number), Ok(()), "{schema}: {number}");
                }
                for endless in [format!("{whole}9"), format!("0.{fraction}9"), format!("1e{exponent}9"), format!("1e-{exponent}9")] {
                    assert!(follow(&endless).is_err(), "{schema}: {endless}");
                }
            }
        }
    }
}

#[test]
fn every_number_of_a_machine_has_few_digits() {
    let world = World::new();
    let integers = constraint(json_schema(&json!({"type": "integer"}), Whitespace::None).unwrap());
    for integer in
        [i64::MIN.to_string(), u64::MAX.to_string(), i128::MIN.to_string(), u128::MAX.to_string(), "-0".into(), nines(INTEGER_DIGITS_MAX)]
    {
        assert_eq!(world.follow(&integers, &integer), Ok(()), "{integer}");
    }
    assert!(world.follow(&integers, &nines(INTEGER_DIGITS_MAX + 1)).is_err());
    let numbers = constraint(json_schema(&json!({"type": "number"}), Whitespace::None).unwrap());
    let shortest = [f64::MAX, f64::MIN, f64::MIN_POSITIVE, f64::from_bits(1), f64::EPSILON, 0.1 + 0.2, 1e21, -1e-7];
    for text in shortest.iter().flat_map(|number| [json!(number).to_string(), format!("{number:e}")]).chain([
        (0.1 + 0.2).to_string(),
        1e-22.to_string(),
        1e21.to_string(),
    ]) {
        assert_eq!(world.follow(&numbers, &text), Ok(()), "{text}");
    }
}

#[test]
fn bounds_and_values_of_a_schema_are_kept_within_the_digits() {
    let world = World::new();
    for (schema, valid, invalid) in [
        (json!({"type": "number", "minimum": 0}), vec!["0", "12.5", "0.30000000000000004"], vec!["-1"]),
        (json!({"type": "number", "exclusiveMinimum": 1e-20}), vec!["0.1", "3", "0.00000000000000000002"], vec!["0", "-1"]),
        (json!({"type": "number", "minimum": -1.5, "maximum": 1e15}), vec!["-1.5", "1000000000000000"], vec!["-1.6", "1000000000000001"]),
        (json!({"type": "integer", "minimum": 9_007_199_254_740_990_i64}), vec!["9007199254740990", "18446744073709551615"], vec!["7"]),
        (json!({"type": "number", "multipleOf": 0.01}), vec!["0.25", "-3", "19.90"], vec!["0.255"]),
        (json!({"type": "integer", "multipleOf": 7}), vec!["0", "-14", "7000000000000000000000"], vec!["15"]),
        (json!({"enum": [0.1, 1e-20, -3, "many"]}), vec!["0.1", "0.00000000000000000001", "-3", "\"many\""], vec!["0.2"]),
        (json!({"const": 1.5}), vec!["1.5"], vec!["1.6"]),
    ] {
        let grammar = constraint(json_schema(&schema, Whitespace::None).unwrap_or_else(|error| panic!("{schema}: {error}")));
        for text in valid {
            assert_eq!(world.follow(&grammar, text), Ok(()), "{schema}: {text}");
        }
        let endless = [
            nines(INTEGER_DIGITS_MAX + 1),
            format!("0.{}", nines(FRACTION_DIGITS_MAX + 1)),
            format!("0.1{}", "0".repeat(FRACTION_DIGITS_MAX)),
        ];
        for text in invalid.into_iter().map(str::to_owned).chain(endless) {
            assert!(world.follow(&grammar, &text).is_err(), "{schema}: {text}");
        }
    }
    for (schema, path) in [
        (json!({"properties": {"a": {"const": 1e-50}}}), ".properties.a.const"),
        (json!({"items": {"enum": [1, [{"b": 1e-300}]]}}), ".items.enum"),
        (json!({"properties": {"a": {"type": "number", "exclusiveMinimum": 1e-40, "exclusiveMaximum": 2e-40}}}), ".properties.a"),
        (json!({"type": "number", "exclusiveMinimum": 5e-324}), ".exclusiveMinimum"),
    ] {
        let error = json_schema(&schema, Whitespace::None).unwrap_err();
        assert!(error.path() == Some(path) && error.to_string().contains(" 40 "), "{schema}: {:?} {error}", error.path());
    }
}

#[test]
fn texts_and_a_clients_own_expressions_have_as_many_digits_as_they_like() {
    let world = World::new();
    let digits = nines(300);
    for (grammar, text) in [
        (json_schema(&json!({"type": "string", "pattern": "^[0-9]+$"}), Whitespace::None).unwrap(), format!("\"{digits}\"")),
        (json_schema(&json!({"anyOf": [{"type": "string"}, {"type": "number"}]}), Whitespace::None).unwrap(), format!("\"{digits}\"")),
        (Grammar::Regex("[0-9]+".into()), digits.clone()),
        (Grammar::Lark("start: /[0-9]+/ \" \" %json {\"type\": \"null\"}".into()), format!("{digits} null")),
    ] {
        assert_eq!(world.follow(&constraint(grammar), &text), Ok(()), "{text}");
    }
}
