//! Proves that no value can match two schemas at once. `oneOf` of such schemas is `anyOf`, which is the only form that a grammar can
//! express.
//!
//! Schemas that refer to each other can be compared in exponentially many ways, so each comparison has a budget of steps, and so have all
//! comparisons of one document together. If it is used up, nothing is proven.

use serde_json::{Map, Value};
use std::{cell::Cell, collections::HashSet};

/// The most nested references that are followed.
const DEPTH_MAX: usize = 16;
/// The most steps of one comparison. Options of public schemas take some dozens.
const STEPS_MAX: usize = 4096;
/// The most steps of all comparisons of one document: enough for 300 options that each differ in a property.
const STEPS_OF_DOCUMENT_MAX: usize = 1 << 19;
/// A reference takes one step per this many bytes, as looking it up reads all of it.
const REFERENCE_BYTES_PER_STEP: usize = 64;

/// The steps that are left for a document.
#[derive(Debug)]
pub(crate) struct Budget(Cell<usize>);

impl Default for Budget {
    fn default() -> Self {
        Self(Cell::new(STEPS_OF_DOCUMENT_MAX))
    }
}

/// Whether it is proven that no value matches both; `false` proves nothing. `resolve` finds the schema that a reference names.
pub(crate) fn disjoint<'a>(a: &'a Value, b: &'a Value, resolve: &impl Fn(&str) -> Option<&'a Value>, budget: &Budget) -> bool {
    let steps = Cell::new(STEPS_MAX.min(budget.0.get()));
    let before = steps.get();
    let proven = Comparison { resolve, steps: &steps }.disjoint(a, b, DEPTH_MAX);
    budget.0.set(budget.0.get() - (before - steps.get()));
    proven
}

/// The comparison of two schemas.
struct Comparison<'c, R> {
    resolve: &'c R,
    steps: &'c Cell<usize>,
}

impl<'a, R: Fn(&str) -> Option<&'a Value>> Comparison<'_, R> {
    /// Takes `steps` from the budget. Returns `false` if fewer are left.
    fn take(&self, steps: usize) -> bool {
        let left = self.steps.get().checked_sub(steps);
        self.steps.set(left.unwrap_or(0));
        left.is_some()
    }

    fn disjoint(&self, a: &'a Value, b: &'a Value, depth: usize) -> bool {
        if !self.take(1) {
            return false;
        }
        if *a == Value::Bool(false) || *b == Value::Bool(false) {
            return true;
        }
        let (Some(a_fields), Some(b_fields)) = (a.as_object(), b.as_object()) else { return false };
        if depth == 0 {
            return false;
        }
        let again = |a, b| self.disjoint(a, b, depth - 1);
        self.splits(a_fields, &|part| again(part, b))
            || self.splits(b_fields, &|part| again(a, part))
            || self.have_other_types(a_fields, b_fields)
            || self.have_other_values(a_fields, b_fields)
            || have_other_ranges(a_fields, b_fields)
            || self.differ_in_a_property(a_fields, b_fields, &again)
    }

    /// Whether a schema made of others is disjoint because they are.
    fn splits(&self, schema: &'a Map<String, Value>, is_disjoint: &impl Fn(&'a Value) -> bool) -> bool {
        let list = |key: &str| schema.get(key).and_then(Value::as_array);
        let reference = schema.get("$ref").and_then(Value::as_str);
        let target = reference.filter(|name| self.take(name.len() / REFERENCE_BYTES_PER_STEP)).and_then(self.resolve);
        target.is_some_and(is_disjoint)
            || list("allOf").is_some_and(|all| all.iter().any(is_disjoint))
            || ["anyOf", "oneOf"].into_iter().filter_map(list).any(|any| any.iter().all(is_disjoint))
    }

    fn have_other_types(&self, a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
        let seen = |schema| values(schema).map_or(0, <[_]>::len);
        self.take(seen(a) + seen(b)) && types(a) & types(b) == 0
    }

    fn have_other_values(&self, a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
        let (Some(a), Some(b)) = (values(a), values(b)) else { return false };
        if !self.take(a.len() + b.len()) {
            return false;
        }
        let a: HashSet<Scalar<'_>> = a.iter().map(Scalar::of).collect();
        // Lists and objects count as one value here, as they may be equal regardless of how they are written.
        b.iter().all(|value| !a.contains(&Scalar::of(value)))
    }

    /// Whether one schema requires a property that no value can satisfy for both.
    fn differ_in_a_property(
        &self,
        a: &'a Map<String, Value>,
        b: &'a Map<String, Value>,
        disjoint: &impl Fn(&'a Value, &'a Value) -> bool,
    ) -> bool {
        let is_object = |schema| types(schema) == OBJECT;
        let names = |schema: &'a Map<String, Value>| schema.get("required").and_then(Value::as_array).into_iter().flatten();
        let property = |schema: &'a Map<String, Value>, name: &str| match schema.get("properties").and_then(|all| all.get(name)) {
            None if schema.get("patternProperties").is_none() => schema.get("additionalProperties"),
            property => property,
        };
        is_object(a)
            && is_object(b)
            && names(a).chain(names(b)).take_while(|_| self.take(1)).filter_map(Value::as_str).any(|name| {
                match (property(a, name), property(b, name)) {
                    (Some(a), Some(b)) => disjoint(a, b),
                    (Some(one), None) | (None, Some(one)) => *one == Value::Bool(false),
                    (None, None) => false,
                }
            })
    }
}

