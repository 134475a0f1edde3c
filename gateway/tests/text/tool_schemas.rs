//! Schemas as libraries write them, behind references and in unions: in every notation of calls the same values are forced, and read as the
//! values that they are.

use super::forced::{TEMPLATES, World};
use serde_json::{Value, json};
use tidemill_gateway::text::{tool::Tool, tools::grammar::Forced};
use tidemill_grammar::{Matcher, numbers::INTEGER_DIGITS_MAX};

type Allowed = fn(&Value) -> bool;

fn definitions() -> Value {
    json!({
        "Year": {"enum": ["1999", "2000"], "title": "Year", "type": "string"},
        "Level": {"enum": [1, 2.5, "high", null, true]},
        "Again": {"$ref": "#/$defs/Year"},
        "Code": {"$anchor": "code", "type": "string", "pattern": "^[0-9]{2,4}$"},
        "Short": {"type": "string", "maxLength": 3},
        "Flag": {"type": "boolean"},
        "Count": {"type": "integer", "minimum": 3, "maximum": 12},
        "Point": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Count"}}, "required": ["x"], "additionalProperties": false},
    })
}

fn is_year(value: &Value) -> bool {
    *value == "1999" || *value == "2000"
}

fn is_code(value: &Value) -> bool {
    value.as_str().is_some_and(|code| (2..=4).contains(&code.len()) && code.chars().all(|c| c.is_ascii_digit()))
}

fn is_short(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.chars().count() <= 3)
}

fn is_count(value: &Value) -> bool {
    value.as_i64().is_some_and(|count| (3..=12).contains(&count))
}

fn is_date(value: &Value) -> bool {
    value.as_str().is_some_and(|date| date.len() == 10 && date.split('-').count() == 3)
}

