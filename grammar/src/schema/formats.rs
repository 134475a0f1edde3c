//! `format`: an annotation (JSON Schema 2020-12, Validation, 7.2.1), which is kept as far as possible. If a pattern, or the values,
//! contradict it, they win: libraries write formats beside patterns of their own that differ in a time zone or a letter.

use super::{DEPTH_MAX, Part, part_of, push_all_of, size};
use crate::compiler::is_unsatisfiable;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// The formats of the drafts that the compiler supports.
pub(super) const BUILT_IN: [&str; 10] = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
/// The formats of the drafts that are not supported. All others are notes to people, and so is `regex`, whose meaning depends on the
/// reader.
pub(super) const MISSING: [&str; 6] = ["idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"];
/// The most combinations of a format with patterns that are tried for one document; the rest are kept.
const TRIED_MAX: usize = 200;
/// The most schemas that are read or copied to settle the formats of one document.
const LOOKED_AT_MAX: usize = 1 << 16;
/// The bytes of a pattern that count as one schema.
const PATTERN_BYTES_PER_STEP: usize = 64;

/// Returns the pattern of a format of the drafts that is a simple one (RFC 6901; relative pointers: draft-bhutton-relative-json-pointer).
pub(super) fn pattern(format: &str) -> Option<&'static str> {
    match format {
        "json-pointer" => Some("^(?:/(?:[^~/]|~[01])*)*$"),
        "relative-json-pointer" => Some("^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$"),
        _ => None,
    }
}

/// Returns the pattern of a format for names of properties, `Some(None)` for a format that constrains nothing, and `None` for one that is
/// not supported there.
pub(super) fn name_pattern(format: &str) -> Option<Option<&'static str>> {
    match format {
        "uuid" => Some(Some("^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")),
        "date" => Some(Some(
            r"^\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))$",
        )),
        "ipv4" => Some(Some(r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])$")),
        format if BUILT_IN.contains(&format) || MISSING.contains(&format) => None,
        format => Some(pattern(format)),
    }
}

/// Whether a format constrains texts, rather than being a note to people.
pub(super) fn is_kept(format: &str) -> bool {
    BUILT_IN.contains(&format) || MISSING.contains(&format) || pattern(format).is_some()
}

/// Returns a pattern for texts of a format, in a form that models write; not all texts of the format have it.
pub(super) fn text_pattern(format: &str) -> Option<&'static str> {
    match format {
        "date-time" => Some(
            r"^\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)$",
        ),
        "time" => Some(r"^(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)$"),
        "duration" => {
            Some(r"^P(?:\d+W|\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|(?:\d+D)?T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)|\d+D)$")
        }
        "email" => Some(r"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63}$"),
        "hostname" => Some(r"^[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$"),
        "ipv6" => Some(
            r"^(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,2})?::(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,3})?)$",
        ),
        "uri" => Some(
            r"^[A-Za-z][A-Za-z0-9+.-]*:(?://[A-Za-z0-9.-]+(?::\d{1,5})?)?(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(?:\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(?:#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?$",
        ),
        format => name_pattern(format).flatten(),
    }
}

/// Removes the formats of a rewritten document that contradict the patterns or values of the same text, whether they meet in one schema, by
/// `allOf` or by a reference.
pub(super) fn settle(document: &mut Value) {
    let definitions = document.get("$defs").cloned().unwrap_or_default();
    let mut settling = Settling { definitions: &definitions, known: HashMap::new(), left: LOOKED_AT_MAX };
    settling.schema(document);
    if let Some(own) = document.get_mut("$defs").and_then(Value::as_object_mut) {
        own.values_mut().for_each(|definition| settling.schema(definition));
    }
}

struct Settling<'d> {
    definitions: &'d Value,
    /// Whether a format and the patterns beside it exclude each other.
    known: HashMap<(String, Vec<String>), bool>,
    /// The schemas that may still be read or copied.
    left: usize,
}

/// The constraints of one text that formats are compared with.
#[derive(Default)]
struct Said {
    formats: Vec<String>,
    patterns: Vec<String>,
    has_values: bool,
}

impl<'d> Settling<'d> {
    fn schema(&mut self, schema: &mut Value) {
        let mut said = Said::default();
        self.collect(schema, DEPTH_MAX, &mut said);
        for format in std::mem::take(&mut said.formats) {
            if said.has_values || self.contradict(&format, &said.patterns) {
                self.take_out(schema, &format, DEPTH_MAX);
            }
        }
        for (key, value) in schema.as_object_mut().into_iter().flatten() {
            match (part_of(key), value) {
                (Part::Schema | Part::Schemas, Value::Array(list)) => list.iter_mut().for_each(|part| self.schema(part)),
                (Part::Schema, part) => self.schema(part),
                (Part::Named, Value::Object(named)) => named.values_mut().for_each(|part| self.schema(part)),
                _ => {}
            }
        }
    }

    fn target(&self, schema: &Map<String, Value>) -> Option<&'d Value> {
        self.definitions.get(schema.get("$ref")?.as_str()?.strip_prefix("#/$defs/")?)
    }

    fn pay(&mut self, schemas: usize) -> bool {
        let left = self.left.checked_sub(schemas);
        self.left = left.unwrap_or(0);
        left.is_some()
    }

    fn collect(&mut self, schema: &Value, depth: usize, said: &mut Said) {
        let Some(schema) = schema.as_object() else { return };
        let bytes = schema.get("pattern").and_then(Value::as_str).map_or(0, str::len);
        if !self.pay(1 + bytes / PATTERN_BYTES_PER_STEP) {
            return;
        }
        let text = |key: &str| schema.get(key).and_then(Value::as_str).map(str::to_owned);
        said.formats.extend(text("format"));
        said.patterns.extend(text("pattern"));
        said.has_values |= schema.contains_key("enum") || schema.contains_key("const");
        if depth == 0 || said.formats.len() + said.patterns.len() > TRIED_MAX {
            return;
        }
        if let Some(target) = self.target(schema) {
            self.collect(target, depth - 1, said);
        }
        for part in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            self.collect(part, depth - 1, said);
        }
    }

    fn contradict(&mut self, format: &str, patterns: &[String]) -> bool {
        let key = (format.to_owned(), patterns.to_vec());
        if patterns.is_empty() || (self.known.len() >= TRIED_MAX && !self.known.contains_key(&key)) {
            return false;
        }
        *self.known.entry(key).or_insert_with(|| {
            let all: Vec<Value> = patterns.iter().map(|pattern| json!({"type": "string", "pattern": pattern})).collect();
            let without = json!({"type": "string", "allOf": all});
            let mut with = without.clone();
            with["format"] = format.into();
            is_unsatisfiable(with) && !is_unsatisfiable(without)
        })
    }

    /// Removes a format from a schema and from its references' targets, which are copied first, as the format still holds elsewhere.
    fn take_out(&mut self, schema: &mut Value, format: &str, depth: usize) {
        let Some(schema) = schema.as_object_mut() else { return };
        if schema.get("format").is_some_and(|own| own == format) {
            schema.remove("format");
        }
        if depth == 0 {
            return;
        }
        for part in schema.get_mut("allOf").and_then(Value::as_array_mut).into_iter().flatten() {
            self.take_out(part, format, depth - 1);
        }
        let mut said = Said::default();
        if let Some(target) = self.target(schema) {
            self.collect(target, depth - 1, &mut said);
            if said.formats.iter().any(|other| other == format) && self.pay(size(target)) {
                let mut copy = target.clone();
                self.take_out(&mut copy, format, depth - 1);
                schema.remove("$ref");
                push_all_of(schema, copy);
            }
        }
    }
}
