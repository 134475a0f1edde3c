//! The values that a schema allows.

use super::{
    super::{DEPTH_MAX, count, formats, is_anything, references::References, values::same},
    KEYWORDS_MAX,
    text::{Text, joined},
};
use crate::{expression, lark, numbers};
use serde_json::Value;
use std::collections::HashSet;

/// The most steps of rewriting patterns for one request, which take about thirty milliseconds.
const TRANSITIONS_MAX: usize = 1 << 16;

/// Types, as a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Types(u8);

impl Types {
    const NONE: Self = Self(0);
    const NULL: Self = Self(1);
    const BOOLEAN: Self = Self(2);
    const INTEGER: Self = Self(4);
    /// Numbers that are no integers.
    const FRACTION: Self = Self(8);
    const STRING: Self = Self(16);
    const ARRAY: Self = Self(32);
    const OBJECT: Self = Self(64);
    const NUMBER: Self = Self(4 | 8);
    const ALL: Self = Self(127);

    fn named(name: &str) -> Self {
        match name {
            "null" => Self::NULL,
            "boolean" => Self::BOOLEAN,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER,
            "string" => Self::STRING,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::NONE,
        }
    }

    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(number) if number.as_f64().is_none_or(|number| number.fract() == 0.0) => Self::INTEGER,
            Value::Number(_) => Self::FRACTION,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// The values that a schema allows.
#[derive(Clone, Debug)]
pub struct Outline {
    types: Types,
    /// The strings among them.
    text: Text,
    /// All others, if they are few.
    values: Option<Vec<Value>>,
    /// The types, apart from strings, of which some values are not allowed.
    constrained: Types,
}

/// The texts that stand for the values of a schema where strings have no quotation marks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Texts {
    /// JSON: no string is allowed.
    Json,
    /// Any text.
    Any,
    /// One of these.
    Few(Vec<String>),
    /// Those of [a terminal](Outline::terminal), if there is one; else any text stands for a value, which may not be allowed.
    Terminal,
    /// Texts that are not known exactly: any text stands for a value, which may not be allowed.
    Loose,
}

/// The work that writing terminals may take, for one request.
#[derive(Debug)]
pub struct Effort(expression::Work);

impl Default for Effort {
    fn default() -> Self {
        Self(expression::Work::of(TRANSITIONS_MAX))
    }
}

impl Outline {
    /// Any value.
    pub const ANY: Self = Self { types: Types::ALL, text: Text::Any, values: None, constrained: Types::NONE };
    const NONE: Self = Self { types: Types::NONE, text: Text::Values(Vec::new()), values: None, constrained: Types::NONE };
    const UNKNOWN: Self = Self { types: Types::ALL, text: Text::Loose, values: None, constrained: Types::ALL };

    /// Whether all values are strings.
    pub fn is_text(&self) -> bool {
        self.types == Types::STRING
    }

    /// Whether strings are allowed.
    pub fn allows_text(&self) -> bool {
        self.types.has(Types::STRING)
    }

    /// Whether a value that is no string is allowed, as far as its type and a list of values tell.
    pub fn allows(&self, value: &Value) -> bool {
        let is_known = |values: &Vec<Value>| {
            let value = same(value);
            values.iter().any(|known| same(known) == value)
        };
        self.types.has(Types::of(value)) && self.values.as_ref().is_none_or(is_known)
    }

    /// The texts that stand for the values.
    pub fn texts(&self) -> Texts {
        if !self.allows_text() {
            return Texts::Json;
        }
        let rest = self.types.without(Types::STRING);
        match (&self.text, &self.values) {
            (Text::Values(texts), _) if rest == Types::NONE && !texts.is_empty() => Texts::Few(texts.clone()),
            (Text::Values(texts), Some(values)) if !rest.has(self.constrained) => {
                let values = values.iter().filter(|value| rest.has(Types::of(value)));
                Texts::Few(texts.iter().cloned().chain(values.map(Value::to_string)).collect())
            }
            _ if rest.without(self.free()) != Types::NONE => Texts::Loose,
            (Text::Any, _) => Texts::Any,
            (Text::Loose, _) => Texts::Loose,
            // Lists and objects are no expressions.
            _ if rest.has(Types::ARRAY.or(Types::OBJECT)) => Texts::Loose,
            _ => Texts::Terminal,
        }
    }