/// The schemas of one parameter, and the values that each allows.
fn forms() -> Vec<(Value, Allowed)> {
    vec![
        (json!({"$ref": "#/$defs/Year"}), is_year),
        (json!({"$ref": "#/$defs/Again", "description": "d", "default": "1999"}), is_year),
        (json!({"allOf": [{"$ref": "#/$defs/Year"}], "title": "Year"}), is_year),
        (json!({"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "null"}], "default": null}), |value| value.is_null() || is_year(value)),
        (json!({"anyOf": [{"const": "1999"}, {"const": "2000"}]}), is_year),
        (json!({"oneOf": [{"const": "1999", "title": "a"}, {"const": "2000", "title": "b"}]}), is_year),
        (json!({"type": ["string", "null"], "enum": ["1999", "2000", null]}), |value| value.is_null() || is_year(value)),
        (json!({"$ref": "#/properties/other"}), is_year),
        (json!({"$ref": "#/$defs/Level"}), |value| {
            [json!(1), json!(2.5), json!("high"), json!(null), json!(true)]
                .iter()
                .any(|one| one.as_f64() == value.as_f64() && (one == value || one.is_number()))
        }),
        (json!({"$ref": "#code"}), is_code),
        (json!({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}), |value| value.is_null() || is_code(value)),
        (json!({"allOf": [{"$ref": "#/$defs/Short"}, {"minLength": 1}]}), |value| is_short(value) && *value != ""),
        (json!({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}), |value| value.is_null() || is_date(value)),
        (json!({"type": "string", "pattern": "^(?!1)[0-9]{2}$"}), |value| is_code(value) && !value.as_str().unwrap().starts_with('1')),
        (json!({"type": "string", "pattern": "^a$|^bc$"}), |value| *value == "a" || *value == "bc"),
        (json!({"allOf": [{"$ref": "#/$defs/Count"}]}), is_count),
        (json!({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}), |value| value.is_null() || is_count(value)),
        (json!({"$ref": "#/$defs/Flag"}), Value::is_boolean),
        (json!({"$ref": "#/$defs/Point"}), |value| value.as_object().is_some_and(|point| point.len() == 1 && is_count(&point["x"]))),
        (json!({"type": "array", "items": {"$ref": "#/$defs/Year"}, "minItems": 1, "maxItems": 2}), |value| {
            value.as_array().is_some_and(|years| !years.is_empty() && years.iter().all(is_year))
        }),
    ]
}

/// The arguments of random calls of a strict tool.
fn drawn(template: &str, marks: bool, parameters: &Value) -> Vec<Value> {
    let tool = Tool { name: "f".into(), parameters: Some(parameters.clone()), strict: true, ..Tool::default() };
    let mut world = World::new(template, marks, false, Forced::Any, vec![tool]);
    let walks: Vec<_> = (0..5).filter_map(|_| world.walk("", 300)).collect();
    let arguments = walks.iter().map(|tokens| {
        let piece = world.read(tokens);
        assert_eq!((piece.calls.len(), piece.text.as_str()), (1, ""), "{parameters}: {}", world.text(tokens));
        serde_json::from_str(&piece.calls[0].arguments).unwrap_or_else(|error| panic!("{error}: {}", world.text(tokens)))
    });
    arguments.collect()
}

#[test]
fn a_strict_parameter_has_the_values_of_its_schema_in_every_notation() {
    for (name, template) in TEMPLATES {
        for (form, allowed) in forms() {
            let parameters = json!({
                "type": "object", "properties": {"p": form, "other": {"enum": ["1999", "2000"]}}, "required": ["p"],
                "additionalProperties": false, "$defs": definitions(),
            });
            let drawn = drawn(template, true, &parameters);
            assert!(drawn.len() >= 2, "{name}: {form}: {}", drawn.len());
            for arguments in drawn {
                assert!(allowed(&arguments["p"]), "{name}: {form}: {arguments}");
            }
        }
    }
}

#[test]
fn parameters_behind_references_are_parameters_in_every_notation() {
    let args = json!({"type": "object", "properties": {"year": {"$ref": "#/$defs/Year"}}, "required": ["year"]});
    let more = json!({"properties": {"year": {"type": "string"}, "count": {"$ref": "#/$defs/Count"}}, "required": ["count"]});
    let mut defs = definitions();
    defs["Args"] = args.clone();
    defs["More"] = more;
    for (name, template) in TEMPLATES {
        for (parameters, count) in [
            (json!({"$ref": "#/$defs/Args", "$defs": defs}), false),
            (json!({"allOf": [{"$ref": "#/$defs/Args"}], "description": "d", "$defs": defs}), false),
            (json!({"type": "object", "allOf": [{"$ref": "#/$defs/Args"}, {"$ref": "#/$defs/More"}], "$defs": defs}), true),
        ] {
            let drawn = drawn(template, false, &parameters);
            assert!(drawn.len() >= 2, "{name}: {parameters}: {}", drawn.len());
            for arguments in drawn {
                assert!(is_year(&arguments["year"]) && (!count || is_count(&arguments["count"])), "{name}: {parameters}: {arguments}");
            }
        }
    }
}

#[test]
fn a_tool_that_names_no_parameters_may_have_any() {
    for (name, template) in TEMPLATES {
        let tool = Tool { name: "f".into(), parameters: Some(json!({"type": "object"})), ..Tool::default() };
        let mut world = World::new(template, true, false, Forced::Any, vec![tool]);
        let begin = match name {
            "qwen_coder" => "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
            "pythonic" => "[f(city=\"Oslo\")]",
            "hermes" => "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
            _ => continue,
        };
        let tokens = world.walk(begin, 5).unwrap_or_else(|| panic!("{name} ends"));
        let arguments: Value = serde_json::from_str(&world.read(&tokens).calls[0].arguments).unwrap();
        assert_eq!(arguments, json!({"city": "Oslo"}), "{name}");
    }
}

#[test]
fn numbers_end_in_every_notation() {
    let parameters = json!({"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"], "additionalProperties": false});
    let tool = Tool { name: "f".into(), parameters: Some(parameters), ..Tool::default() };
    for (name, template) in TEMPLATES {
        let world = World::new(template, false, false, Forced::Any, vec![tool.clone()]);
        let begin = match name {
            "hermes" => "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": ",
            "qwen_coder" => "<tool_call>\n<function=f>\n<parameter=n>\n",
            "mistral_list" => "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"n\": ",
            "mistral" => "[TOOL_CALLS]f[ARGS]{\"n\": ",
            "pythonic" => "[f(n=",
            "llama_json" => "{\"name\": \"f\", \"parameters\": {\"n\": ",
            _ => "{\"name\": \"f\", \"arguments\": {\"n\": ",
        };
        let compiled = world.compiler.compile(&world.constraint.grammar).unwrap();
        let follows = |digits: usize| {
            let tokens = world.model.tokenizer.encode(&format!("{begin}{}", "9".repeat(digits)), false).unwrap();
            Matcher::new(&compiled, &world.constraint, &tokens).map(drop)
        };
        assert_eq!(follows(INTEGER_DIGITS_MAX), Ok(()), "{name}");
        assert!(follows(INTEGER_DIGITS_MAX + 1).is_err(), "{name}");
    }
}
