//! The number of expressions that one text must match at once. If several schemas apply to the same value (`allOf`, references), the
//! compiler intersects their expressions, which takes time and memory that grow exponentially with their number. Passwords are described by
//! three or four of them.

use super::{Part, Prepared, SchemaError, escaped, part_of};
use serde_json::{Map, Value};
use std::{collections::HashMap, fmt::Write};

/// The most expressions (`pattern`, `format`) for one text.
const EXPRESSIONS_MAX: usize = 8;
/// The most schemas that apply to the same value, each by the previous one. Schemas that refer to themselves have no end.
const DEPTH_MAX: usize = 64;

/// Refuses a schema in which more than [`EXPRESSIONS_MAX`] expressions meet at one place, and names the place.
pub(super) fn check(prepared: &Prepared) -> Result<(), SchemaError> {
    let mut merged = Merged { prepared, known: HashMap::new() };
    let mut place = String::new();
    merged.check(&prepared.document, &mut place)?;
    for (name, definition) in prepared.document.get("$defs").and_then(Value::as_object).into_iter().flatten() {
        place = format!("/$defs/{}", escaped(name));
        merged.check(definition, &mut place)?;
    }
    Ok(())
}

struct Merged<'a> {
    prepared: &'a Prepared,
    /// The counts of definitions.
    known: HashMap<&'a str, usize>,
}

impl<'a> Merged<'a> {
    /// Checks the schema at `place` and everything within it.
    fn check(&mut self, schema: &'a Value, place: &mut String) -> Result<(), SchemaError> {
        if self.at(schema, 0) > EXPRESSIONS_MAX {
            let problem = format!(
                "more than {EXPRESSIONS_MAX} expressions (`pattern`, `format`) apply to one text here, with all that is in `allOf` and \
                 referred to: describe it with fewer"
            );
            return Err(SchemaError { path: self.prepared.path(place), problem });
        }
        let length = place.len();
        for (key, value) in schema.as_object().into_iter().flatten() {
            match (part_of(key), value) {
                (Part::Schema | Part::Schemas, Value::Array(list)) => {
                    for (i, part) in list.iter().enumerate() {
                        let _ = write!(place, "/{key}/{i}");
                        self.check(part, place)?;
                        place.truncate(length);
                    }
                }
                (Part::Schema, part) => {
                    let _ = write!(place, "/{key}");
                    self.check(part, place)?;
                    place.truncate(length);
                }
                (Part::Named, Value::Object(named)) => {
                    for (name, part) in named {
                        let _ = write!(place, "/{key}/{}", escaped(name));
                        self.check(part, place)?;
                        place.truncate(length);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The most expressions that apply to a value of this schema.
    fn at(&mut self, schema: &'a Value, depth: usize) -> usize {
        let Some(schema) = schema.as_object() else { return 0 };
        if depth >= DEPTH_MAX {
            return 0;
        }
        let own = ["pattern", "format"].into_iter().filter(|key| schema.contains_key(*key)).count();
        let list = |schema: &'a Map<String, Value>, key| schema.get(key).and_then(Value::as_array).into_iter().flatten();
        let all: usize = list(schema, "allOf").map(|part| self.at(part, depth + 1)).sum();
        let any: usize =
            ["anyOf", "oneOf"].map(|key| list(schema, key).map(|part| self.at(part, depth + 1)).max().unwrap_or(0)).iter().sum();
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix("#/$defs/"));
        let target = target.map_or(0, |name| self.of_definition(name, depth + 1));
        own.saturating_add(all).saturating_add(any).saturating_add(target)
    }

    fn of_definition(&mut self, name: &'a str, depth: usize) -> usize {
        if let Some(&known) = self.known.get(name) {
            return known;
        }
        // A definition that is being counted counts as none within itself.
        self.known.insert(name, 0);
        let definition = self.prepared.document.get("$defs").and_then(|all| all.get(name));
        let expressions = definition.map_or(0, |definition| self.at(definition, depth));
        self.known.insert(name, expressions);
        expressions
    }
}
