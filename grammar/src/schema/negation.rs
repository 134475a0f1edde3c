//! The schema of all values that another schema does not match, if such a schema can be written.

use super::{
    Preparer,
    values::{is_of, same},
};
use crate::{disjoint::disjoint, expression};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// The types of values; an integer is a number.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
/// The keywords whose negation cannot be written.
const UNKNOWN: [&str; 21] = [
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "multipleOf",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "maxProperties",
    "if",
    "then",
    "else",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
];

impl<'a> Preparer<'a> {
    /// Returns the negation of a schema, or `None` if it cannot be written or takes too much. Formats never fail: they are annotations.
    pub(super) fn negation(&mut self, schema: &'a Value, at: &str, depth: usize) -> Option<Value> {
        let object = match schema {
            Value::Bool(is_anything) => return Some(Value::Bool(!is_anything)),
            schema => schema.as_object()?,
        };
        self.left = self.left.checked_sub(1 + object.len())?;
        let depth = depth.checked_sub(1)?;
        let mut options = Vec::new();
        for (key, value) in object {
            self.keyword_negation(object, key, value, at, depth, &mut options)?;
        }
        Some(any_of(options))
    }

    /// Adds the schemas of values that fail one keyword.
    fn keyword_negation(
        &mut self,
        object: &'a Map<String, Value>,
        key: &str,
        value: &'a Value,
        at: &str,
        depth: usize,
        options: &mut Vec<Value>,
    ) -> Option<()> {
        let count = || super::count(value);
        // In draft 4, these keywords are booleans that exclude the bounds.
        let is_old_bound = || ["exclusiveMinimum", "exclusiveMaximum"].iter().any(|key| object.get(*key).is_some_and(Value::is_boolean));
        let inner = format!("{at}/{}", super::escaped(key));
        match key {
            "type" => {
                let own = value.as_array().map_or_else(|| vec![value], |types| types.iter().collect());
                let has = |kind: &str| own.iter().any(|own| own.as_str() == Some(kind));
                // No keyword describes numbers that are not integers.
                if has("integer") && !has("number") {
                    return None;
                }
                let others: Vec<&str> = TYPES.into_iter().filter(|kind| !has(kind)).collect();
                options.extend((!others.is_empty()).then(|| json!({"type": others})));
            }
            "const" => options.push(self.other_values(std::slice::from_ref(value))?),
            "enum" => options.push(self.other_values(value.as_array()?)?),
            "pattern" => {
                let pattern = expression::none_of(&[value.as_str()?.to_owned()], &mut self.work)?;
                options.push(json!({"type": "string", "pattern": pattern}));
            }
            "minLength" => options.extend(count()?.checked_sub(1).map(|most| json!({"type": "string", "maxLength": most}))),
            "maxLength" => options.push(json!({"type": "string", "minLength": count()?.checked_add(1)?})),
            "minItems" => options.extend(count()?.checked_sub(1).map(|most| json!({"type": "array", "maxItems": most}))),
            "maxItems" => options.push(json!({"type": "array", "minItems": count()?.checked_add(1)?})),
            "minProperties" => options.extend(count()?.checked_sub(1).map(|most| json!({"type": "object", "maxProperties": most}))),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                if is_old_bound() {
                    return None;
                }
                let other = match key {
                    "minimum" => "exclusiveMaximum",
                    "maximum" => "exclusiveMinimum",
                    "exclusiveMinimum" => "maximum",
                    _ => "minimum",
                };
                let bound = super::bound(value, at, other).ok()?;
                options.push(json!({"type": "number", other: bound}));
            }
            "required" => {
                for name in value.as_array()? {
                    self.left = self.left.checked_sub(1)?;
                    options.push(json!({"type": "object", "properties": {name.as_str()?: false}}));
                }
            }
            "properties" => {
                for (name, property) in value.as_object()? {
                    let other = self.negation(property, &format!("{inner}/{}", super::escaped(name)), depth)?;
                    if other != Value::Bool(false) {
                        options.push(json!({"type": "object", "properties": {name: other}, "required": [name]}));
                    }
                }
            }
            "allOf" => {
                for (i, part) in value.as_array()?.iter().enumerate() {
                    options.push(self.negation(part, &format!("{inner}/{i}"), depth)?);
                }
            }
            "anyOf" | "oneOf" => {
                let parts = value.as_array()?;
                if key == "oneOf" && !self.exclude_each_other(parts) {
                    return None;
                }
                let mut all = Vec::new();
                for (i, part) in parts.iter().enumerate() {
                    all.push(self.negation(part, &format!("{inner}/{i}"), depth)?);
                }
                options.push(json!({"allOf": all}));
            }
            "not" => options.push(self.schema(value, &inner).ok()?),
            "$ref" => {
                let place = self.place_of(value.as_str()?)?;
                let root = self.root;
                options.push(self.negation(root.pointer(&place)?, &place, depth)?);
            }
            "additionalProperties" | "items" | "propertyNames" if super::is_anything(value) => {}
            key if UNKNOWN.contains(&key) => return None,
            _ => {}
        }
        Some(())
    }

    /// Returns the schema of all values but `values`, or `None` if lists or objects are among them.
    pub(super) fn other_values(&mut self, values: &[Value]) -> Option<Value> {
        self.left = self.left.checked_sub(values.len())?;
        let has = |kind: &str| values.iter().any(|value| is_of(value, kind));
        if has("array") || has("object") {
            return None;
        }
        let others: Vec<&str> = TYPES.into_iter().filter(|kind| !has(kind)).collect();
        let mut options = vec![json!({"type": others})];
        let known: HashSet<String> = values.iter().map(same).collect();
        if has("boolean") {
            let left = [false, true].into_iter().filter(|value| !known.contains(&value.to_string()));
            options.extend(left.map(|value| json!({"type": "boolean", "enum": [value]})));
        }
        if has("string") {
            let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(expression::literal).collect();
            options.push(json!({"type": "string", "pattern": expression::none_of(&texts, &mut self.work)?}));
        }
        if has("number") {
            let mut numbers: Vec<(f64, &Value)> = values.iter().filter_map(|value| Some((value.as_f64()?, value))).collect();
            numbers.sort_by(|a, b| a.0.total_cmp(&b.0));
            numbers.dedup_by(|a, b| a.0 == b.0);
            let (first, last) = (numbers.first()?, numbers.last()?);
            options.push(json!({"type": "number", "exclusiveMaximum": first.1}));
            for pair in numbers.windows(2) {
                options.push(json!({"type": "number", "exclusiveMinimum": pair[0].1, "exclusiveMaximum": pair[1].1}));
            }
            options.push(json!({"type": "number", "exclusiveMinimum": last.1}));
        }
        Some(any_of(options))
    }

    /// Whether no value matches two of these schemas, as far as can be proven.
    pub(super) fn exclude_each_other(&self, options: &'a [Value]) -> bool {
        options.len() <= OPTIONS_COMPARED_MAX && (0..options.len()).all(|a| (0..a).all(|b| self.exclude(&options[a], &options[b])))
    }

    pub(super) fn exclude(&self, a: &'a Value, b: &'a Value) -> bool {
        let root = self.root;
        disjoint(a, b, &|reference: &str| self.place_of(reference).and_then(|place| root.pointer(&place)), &self.comparisons)
    }
}

/// The most options of one `oneOf` that are compared with each other.
const OPTIONS_COMPARED_MAX: usize = 300;

/// Returns a schema of all values that match one of `options`.
fn any_of(mut options: Vec<Value>) -> Value {
    options.retain(|option| *option != Value::Bool(false));
    match options.len() {
        0 => Value::Bool(false),
        1 => options.remove(0),
        _ => json!({"anyOf": options}),
    }
}