    /// The terminal, in llguidance's Lark, of the texts that stand for the values, or `None` if there is none, or finding it takes too much.
    pub fn terminal(&self, effort: &mut Effort) -> Option<String> {
        let text = self.text.terminal(&mut effort.0)?;
        Some(joined([text].into_iter().chain(scalars(self.types.without(Types::STRING))).collect(), " | "))
    }

    /// The types, apart from strings, of which all values are allowed.
    fn free(&self) -> Types {
        let Some(values) = &self.values else { return self.types.without(self.constrained).without(Types::STRING) };
        let has = |value: Value| values.contains(&value);
        let null = if has(Value::Null) { Types::NULL } else { Types::NONE };
        let both = if has(true.into()) && has(false.into()) { Types::BOOLEAN } else { Types::NONE };
        null.or(both).and(self.types)
    }

    fn and(self, other: Self) -> Self {
        let values = match (self.values, other.values) {
            (Some(a), Some(b)) => {
                let b: HashSet<String> = b.iter().map(same).collect();
                Some(a.into_iter().filter(|value| b.contains(&same(value))).collect())
            }
            (a, b) => a.or(b),
        };
        let (types, constrained) = (self.types.and(other.types), self.constrained.or(other.constrained));
        Self { types, text: self.text.and(other.text), values, constrained }
    }

    fn or(self, other: Self) -> Self {
        let free = self.free().or(other.free());
        let types = self.types.or(other.types);
        let have_rest = [&self, &other].map(|outline| outline.types.without(Types::STRING) != Types::NONE);
        let values = match (self.values, other.values, have_rest) {
            (_, values, [false, _]) | (values, _, [_, false]) => values,
            (Some(mut values), Some(more), _) => {
                values.extend(more);
                Some(values)
            }
            _ => None,
        };
        let constrained = match values {
            Some(_) => self.constrained.or(other.constrained),
            None => types.without(Types::STRING).without(free),
        };
        let have_text = [self.types, other.types].map(|types| types.has(Types::STRING));
        let text = match have_text.into() {
            (true, true) => self.text.or(other.text),
            (true, false) => self.text,
            (false, _) => other.text,
        };
        Self { types, text, values, constrained }
    }
}

/// The terminals of the scalars of some types.
fn scalars(types: Types) -> impl Iterator<Item = String> {
    let number = if types.has(Types::FRACTION) { Some(numbers::number_terminal()) } else { None };
    let integer = if types.and(Types::NUMBER) == Types::INTEGER { Some(numbers::integer_terminal()) } else { None };
    let null = types.has(Types::NULL).then(|| lark::literal("null"));
    let boolean = types.has(Types::BOOLEAN).then(|| "/true|false/".to_owned());
    [null, boolean, integer, number].into_iter().flatten()
}

/// Reads the outlines of one schema's parts.
pub(super) struct Reader<'r, 'a> {
    references: &'r References<'a>,
    /// The keywords that may still be read.
    left: usize,
}

impl<'r, 'a> Reader<'r, 'a> {
    pub(super) fn new(references: &'r References<'a>) -> Self {
        Self { references, left: KEYWORDS_MAX }
    }

    /// The values that match the schemas at all of these places.
    pub(super) fn all_of(&mut self, places: &[String]) -> Outline {
        places.iter().fold(Outline::ANY, |all, place| all.and(self.at(place, DEPTH_MAX)))
    }

    fn at(&mut self, place: &str, depth: usize) -> Outline {
        match self.references.root().pointer(place) {
            Some(schema) => self.outline(schema, depth),
            None => Outline::UNKNOWN,
        }
    }

    fn outline(&mut self, schema: &'a Value, depth: usize) -> Outline {
        let object = match schema {
            Value::Object(object) => object,
            Value::Bool(false) => return Outline::NONE,
            _ => return Outline::ANY,
        };
        let Some(left) = self.left.checked_sub(1 + object.len()).filter(|_| depth > 0) else { return Outline::UNKNOWN };
        self.left = left;
        object.iter().fold(Outline::ANY, |all, (key, value)| all.and(self.keyword(key, value, depth - 1)))
    }

    fn any_of(&mut self, options: &'a [Value], depth: usize) -> Outline {
        options.iter().map(|option| self.outline(option, depth)).reduce(Outline::or).unwrap_or(Outline::UNKNOWN)
    }

