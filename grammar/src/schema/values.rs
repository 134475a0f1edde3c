//! Schemas with few values, and lists of these without repetition. A grammar has no memory of a list's earlier items, so such a list is
//! written out: every possible one.

use super::{DEPTH_MAX, Extra, Preparer, SchemaError, count, refused};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// The most values of a schema that is expanded into its values.
const VALUES_MAX: usize = 1000;
/// The most lists that are written out, each a row of its own in the parser. All orders of five values are 326.
const LISTS_MAX: usize = 350;
/// The keywords that exclude no value from a schema.
pub(super) const ANNOTATIONS: [&str; 11] =
    ["title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$defs", "definitions"];

impl<'a> Preparer<'a> {
    /// Returns every value of a schema once (1.0 is 1), or `None` if there are many, or lists or objects among them.
    pub(super) fn values(&mut self, schema: &'a Value, depth: usize) -> Option<Vec<Value>> {
        let object = schema.as_object()?;
        self.left = self.left.checked_sub(1 + object.len())?;
        let mut keys = object.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str()));
        let kind = object.get("type").and_then(Value::as_str);
        let first = keys.find(|key| *key != "type").map(String::as_str);
        let is_alone = keys.all(|key| key == "type");
        let values = match first {
            Some("const") if is_alone => vec![object["const"].clone()],
            Some("enum") if is_alone => object["enum"].as_array().filter(|values| values.len() <= VALUES_MAX)?.clone(),
            Some(key @ ("anyOf" | "oneOf")) if is_alone && depth > 0 => {
                let mut all = Vec::new();
                for option in object[key].as_array()? {
                    all.extend(self.values(option, depth - 1)?);
                    (all.len() <= VALUES_MAX).then_some(())?;
                }
                all
            }
            Some("$ref") if is_alone && depth > 0 => {
                let place = self.place_of(object["$ref"].as_str()?)?;
                let root = self.root;
                self.values(root.pointer(&place)?, depth - 1)?
            }
            None if kind == Some("boolean") => vec![false.into(), true.into()],
            None if kind == Some("null") => vec![Value::Null],
            _ => integers(object)?,
        };
        if values.len() > VALUES_MAX || values.iter().any(|value| value.is_array() || value.is_object()) {
            return None;
        }
        self.left = self.left.checked_sub(values.len())?;
        let mut known = HashSet::new();
        let has_type = |value: &Value| match object.get("type") {
            None => true,
            Some(Value::Array(types)) => types.iter().filter_map(Value::as_str).any(|kind| is_of(value, kind)),
            Some(kind) => kind.as_str().is_some_and(|kind| is_of(value, kind)),
        };
        Some(values.into_iter().filter(|value| has_type(value) && known.insert(same(value))).collect())
    }

    /// Rewrites `uniqueItems` as all possible lists, or relaxes it if there are too many.
    pub(super) fn unique_items(
        &mut self,
        object: &'a Map<String, Value>,
        value: &'a Value,
        at: &str,
        extra: &mut Extra<'a>,
    ) -> Result<(), SchemaError> {
        let bound = |key: &str| object.get(key).and_then(count).map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        let most = bound("maxItems");
        match value {
            Value::Bool(false) => return Ok(()),
            Value::Bool(true) if most.is_some_and(|most| most <= 1) => return Ok(()),
            Value::Bool(true) => {}
            _ => return Err(refused(at, "uniqueItems", "`uniqueItems` must be `true` or `false`".into())),
        }
        let items = object.get("items").filter(|_| !object.contains_key("prefixItems"));
        let Some(values) = items.and_then(|items| self.values(items, DEPTH_MAX)) else {
            return self.relax(at, "uniqueItems", "the items have more values than can be kept apart (use `enum`, or `maxItems` of 1)");
        };
        let (least, most) = (bound("minItems").unwrap_or(0), most.unwrap_or(usize::MAX).min(values.len()));
        if least > values.len() {
            let problem = format!("no list has {least} items without repetition: the items have {} values", values.len());
            return Err(refused(at, "uniqueItems", problem));
        }
        match lists(&values, most) {
            Some(lists) => {
                let lists: Vec<Value> = lists.into_iter().filter(|list| list.len() >= least).map(Value::from).collect();
                self.pay(lists.iter().map(super::size).sum(), at)?;
                extra.push(("uniqueItems", list_or_other(object, json!({"enum": lists}))));
            }
            None => {
                self.relax(at, "uniqueItems", &format!("its {} values can be ordered in more than {LISTS_MAX} ways", values.len()))?;
                // Longer lists repeat items, so models that repeat themselves end here.
                extra.push(("uniqueItems", list_or_other(object, json!({"type": "array", "maxItems": most}))));
            }
        }
        Ok(())
    }
}

/// Extends a schema of lists to all other values, unless `object` allows only lists.
pub(super) fn list_or_other(object: &Map<String, Value>, lists: Value) -> Value {
    match object.get("type").and_then(Value::as_str) {
        Some("array") => lists,
        _ => json!({"anyOf": [{"type": ["null", "boolean", "number", "string", "object"]}, lists]}),
    }
}

fn integers(object: &Map<String, Value>) -> Option<Vec<Value>> {
    let known = |key: &String| ["type", "minimum", "maximum"].contains(&key.as_str()) || ANNOTATIONS.contains(&key.as_str());
    if object.get("type")? != "integer" || !object.keys().all(known) {
        return None;
    }
    let (first, last) = (object.get("minimum")?.as_i64()?, object.get("maximum")?.as_i64()?);
    (last.checked_sub(first)? < VALUES_MAX as i64).then(|| (first..=last).map(Value::from).collect())
}

pub(super) fn is_of(value: &Value, kind: &str) -> bool {
    match value {
        Value::Null => kind == "null",
        Value::Bool(_) => kind == "boolean",
        Value::Number(number) => kind == "number" || (kind == "integer" && number.as_f64().is_some_and(|number| number.fract() == 0.0)),
        Value::String(_) => kind == "string",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
    }
}

/// Returns a text that is equal for equal values.
pub(super) fn same(value: &Value) -> String {
    match value.as_f64() {
        // Adding zero turns the negative zero into the positive one.
        Some(number) => (number + 0.0).to_string(),
        None => value.to_string(),
    }
}

/// Returns all lists of `values` without repetition, the shortest first, or `None` if there are too many.
fn lists(values: &[Value], most: usize) -> Option<Vec<Vec<Value>>> {
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    let mut last = 0;
    for _ in 0..most {
        let mut longer = Vec::new();
        for list in &all[last..] {
            longer.extend((0..values.len()).filter(|i| !list.contains(i)).map(|i| [&list[..], &[i]].concat()));
            if all.len() + longer.len() > LISTS_MAX {
                return None;
            }
        }
        last = all.len();
        all.extend(longer);
    }
    Some(all.into_iter().map(|list| list.into_iter().map(|i| values[i].clone()).collect()).collect())
}
