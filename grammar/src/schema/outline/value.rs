//! The values that a schema allows.

use super::{
    super::{DEPTH_MAX, count, formats, is_anything, references::References, values::same},
    KEYWORDS_MAX,
    text::{Text, joined},
};
use crate::{expression, lark, numbers};
use serde_json::Value;
use std::collections::HashSet;

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
    /// The texts of a terminal in llguidance's Lark.
    Terminal(String),
    /// Texts that are not known exactly: any text stands for a value, which may not be allowed.
    Loose,
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
            (Text::Values(texts), Some(values)) => {
                let values = values.iter().filter(|value| rest.has(Types::of(value)));
                Texts::Few(texts.iter().cloned().chain(values.map(Value::to_string)).collect())
            }
            _ if rest.without(self.free()) != Types::NONE => Texts::Loose,
            (Text::Any, _) => Texts::Any,
            // Lists and objects are no expressions.
            _ if rest.has(Types::ARRAY.or(Types::OBJECT)) => Texts::Loose,
            (text, _) => match text.terminal(&mut expression::Work::default()) {
                Some(terminal) => Texts::Terminal(joined([terminal].into_iter().chain(scalars(rest)).collect(), " | ")),
                None => Texts::Loose,
            },
        }
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
        let constrained = types.without(Types::STRING).without(free);
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
        let are_few = options.iter().all(|option| matches!(option.text, Text::Values(_)));
        let any = options.into_iter().reduce(Outline::or).unwrap_or(Outline::UNKNOWN);
        // What matches two options is not allowed.
        let text = if shared.has(Types::STRING) && !are_few { Text::Loose } else { any.text };
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
