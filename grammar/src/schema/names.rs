//! `propertyNames`: the names of a dictionary. A few names become properties; a pattern becomes one of `patternProperties`.

use super::{
    DEPTH_MAX, Extra, Preparer, SchemaError, count, formats, refused, typed,
    values::{ANNOTATIONS, is_of},
};
use crate::expression;
use serde_json::{Map, Value, json};

impl<'a> Preparer<'a> {
    pub(super) fn property_names(
        &mut self,
        object: &'a Map<String, Value>,
        value: &'a Value,
        inner: &str,
        at: &str,
        extra: &mut Extra<'a>,
    ) -> Result<(), SchemaError> {
        // An error in it is reported with its own path.
        self.schema(value, inner)?;
        if let Some(values) = self.values(value, DEPTH_MAX) {
            let names = values.iter().filter_map(Value::as_str);
            let properties: Map<String, Value> = names.map(|name| (name.to_owned(), Value::Bool(true))).collect();
            self.pay(2 + properties.len(), at)?;
            extra.push(("propertyNames", typed(object, json!({"properties": properties, "additionalProperties": false}))));
            return Ok(());
        }
        if let Some(kind) = value.get("type").and_then(Value::as_str).filter(|kind| *kind != "string") {
            return Err(refused(at, "propertyNames", format!("`propertyNames` asks for the type {kind}, and names are strings")));
        }
        let mut patterns = Vec::new();
        if self.name_patterns(value, DEPTH_MAX, &mut patterns).is_none() {
            return self.relax(at, "propertyNames", "names are kept to an `enum`, a `pattern`, a length, or a format that is a pattern");
        }
        if patterns.is_empty() {
            return Ok(());
        }
        let pattern = if patterns.len() == 1 { patterns.pop() } else { expression::all_of(&patterns, &mut self.work) };
        let others = object.get("patternProperties").and_then(Value::as_object);
        match pattern {
            Some(pattern) if others.is_none_or(|others| others.keys().all(|other| *other == pattern)) => {
                let part = json!({"patternProperties": {pattern: true}, "additionalProperties": false});
                extra.push(("propertyNames", typed(object, part)));
                Ok(())
            }
            Some(_) => self.relax(at, "propertyNames", "`patternProperties` are there, too"),
            None => self.relax(at, "propertyNames", "its patterns and lengths together are too complex"),
        }
    }

    /// Collects the patterns that all names of this schema match, or returns `None` if it requires more than patterns.
    fn name_patterns(&mut self, schema: &'a Value, depth: usize, patterns: &mut Vec<String>) -> Option<()> {
        let object = match schema {
            Value::Bool(true) => return Some(()),
            schema => schema.as_object()?,
        };
        self.left = self.left.checked_sub(1 + object.len())?;
        for (key, value) in object {
            match key.as_str() {
                "type" => {
                    let types = value.as_array().map_or_else(|| vec![value], |types| types.iter().collect());
                    let is_string = |kind: &&Value| kind.as_str().is_some_and(|kind| is_of(&"".into(), kind));
                    types.iter().any(is_string).then_some(())?;
                }
                "pattern" => patterns.extend(self.patterns(value.as_str()?)?),
                "format" => patterns.extend(formats::name_pattern(value.as_str()?)?.map(str::to_owned)),
                "allOf" if depth > 0 => value.as_array()?.iter().try_for_each(|part| self.name_patterns(part, depth - 1, patterns))?,
                "$ref" if depth > 0 => {
                    let place = self.place_of(value.as_str()?)?;
                    let root = self.root;
                    self.name_patterns(root.pointer(&place)?, depth - 1, patterns)?;
                }
                "minLength" | "maxLength" => {}
                key if ANNOTATIONS.contains(&key) => {}
                _ => return None,
            }
        }
        let length = |key: &str| object.get(key).and_then(count);
        match (length("minLength").unwrap_or(0), length("maxLength")) {
            (0, None) => {}
            (least, None) => patterns.push(format!(r"^[\x{{0}}-\x{{10FFFF}}]{{{least},}}$")),
            (least, Some(most)) => patterns.push(format!(r"^[\x{{0}}-\x{{10FFFF}}]{{{least},{most}}}$")),
        }
        Some(())
    }
}
