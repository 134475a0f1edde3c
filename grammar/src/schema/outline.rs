//! The values that a schema allows, as far as a notation has to know that writes arguments without JSON: the parameters of an object, and
//! for each whether its texts are strings, which texts it has, and which values they are.
//!
//! - [`Arguments`]: the parameters of a tool, wherever references and `allOf` define them
//! - `value`: the values of one parameter; `text`: the strings among them, as an expression
//!
//! An outline never fails. A constraint that it cannot express is *loose*: a strict client is refused, with the place, and for others
//! the constraint is left to the model.

mod text;
mod value;

pub use value::{Effort, Outline, Texts};

use super::{DEPTH_MAX, SchemaError, count, escaped, is_anything, path_of, references::References};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use value::Reader;

/// The parameters of a tool.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    /// In the schema's order.
    pub parameters: Vec<Parameter>,
    /// Whether there may be other parameters, of which nothing is known: the schema names none.
    pub open: bool,
    /// The first constraint that choosing values for the parameters, one by one, does not keep.
    pub loose: Option<SchemaError>,
}

/// A parameter of a tool.
#[derive(Clone, Debug)]
pub struct Parameter {
    pub name: String,
    /// The places of its schemas, all of which apply, as pointers into the tool's; empty if it may be anything.
    pub places: Vec<String>,
    pub required: bool,
    pub values: Outline,
}

impl Arguments {
    /// The parameters of the objects that a schema allows.
    pub fn of(schema: &Value) -> Self {
        let references = References::new(schema);
        let mut object = Object { left: KEYWORDS_MAX, ..Object::default() };
        object.add(&references, "", DEPTH_MAX);
        let mut reader = Reader::new(&references);
        for name in &object.names_required {
            if !object.known.contains_key(name) {
                object.properties.push((name.clone(), object.others.clone()));
            }
        }
        let parameters = object.properties.iter().map(|(name, places)| Parameter {
            name: name.clone(),
            places: places.clone(),
            required: object.required.contains(name),
            values: reader.all_of(places),
        });
        let parameters: Vec<_> = parameters.collect();
        let open = parameters.is_empty() && !object.names_all;
        let others = object.others.first().filter(|_| open);
        let loose = object.loose().or(others).map(|place| SchemaError { path: path_of(place), problem: LOOSE.into() });
        Self { parameters, open, loose }
    }

    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|parameter| parameter.name == name)
    }
}

/// The most keywords that are read for one tool. References to parts within parts multiply a schema.
const KEYWORDS_MAX: usize = 1 << 16;
const LOOSE: &str = "it cannot be kept in this model's notation of calls, which writes each argument by itself, and the tool is strict";

/// The part of a schema that is about objects.
#[derive(Default)]
struct Object {
    properties: Vec<(String, Vec<String>)>,
    /// The index of each property.
    known: HashMap<String, usize>,
    required: HashSet<String>,
    /// The required properties, in their order.
    names_required: Vec<String>,
    /// The places of the schemas of properties without a name.
    others: Vec<String>,
    /// The least properties, and the place that says so.
    least: Option<(u64, String)>,
    /// The place that allows no other properties, or not any.
    closed: Option<String>,
    /// The number of schemas with properties that apply together.
    members: usize,
    /// Whether the schema says which properties there are.
    names_all: bool,
    /// The place of the first constraint on several properties at once.
    several: Option<String>,
    /// The keywords that may still be read.
    left: usize,
}

impl Object {
    /// Adds the schema at `place`, and all that applies beside it.
    fn add(&mut self, references: &References<'_>, place: &str, depth: usize) {
        let Some(schema) = references.root().pointer(place).and_then(Value::as_object) else { return };
        let properties = schema.get("properties").and_then(Value::as_object);
        let Some(left) = self.left.checked_sub(1 + schema.len() + properties.map_or(0, Map::len)).filter(|_| depth > 0) else {
            return self.add_loose(place.to_owned());
        };
        self.left = left;
        self.members += usize::from(properties.is_some());
        for (key, value) in schema {
            let at = format!("{place}/{}", escaped(key));
            match (key.as_str(), value) {
                ("$ref", Value::String(reference)) => match references.place_of(reference) {
                    Some(target) => self.add(references, &target, depth - 1),
                    None => self.add_loose(at),
                },
                ("allOf", Value::Array(list)) => {
                    (0..list.len()).for_each(|i| self.add(references, &format!("{at}/{i}"), depth - 1));
                }
                ("properties", Value::Object(properties)) => self.add_properties(properties, &at),
                ("required", Value::Array(names)) => self.require(names),
                _ => self.constrain(key, value, at),
            }
        }
    }

    fn add_properties(&mut self, properties: &Map<String, Value>, at: &str) {
        self.names_all = true;
        for name in properties.keys() {
            let place = format!("{at}/{}", escaped(name));
            match self.known.get(name) {
                Some(&known) => self.properties[known].1.push(place),
                None => {
                    self.known.insert(name.clone(), self.properties.len());
                    self.properties.push((name.clone(), vec![place]));
                }
            }
        }
    }

    fn require(&mut self, names: &[Value]) {
        for name in names.iter().filter_map(Value::as_str) {
            if self.required.insert(name.to_owned()) {
                self.names_required.push(name.to_owned());
            }
        }
    }

    /// The place of a constraint that is not kept if each property has a value that it allows, and those that are required are there.
    fn loose(&self) -> Option<&String> {
        let least = self.least.as_ref().filter(|(least, _)| *least > self.required.len() as u64).map(|(_, place)| place);
        // The properties of another member may be among those that are not allowed.
        let closed = self.closed.as_ref().filter(|_| self.members > 1);
        self.several.as_ref().or(least).or(closed)
    }

    fn add_loose(&mut self, place: String) {
        self.several.get_or_insert(place);
    }

    fn constrain(&mut self, key: &str, value: &Value, at: String) {
        match key {
            "additionalProperties" | "unevaluatedProperties" if !is_anything(value) => {
                self.names_all |= *value == Value::Bool(false);
                if value.is_object() {
                    self.others.push(at.clone());
                }
                self.closed.get_or_insert(at);
            }
            "minProperties" => {
                let least = count(value).unwrap_or(u64::MAX);
                if self.least.as_ref().is_none_or(|(known, _)| *known < least) {
                    self.least = Some((least, at));
                }
            }
            "anyOf" | "oneOf" | "not" | "if" | "enum" | "const" | "maxProperties" | "propertyNames" => self.add_loose(at),
            "patternProperties" | "dependentRequired" | "dependentSchemas" | "dependencies" if !is_anything(value) => self.add_loose(at),
            _ => {}
        }
    }
}