    fn one_of(&mut self, options: &'a [Value], depth: usize) -> Outline {
        let options: Vec<_> = options.iter().map(|option| self.outline(option, depth)).collect();
        let shared = shared(&options);
        let are_few = options.iter().all(|option| option.values.is_some() && matches!(option.text, Text::Values(_)));
        let any = options.into_iter().reduce(Outline::or).unwrap_or(Outline::UNKNOWN);
        if are_few {
            return any;
        }
        // A value that matches two options is not allowed.
        let text = if shared.has(Types::STRING) { Text::Loose } else { any.text };
        Outline { text, constrained: any.constrained.or(shared.without(Types::STRING)), ..any }
    }

    fn keyword(&mut self, key: &str, value: &'a Value, depth: usize) -> Outline {
        let constrained = |types: Types| Outline { constrained: types, ..Outline::ANY };
        let text = |text: Text| Outline { text, ..Outline::ANY };
        match (key, value) {
            ("type", Value::String(name)) => Outline { types: Types::named(name), ..Outline::ANY },
            ("type", Value::Array(names)) => {
                let types = names.iter().filter_map(Value::as_str).map(Types::named).fold(Types::NONE, Types::or);
                Outline { types, ..Outline::ANY }
            }
            ("const", value) => few(std::slice::from_ref(value)),
            ("enum", Value::Array(values)) => match self.left.checked_sub(values.len()) {
                Some(left) => {
                    self.left = left;
                    few(values)
                }
                None => Outline::UNKNOWN,
            },
            ("$ref", Value::String(reference)) => match self.references.place_of(reference) {
                Some(place) => self.at(&place, depth),
                None => Outline::UNKNOWN,
            },
            ("allOf", Value::Array(all)) => all.iter().fold(Outline::ANY, |outline, part| outline.and(self.outline(part, depth))),
            ("anyOf", Value::Array(options)) => self.any_of(options, depth),
            ("oneOf", Value::Array(options)) => self.one_of(options, depth),
            ("pattern", Value::String(pattern)) => text(Text::Pattern(pattern.clone())),
            ("minLength", length) => text(count(length).map_or(Text::Loose, |least| Text::Length { least, most: None })),
            ("maxLength", length) => text(count(length).map_or(Text::Loose, |most| Text::Length { least: 0, most: Some(most) })),
            ("format", Value::String(format)) if formats::is_kept(format) => text(Text::Format(format.clone())),
            ("not" | "if" | "$dynamicRef" | "$recursiveRef", _) => Outline::UNKNOWN,
            ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf", _) => constrained(Types::NUMBER),
            ("minItems" | "maxItems" | "uniqueItems" | "contains" | "prefixItems", _) => constrained(Types::ARRAY),
            ("items" | "additionalItems" | "unevaluatedItems", value) if !is_anything(value) => constrained(Types::ARRAY),
            ("minProperties" | "maxProperties" | "propertyNames" | "required", _) => constrained(Types::OBJECT),
            ("properties" | "patternProperties" | "additionalProperties" | "unevaluatedProperties", value) if !is_anything(value) => {
                constrained(Types::OBJECT)
            }
            ("dependencies" | "dependentRequired" | "dependentSchemas", _) => constrained(Types::ALL),
            _ => Outline::ANY,
        }
    }
}

/// The types of which a value may match two of these outlines.
fn shared(options: &[Outline]) -> Types {
    let mut seen = Types::NONE;
    options.iter().fold(Types::NONE, |shared, option| {
        let both = seen.and(option.types);
        seen = seen.or(option.types);
        shared.or(both)
    })
}

