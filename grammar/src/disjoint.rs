//! When no value can match two schemas at once. `oneOf` of such schemas is `anyOf`, which is all that a grammar can say.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// References followed, one in another, before giving up.
const DEPTH_MAX: usize = 16;

/// Whether no value matches both. `false` says nothing. `resolve` finds the schema that a reference names.
pub(crate) fn disjoint<'a>(a: &'a Value, b: &'a Value, resolve: &impl Fn(&str) -> Option<&'a Value>) -> bool {
    disjoint_within(a, b, resolve, DEPTH_MAX)
}

fn disjoint_within<'a>(a: &'a Value, b: &'a Value, resolve: &impl Fn(&str) -> Option<&'a Value>, depth: usize) -> bool {
    if *a == Value::Bool(false) || *b == Value::Bool(false) {
        return true;
    }
    let (Some(object_a), Some(object_b)) = (a.as_object(), b.as_object()) else { return false };
    if depth == 0 {
        return false;
    }
    let again = |a, b| disjoint_within(a, b, resolve, depth - 1);
    splits(object_a, resolve, &|part| again(part, b))
        || splits(object_b, resolve, &|part| again(a, part))
        || types(object_a).is_disjoint(&types(object_b))
        || have_other_values(object_a, object_b)
        || have_other_ranges(object_a, object_b)
        || differ_in_a_property(object_a, object_b, &again)
}

/// Whether a schema made of others is disjoint because they are.
fn splits<'a>(
    schema: &'a Map<String, Value>,
    resolve: &impl Fn(&str) -> Option<&'a Value>,
    is_disjoint: &impl Fn(&'a Value) -> bool,
) -> bool {
    let list = |key: &str| schema.get(key).and_then(Value::as_array);
    let target = schema.get("$ref").and_then(Value::as_str).and_then(resolve);
    target.is_some_and(is_disjoint)
        || list("allOf").is_some_and(|all| all.iter().any(is_disjoint))
        || ["anyOf", "oneOf"].into_iter().filter_map(list).any(|any| any.iter().all(is_disjoint))
}

/// The types that a schema's values may have. An integer is a number.
fn types(schema: &Map<String, Value>) -> BTreeSet<&str> {
    const ALL: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
    let name = |name: &'static str| if name == "integer" { "number" } else { name };
    let known = |value: &Value| value.as_str().and_then(|text| ALL.into_iter().chain(["integer"]).find(|&t| t == text)).map(name);
    match (values(schema), schema.get("type")) {
        (Some(values), _) => values.into_iter().map(type_of).collect(),
        (None, Some(Value::Array(types))) => types.iter().filter_map(known).collect(),
        (None, Some(one)) => known(one).into_iter().collect(),
        (None, None) => ALL.into(),
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The values of `const` or `enum`.
fn values(schema: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

fn have_other_values(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let (Some(a), Some(b)) = (values(a), values(b)) else { return false };
    // Numbers are equal whichever way they are written: compare only what is surely different.
    let differ = |a: &Value, b: &Value| match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() != b.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => false,
        _ => a != b,
    };
    a.iter().all(|a| b.iter().all(|b| differ(a, b)))
}

fn have_other_ranges(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let is_number = |schema| types(schema) == ["number"].into();
    let bound = |schema: &Map<String, Value>, key: &str| schema.get(key).and_then(Value::as_f64);
    let ends_before = |a, b| matches!((bound(a, "maximum"), bound(b, "minimum")), (Some(end), Some(start)) if end < start);
    is_number(a) && is_number(b) && (ends_before(a, b) || ends_before(b, a))
}

/// A property that one requires and that no value can satisfy for both.
fn differ_in_a_property<'a>(
    a: &'a Map<String, Value>,
    b: &'a Map<String, Value>,
    disjoint: &impl Fn(&'a Value, &'a Value) -> bool,
) -> bool {
    let is_object = |schema| types(schema) == ["object"].into();
    let names = |schema: &'a Map<String, Value>| schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let property = |schema: &'a Map<String, Value>, name: &str| match schema.get("properties").and_then(|all| all.get(name)) {
        None if schema.get("patternProperties").is_none() => schema.get("additionalProperties"),
        property => property,
    };
    is_object(a)
        && is_object(b)
        && names(a).chain(names(b)).filter_map(Value::as_str).any(|name| match (property(a, name), property(b, name)) {
            (Some(a), Some(b)) => disjoint(a, b),
            (Some(one), None) | (None, Some(one)) => *one == Value::Bool(false),
            (None, None) => false,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn schemas_are_disjoint_when_something_surely_differs() {
        let definitions = json!({
            "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
            "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]},
            "loop": {"$ref": "loop"},
        });
        let resolve = |name: &str| definitions.get(name);
        let cases = [
            (json!({"type": "string"}), json!({"type": ["integer", "null"]}), true),
            (json!({"type": "integer"}), json!({"type": "number"}), false),
            (json!({"const": 1}), json!({"const": 1.0}), false),
            (json!({"enum": ["a", "b"]}), json!({"const": "c"}), true),
            (json!({"type": "string"}), json!({"type": "string", "maxLength": 3}), false),
            (json!({"$ref": "cat"}), json!({"$ref": "dog"}), true),
            (json!({"$ref": "cat"}), json!({"$ref": "cat"}), false),
            (json!({"$ref": "loop"}), json!({"$ref": "loop"}), false),
            (json!({"$ref": "cat"}), json!({"anyOf": [{"type": "null"}, {"$ref": "dog"}]}), true),
            (json!({"type": "number", "maximum": 3}), json!({"type": "integer", "minimum": 4}), true),
            (json!({"type": "object", "required": ["a"]}), json!({"type": "object", "additionalProperties": false}), true),
            (json!({"type": "object", "required": ["a"]}), json!({"type": "object"}), false),
            (json!({"required": ["a"]}), json!({"type": "object", "additionalProperties": false}), false),
            (json!(true), json!(false), true),
        ];
        for (a, b, expected) in &cases {
            assert_eq!(disjoint(a, b, &resolve), *expected, "{a} {b}");
            assert_eq!(disjoint(b, a, &resolve), *expected, "{b} {a}");
        }
    }
}