/// A set of types, a bit for each.
type Types = u8;
const OBJECT: Types = 1 << 5;
const NUMBER: Types = 1 << 2;

/// The types that a schema's values may have. An integer is a number.
fn types(schema: &Map<String, Value>) -> Types {
    let known = |value: &Value| match value.as_str() {
        Some("null") => 1,
        Some("boolean") => 1 << 1,
        Some("number" | "integer") => NUMBER,
        Some("string") => 1 << 3,
        Some("array") => 1 << 4,
        Some("object") => OBJECT,
        _ => 0,
    };
    match (values(schema), schema.get("type")) {
        (Some(values), _) => values.iter().map(type_of).fold(0, |all, one| all | one),
        (None, Some(Value::Array(types))) => types.iter().map(known).fold(0, |all, one| all | one),
        (None, Some(one)) => known(one),
        (None, None) => Types::MAX,
    }
}

fn type_of(value: &Value) -> Types {
    match value {
        Value::Null => 1,
        Value::Bool(_) => 1 << 1,
        Value::Number(_) => NUMBER,
        Value::String(_) => 1 << 3,
        Value::Array(_) => 1 << 4,
        Value::Object(_) => OBJECT,
    }
}

/// The values of `const` or `enum`.
fn values(schema: &Map<String, Value>) -> Option<&[Value]> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(values),
        _ => None,
    }
}

/// A value in a form that differs only if the values surely differ.
#[derive(PartialEq, Eq, Hash)]
enum Scalar<'a> {
    Null,
    Bool(bool),
    /// The number's bits: numbers are equal regardless of how they are written.
    Number(u64),
    String(&'a str),
    List,
    Object,
}

impl<'a> Scalar<'a> {
    fn of(value: &'a Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(*value),
            // Adding zero turns the negative zero into the positive one.
            Value::Number(number) => Self::Number((number.as_f64().unwrap_or(f64::NAN) + 0.0).to_bits()),
            Value::String(text) => Self::String(text),
            Value::Array(_) => Self::List,
            Value::Object(_) => Self::Object,
        }
    }
}

fn have_other_ranges(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let is_number = |schema| types(schema) == NUMBER;
    let bound = |schema: &Map<String, Value>, key: &str| schema.get(key).and_then(Value::as_f64);
    let ends_before = |a, b| matches!((bound(a, "maximum"), bound(b, "minimum")), (Some(end), Some(start)) if end < start);
    (ends_before(a, b) || ends_before(b, a)) && is_number(a) && is_number(b)
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
            assert_eq!(disjoint(a, b, &resolve, &Budget::default()), *expected, "{a} {b}");
            assert_eq!(disjoint(b, a, &resolve, &Budget::default()), *expected, "{b} {a}");
        }
    }

    /// Each comparison of two of these compares everything within them: without a budget, (1 + √k)^16 comparisons.
    #[test]
    fn schemas_that_are_compared_in_endlessly_many_ways_are_given_up() {
        for width in [1, 2, 3, 4, 20, 10_000] {
            let same = json!({"allOf": vec![json!({"$ref": "x"}); width]});
            let resolve = |_: &str| Some(&same);
            let budget = Budget::default();
            assert!(!disjoint(&same, &same, &resolve, &budget), "{width}");
            assert!(STEPS_OF_DOCUMENT_MAX - budget.0.get() <= STEPS_MAX, "{width}");
        }
        let many: Vec<_> = (0..STEPS_MAX).map(Value::from).collect();
        let (many, reference) = (json!({"enum": many}), json!({"$ref": "x".repeat(1 << 20)}));
        for (a, b) in [(&many, &many), (&many, &reference), (&reference, &reference)] {
            let budget = Budget::default();
            assert!(!disjoint(a, b, &|_| None, &budget));
            assert!(STEPS_OF_DOCUMENT_MAX - budget.0.get() <= STEPS_MAX);
        }
    }

    #[test]
    fn a_document_has_a_budget_of_its_own() {
        let (a, b) = (json!({"const": "a"}), json!({"const": "b"}));
        let budget = Budget::default();
        let proven = (0..STEPS_OF_DOCUMENT_MAX).take_while(|_| disjoint(&a, &b, &|_| None, &budget)).count();
        assert!((100_000..STEPS_OF_DOCUMENT_MAX).contains(&proven), "{proven}");
        assert!(!disjoint(&a, &b, &|_| None, &budget));
    }
}