/// The outline of a few values.
fn few(values: &[Value]) -> Outline {
    let types = values.iter().map(Types::of).fold(Types::NONE, Types::or);
    let texts = values.iter().filter_map(Value::as_str).map(str::to_owned).collect();
    let others = values.iter().filter(|value| !value.is_string()).cloned().collect();
    Outline { types, text: Text::Values(texts), values: Some(others), constrained: Types::NONE }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn outline(schema: Value) -> Outline {
        let root =
            json!({"p": schema, "$defs": {"E": {"enum": ["a", "b"]}, "L": {"$ref": "#/$defs/L"}, "S": {"$anchor": "s", "type": "string"}}});
        Reader::new(&References::new(&root)).all_of(&["/p".to_owned()])
    }

    fn few(texts: &[&str]) -> Texts {
        Texts::Few(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    #[test]
    fn texts_follow_from_types_values_and_references() {
        for (schema, texts) in [
            (json!({}), Texts::Any),
            (json!(true), Texts::Any),
            (json!(false), Texts::Json),
            (json!({"type": "integer", "minimum": 3}), Texts::Json),
            (json!({"type": "string", "title": "t", "format": "password"}), Texts::Any),
            (json!({"$ref": "#s"}), Texts::Any),
            (json!({"type": ["string", "null", "number", "array"]}), Texts::Any),
            (json!({"$ref": "#/$defs/E"}), few(&["a", "b"])),
            (json!({"allOf": [{"$ref": "#/$defs/E"}, {"enum": ["b", "c"]}]}), few(&["b"])),
            (json!({"anyOf": [{"$ref": "#/$defs/E"}, {"const": 1}, {"type": "null", "enum": [null]}]}), few(&["a", "b", "1", "null"])),
            (json!({"enum": ["a", "abc", 7], "maxLength": 2, "format": "date"}), few(&["a", "7"])),
            (json!({"enum": ["a", 7], "minimum": 8}), Texts::Loose),
            (json!({"enum": ["a", 7], "type": "string"}), few(&["a"])),
            (json!({"anyOf": [{"type": "string"}, {"const": null}]}), Texts::Any),
            (json!({"anyOf": [{"type": "string"}, {"const": 5}]}), Texts::Loose),
            (json!({"anyOf": [{"type": "string"}, {"type": "object", "required": ["a"]}]}), Texts::Loose),
            (json!({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string"}]}), Texts::Any),
            (json!({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string"}]}), Texts::Loose),
            (json!({"oneOf": [{"type": "string"}, {"type": "null"}]}), Texts::Any),
            (json!({"not": {"const": "a"}}), Texts::Loose),
            (json!({"$ref": "#/$defs/L"}), Texts::Loose),
            (json!({"$ref": "#/$defs/none"}), Texts::Loose),
            (json!({"type": "string", "maxLength": 3}), Texts::Terminal),
        ] {
            assert_eq!(outline(schema.clone()).texts(), texts, "{schema}");
        }
    }

    #[test]
    fn patterns_lengths_and_scalars_are_terminals() {
        let formats = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
        for format in formats {
            assert!(outline(json!({"type": "string", "format": format})).terminal(&mut Effort::default()).is_some(), "{format}");
        }
        for (schema, terminal) in [
            (json!({"type": "string", "maxLength": 3}), Some("(/(?s:.{0,3})/)")),
            (json!({"type": "string", "pattern": "b", "format": "date"}), Some(r"(((/(.|\n)*(?:b)(.|\n)*/)))")),
            (
                json!({"anyOf": [{"type": "string", "pattern": "^a/$"}, {"type": ["null", "boolean"]}]}),
                Some(r#"((/(?:a\/)/) | "null" | /true|false/)"#),
            ),
            (json!({"type": "string", "pattern": "(?<=a)b"}), None),
            (json!({"type": "string", "format": "iri"}), None),
        ] {
            assert_eq!(outline(schema.clone()).terminal(&mut Effort::default()).as_deref(), terminal, "{schema}");
        }
        let long = outline(json!({"type": "string", "pattern": "a".repeat(40_000)}));
        let mut effort = Effort::default();
        assert!(long.terminal(&mut effort).is_some() && long.terminal(&mut effort).is_none(), "one request has so much work");
    }

    #[test]
    fn values_that_are_no_strings_are_told_by_type_and_by_list() {
        let values = outline(json!({"anyOf": [{"const": "1"}, {"enum": [2, 2.5, null]}]}));
        assert!(values.allows(&json!(2.0)) && values.allows(&json!(null)) && !values.allows(&json!(1)) && !values.is_text());
        let types = outline(json!({"type": ["string", "integer"]}));
        assert!(types.allows(&json!(7)) && !types.allows(&json!(7.5)) && !types.allows(&json!(null)) && types.allows_text());
    }

    /// References to parts within parts would take for ever.
    #[test]
    fn schemas_that_multiply_themselves_are_left_after_some_work() {
        let link = |n: usize| (format!("d{n}"), json!({"anyOf": vec![json!({"$ref": format!("#/$defs/d{}", n + 1)}); 10]}));
        let mut definitions: serde_json::Map<_, _> = (0..12).map(link).collect();
        definitions.insert("d12".into(), json!({"enum": (0..900).collect::<Vec<_>>()}));
        let schema = json!({"properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
        assert_eq!(super::super::Arguments::of(&schema).parameters[0].values.texts(), Texts::Loose);
    }
}
