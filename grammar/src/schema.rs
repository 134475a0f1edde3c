//! A client's JSON Schema, checked part by part and rewritten for the compiler.
//!
//! A constraint that cannot be kept is refused, with its path. Keywords that constrain nothing (titles, unknown keywords, formats that no
//! draft defines) are left out. References may be pointers, anchors or ids within the schema; their targets move to `$defs` under plain
//! names. Keywords that the compiler lacks are rewritten with those that it has:
//!
//! - `conditions`: `if`, `dependent…`, `contains`, `oneOf` as choices between schemas; `negation`: `not`, and negations for the others
//! - `values`: schemas with few values, and lists without repetition made of them; `names`: `propertyNames`
//! - `formats`: formats that are patterns, and formats that a pattern contradicts
//! - `merged`: the number of expressions that apply to one text
//! - `references`: the places that references name; [`outline`]: the values that a schema allows, for notations that are not JSON
//!
//! Some constraints can only be relaxed: they are refused if the client is strict, and otherwise left to the model.
//!
//! A schema may refer to itself many times over, so all of this is bounded: the rewriting, the comparisons, and the depth.

mod conditions;
mod formats;
mod merged;
mod names;
mod negation;
pub mod outline;
mod references;
mod values;

use crate::{disjoint::Budget, expression, numbers::FRACTION_DIGITS_MAX};
use conditions::Conditional;
use references::References;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt::Write,
};

/// The most distinct references.
const REFERENCES_MAX: usize = 2000;
/// The most keywords and values that are rewritten: twice as many as a schema of 256 KiB can have. The target of a reference is rewritten
/// separately, so references to parts within parts multiply a schema.
const REWRITTEN_MAX: usize = 1 << 18;
/// The bound of integers that are exact as floating-point numbers, as which most readers of JSON read them.
const EXACT_INTEGER_MAX: f64 = 9_007_199_254_740_992.0;

/// An error in one part of a schema.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{problem}")]
pub struct SchemaError {
    /// The path of the part, such as `.properties.tags.items`; empty for the whole.
    pub path: String,
    pub problem: String,
}

/// White space between the lexemes of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Whitespace {
    /// A space, or a line break with indentation, as people write JSON. Models are known to get lost in endless white space, so no more
    /// than that is allowed.
    #[default]
    Some,
    None,
}

/// The terms on which a schema is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Terms {
    pub whitespace: Whitespace,
    /// Whether constraints that could only be relaxed are refused.
    pub strict: bool,
}

impl From<Whitespace> for Terms {
    fn from(whitespace: Whitespace) -> Self {
        Self { whitespace, strict: false }
    }
}

/// The white space that is allowed at one place.
pub(crate) const WHITESPACE: &str = r"( |\r?\n[ \t]{0,40})";

/// A rewritten schema, or a part of one.
#[derive(Debug)]
pub(crate) struct Prepared {
    document: Value,
    /// The place of the part in the client's schema; empty for the whole.
    at: String,
    /// The original place of each definition, by its new name.
    origins: BTreeMap<String, String>,
    /// The client's places of the parts that the rewriting has created or moved.
    moved: BTreeMap<String, String>,
}

impl Prepared {
    pub(crate) fn document(&self) -> &Value {
        &self.document
    }

    /// The places of the parts of the schema at `place`, pointers into the document like it. Parts that can never be at fault are left out.
    pub(crate) fn parts(&self, place: &str) -> Vec<String> {
        let Some(schema) = self.document.pointer(place).and_then(Value::as_object) else { return Vec::new() };
        let mut places = Vec::new();
        for (key, value) in schema {
            let mut part = |name: &str, value: &Value| {
                if !is_faultless(value) {
                    places.push(format!("{place}/{key}{}{}", if name.is_empty() { "" } else { "/" }, escaped(name)));
                }
            };
            match (part_of(key), value) {
                (Part::Schema, Value::Array(list)) | (Part::Schemas, Value::Array(list)) => {
                    list.iter().enumerate().for_each(|(i, value)| part(&i.to_string(), value));
                }
                (Part::Schema, _) => part("", value),
                (Part::Named, Value::Object(named)) => named.iter().for_each(|(name, value)| part(name, value)),
                _ => {}
            }
            if let ("$ref", Some(definition)) = (key.as_str(), value.as_str().and_then(|target| target.strip_prefix('#')))
                && !place.starts_with(definition)
            {
                places.push(definition.to_owned());
            }
        }
        places
    }

    /// A part as a document of its own, with the definitions that it needs, and its number of keywords and values.
    pub(crate) fn alone(&self, place: &str) -> (Value, usize) {
        let mut part = self.document.pointer(place).cloned().unwrap_or(Value::Bool(true));
        let mut size = size(&part);
        let mut needed = Map::new();
        let mut waiting = Vec::new();
        references(&part, &mut waiting);
        let all = self.document.get("$defs");
        while let Some(name) = waiting.pop() {
            if let Some(definition) = all.and_then(|all| all.get(&name)).filter(|_| !needed.contains_key(&name)) {
                size += self::size(definition);
                references(definition, &mut waiting);
                needed.insert(name, definition.clone());
            }
        }
        if let Some(part) = part.as_object_mut().filter(|_| !needed.is_empty()) {
            part.insert("$defs".into(), needed.into());
        }
        (part, size)
    }

    /// A place in the rewritten document as a path in the client's.
    pub(crate) fn path(&self, place: &str) -> String {
        if let Some((name, rest)) = place.strip_prefix("/$defs/").map(|rest| rest.split_once('/').unwrap_or((rest, "")))
            && let Some(origin) = self.origins.get(name)
        {
            return path_of(&self.unmoved(&format!("{origin}{}", format!("/{rest}").trim_end_matches('/'))));
        }
        path_of(&self.unmoved(&format!("{}{place}", self.at)))
    }

    /// Translates a place that may lie in a part created or moved by the rewriting to the client's.
    fn unmoved(&self, place: &str) -> String {
        let mut client = String::new();
        for part in place.split('/').skip(1) {
            client.push('/');
            client.push_str(part);
            if let Some(moved) = self.moved.get(&client) {
                client.clone_from(moved);
                // A part created from a keyword has no places of the client's within it; a member of a list that was moved has.
                if moved.rsplit('/').next().is_none_or(|last| last.parse::<usize>().is_err()) {
                    break;
                }
            }
        }
        client
    }
}

/// Whether any value matches, or all values of some types, so that the schema surely compiles.
fn is_faultless(schema: &Value) -> bool {
    schema.as_object().is_some_and(|schema| schema.keys().all(|key| key == "type")) || schema.is_boolean()
}

/// The number of keywords and values in a schema.
fn size(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(size).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(size).sum::<usize>(),
        _ => 1,
    }
}

/// The names of the definitions that a rewritten schema refers to. At worst, a value that looks like a reference adds one too many.
fn references(value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| references(value, names)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), value) {
                    ("$ref", Value::String(target)) => names.extend(target.strip_prefix("#/$defs/").map(str::to_owned)),
                    _ => references(value, names),
                }
            }
        }
        _ => {}
    }
}

/// The kind of a keyword's value.
enum Part {
    Schema,
    Schemas,
    Named,
    Other,
}

fn part_of(keyword: &str) -> Part {
    match keyword {
        "items" | "additionalItems" | "additionalProperties" => Part::Schema,
        "prefixItems" | "anyOf" | "allOf" | "oneOf" => Part::Schemas,
        "properties" | "patternProperties" => Part::Named,
        _ => Part::Other,
    }
}

/// Rewrites a schema, or returns the part of it that cannot be kept.
pub(crate) fn prepare(schema: &Value, terms: Terms) -> Result<Prepared, SchemaError> {
    prepare_part(schema, &[String::new()], terms)
}

/// Rewrites the schemas at `places` (pointers into `schema`), all of which apply to one value, as a document of their own.
pub(crate) fn prepare_part(schema: &Value, places: &[String], terms: Terms) -> Result<Prepared, SchemaError> {
    let references = References::new(schema);
    references.collect()?;
    let mut preparer = Preparer {
        root: schema,
        references,
        names: HashMap::new(),
        waiting: BTreeSet::new(),
        taken: HashSet::new(),
        numbers: HashMap::new(),
        comparisons: Budget::default(),
        left: REWRITTEN_MAX,
        strict: terms.strict,
        work: expression::Work::default(),
        patterns: HashMap::new(),
        moved: BTreeMap::new(),
    };
    let at = if let [only] = places { only.clone() } else { String::new() };
    let mut document = match preparer.all_of(places)? {
        Value::Object(object) => object,
        Value::Bool(true) => Map::new(),
        _ => return Err(SchemaError { path: path_of(&at), problem: "no value matches this schema".into() }),
    };
    if let Some(draft) = schema.get("$schema").filter(|draft| is_known_draft(draft)) {
        document.insert("$schema".into(), draft.clone());
    }
    let mut definitions = Map::new();
    let mut origins = BTreeMap::new();
    while let Some(place) = preparer.waiting.pop_first() {
        let name = preparer.names[&place].clone();
        let target = schema.pointer(&place).expect("a reference was resolved when it was named");
        let rewritten = preparer.schema(target, &place)?;
        definitions.insert(name.clone(), rewritten);
        origins.insert(name, place);
    }
    if !definitions.is_empty() {
        document.insert("$defs".into(), definitions.into());
    }
    let layout = match terms.whitespace {
        Whitespace::Some => json!({"whitespace_pattern": WHITESPACE}),
        Whitespace::None => json!({"whitespace_flexible": false}),
    };
    let mut document = document.into();
    formats::settle(&mut document);
    let mut prepared = Prepared { document, at, origins, moved: preparer.moved };
    merged::check(&prepared)?;
    prepared.document["x-guidance"] = layout;
    Ok(prepared)
}

struct Preparer<'a> {
    root: &'a Value,
    references: References<'a>,
    /// New names of the places that are referred to.
    names: HashMap<String, String>,
    /// Places that have yet to be rewritten.
    waiting: BTreeSet<String>,
    taken: HashSet<String>,
    /// The last number that was appended to each name that was taken.
    numbers: HashMap<String, usize>,
    comparisons: Budget,
    /// Keywords and values that may still be rewritten.
    left: usize,
    strict: bool,
    work: expression::Work,
    /// The patterns that replace one with look-around.
    patterns: HashMap<String, Option<Vec<String>>>,
    /// The client's places of the parts that are created or moved.
    moved: BTreeMap<String, String>,
}

/// The schemas created from a schema's keywords that apply beside it, each with its keyword.
type Extra<'a> = Vec<(&'a str, Value)>;

impl<'a> Preparer<'a> {
    /// The place that a reference names.
    fn place_of(&self, reference: &str) -> Option<String> {
        self.references.place_of(reference)
    }

    /// The plain name of a place in the new `$defs`.
    fn name_of(&mut self, place: String, at: &str) -> Result<String, SchemaError> {
        if let Some(name) = self.names.get(&place) {
            return Ok(name.clone());
        }
        if self.names.len() >= REFERENCES_MAX {
            return Err(refused(at, "$ref", format!("there are more than {REFERENCES_MAX} different references")));
        }
        let last = place.rsplit('/').next().unwrap_or_default();
        let is_plain = !last.is_empty() && last.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        let wanted = if is_plain { last.to_owned() } else { format!("part{}", self.names.len()) };
        let mut name = wanted.clone();
        if self.taken.contains(&name) {
            let number = self.numbers.entry(wanted.clone()).or_insert(1);
            while self.taken.contains(&name) {
                *number += 1;
                name = format!("{wanted}-{number}");
            }
        }
        self.taken.insert(name.clone());
        self.waiting.insert(place.clone());
        self.names.insert(place, name.clone());
        Ok(name)
    }

    /// Pays for `rewritten` keywords and values.
    fn pay(&mut self, rewritten: usize, at: &str) -> Result<(), SchemaError> {
        let too_many = || SchemaError {
            path: path_of(at),
            problem: format!("with all that it refers to, the schema has more than {REWRITTEN_MAX} keywords and values here"),
        };
        self.left = self.left.checked_sub(rewritten).ok_or_else(too_many)?;
        Ok(())
    }

    /// Rewrites the schemas at these places as one.
    fn all_of(&mut self, places: &[String]) -> Result<Value, SchemaError> {
        let root = self.root;
        let mut all = Vec::new();
        for (i, place) in places.iter().enumerate() {
            let missing = || SchemaError { path: path_of(place), problem: "there is no such part".into() };
            all.push(self.schema(root.pointer(place).ok_or_else(missing)?, place)?);
            if places.len() > 1 {
                self.moved.insert(format!("/allOf/{i}"), place.clone());
            }
        }
        Ok(match all.len() {
            0 => Value::Bool(true),
            1 => all.remove(0),
            _ => json!({"allOf": all}),
        })
    }

    /// Rewrites the schema at `at`.
    fn schema(&mut self, schema: &'a Value, at: &str) -> Result<Value, SchemaError> {
        let object = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(object) => object,
            _ => return Err(SchemaError { path: path_of(at), problem: "a schema is an object, `true` or `false`".into() }),
        };
        self.pay(1 + object.len(), at)?;
        let mut new = Map::new();
        let mut extra = Extra::new();
        let conditionals = self.conditionals(object, at);
        for (key, value) in object {
            self.keyword(object, key, value, at, &mut new, &mut extra, &conditionals)?;
        }
        self.conditions(object, &conditionals, at, &mut extra)?;
        for (keyword, part) in extra {
            let number = push_all_of(&mut new, part);
            self.moved.insert(format!("{at}/allOf/{number}"), format!("{at}/{keyword}"));
        }
        check_together(object, &new, at)?;
        Ok(new.into())
    }

    /// Leaves a constraint to the model, unless the client is strict.
    fn relax(&self, at: &str, key: &str, reason: &str) -> Result<(), SchemaError> {
        match self.strict {
            true => Err(refused(at, key, format!("`{key}` cannot be kept here, and the request is strict: {reason}"))),
            false => Ok(()),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn keyword(
        &mut self,
        object: &'a Map<String, Value>,
        key: &'a str,
        value: &'a Value,
        at: &str,
        new: &mut Map<String, Value>,
        extra: &mut Extra<'a>,
        conditionals: &[Conditional<'a>],
    ) -> Result<(), SchemaError> {
        let wrong = |what: &str| Err(refused(at, key, format!("`{key}` must be {what}")));
        let unsupported = || Err(refused(at, key, format!("`{key}` is not supported")));
        let has = |key: &str| object.contains_key(key);
        let inner = format!("{at}/{}", escaped(key));
        if let "enum" | "const" | "required" | "type" = key {
            self.pay(size(value), &inner)?;
        }
        let kept = match key {
            "$ref" => match value.as_str() {
                None => return wrong("a string"),
                Some(reference) => match self.place_of(reference) {
                    None => return Err(refused(at, key, format!("`{reference}` names nothing in this schema (nothing else is fetched)"))),
                    Some(place) => format!("#/$defs/{}", self.name_of(place, at)?).into(),
                },
            },
            "items" if value.is_array() => self.list(value, &inner)?,
            "oneOf" => return self.one_of(value, &inner, at, new, extra),
            "allOf" if conditionals.iter().any(Conditional::is_member) => {
                return self.without_conditionals(value, &inner, conditionals, new);
            }
            "patternProperties" if value.is_object() => {
                let mut rewritten = Map::new();
                for (pattern, value) in value.as_object().into_iter().flatten() {
                    let place = format!("{inner}/{}", escaped(pattern));
                    let value = self.schema(value, &place)?;
                    let name =
                        self.one_pattern(pattern).ok_or_else(|| SchemaError { path: path_of(&place), problem: LOOKS_AROUND.into() })?;
                    rewritten.insert(name, value);
                }
                rewritten.into()
            }
            _ => match (part_of(key), value) {
                (Part::Schema, _) => self.schema(value, &inner)?,
                (Part::Schemas, Value::Array(list)) if !list.is_empty() => self.list(value, &inner)?,
                (Part::Schemas, _) => return wrong("a list of schemas, not empty"),
                (Part::Named, Value::Object(named)) => {
                    let mut rewritten = Map::new();
                    for (name, value) in named {
                        rewritten.insert(name.clone(), self.schema(value, &format!("{inner}/{}", escaped(name)))?);
                    }
                    rewritten.into()
                }
                (Part::Named, _) => return wrong("an object of schemas"),
                (Part::Other, _) => match key {
                    "type" if is_type(value) => value.clone(),
                    "type" => return wrong("null, boolean, integer, number, string, array or object, or a list of these"),
                    "enum" if value.as_array().is_some_and(|values| !values.is_empty()) => exact(value, at, key)?,
                    "enum" => return wrong("a list of values, not empty"),
                    "const" => exact(value, at, key)?,
                    "required" if value.as_array().is_some_and(|names| names.iter().all(Value::is_string)) => value.clone(),
                    "required" => return wrong("a list of names"),
                    "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => match count(value) {
                        Some(count) => count.into(),
                        None => return wrong("a whole number, 0 or more"),
                    },
                    "exclusiveMinimum" | "exclusiveMaximum" if value.is_boolean() => value.clone(),
                    "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if value.is_number() => bound(value, at, key)?,
                    "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => return wrong("a number"),
                    "multipleOf" if value.as_f64().is_some_and(|step| step > 0.0) => value.clone(),
                    "multipleOf" => return wrong("a number above 0"),
                    "pattern" => match value.as_str() {
                        None => return wrong("a string"),
                        Some(pattern) => {
                            let patterns = self.patterns(pattern).ok_or_else(|| refused(at, key, LOOKS_AROUND.into()))?;
                            let mut patterns = patterns.into_iter();
                            let first = patterns.next().expect("there is one at least");
                            extra.extend(patterns.map(|pattern| ("pattern", typed(object, json!({"pattern": pattern})))));
                            first.into()
                        }
                    },
                    "format" => match value.as_str() {
                        None => return wrong("a string"),
                        Some(format) if formats::BUILT_IN.contains(&format) => value.clone(),
                        Some(format) => {
                            match formats::pattern(format) {
                                Some(pattern) => extra.push(("format", typed(object, json!({"pattern": pattern})))),
                                None if formats::MISSING.contains(&format) => {
                                    self.relax(at, key, &format!("the format `{format}` is not supported"))?;
                                }
                                None => {}
                            }
                            return Ok(());
                        }
                    },
                    "uniqueItems" => return self.unique_items(object, value, at, extra),
                    "propertyNames" => return self.property_names(object, value, &inner, at, extra),
                    "not" => {
                        let Some(negation) = self.negation(value, &inner, DEPTH_MAX) else {
                            let problem = "`not` is supported of types, values, patterns, bounds, required and named properties, and of \
                                           combinations of these";
                            return Err(refused(at, key, problem.into()));
                        };
                        extra.push((key, typed(object, negation)));
                        return Ok(());
                    }
                    "contains" => return self.contains(object, value, &inner, at, extra),
                    // These are handled with the keywords that they belong to.
                    "if" | "then" | "else" | "minContains" | "maxContains" => return Ok(()),
                    "dependencies" | "dependentRequired" | "dependentSchemas" => {
                        return self.dependent(object, key, value, &inner, at, extra);
                    }
                    "unevaluatedProperties" | "unevaluatedItems" if is_anything(value) => return Ok(()),
                    // Without other schemas for the same value, all properties that are not named are unevaluated.
                    "unevaluatedProperties" if !APPLIED.iter().any(|key| has(key)) && !has("additionalProperties") => {
                        new.insert("additionalProperties".into(), self.schema(value, &inner)?);
                        return Ok(());
                    }
                    "unevaluatedItems" if !APPLIED.iter().any(|key| has(key)) && !has("items") => {
                        new.insert("items".into(), self.schema(value, &inner)?);
                        return Ok(());
                    }
                    "unevaluatedProperties" | "unevaluatedItems" | "$dynamicRef" | "$recursiveRef" | "x-guidance" => return unsupported(),
                    _ => return Ok(()),
                },
            },
        };
        // `anyOf` may already exist, created from `oneOf`.
        match new.contains_key(key) {
            true => drop(push_all_of(new, json!({key: kept}))),
            false => drop(new.insert(key.to_owned(), kept)),
        }
        Ok(())
    }

    /// Returns patterns without look-around that together are equivalent to `pattern`.
    fn patterns(&mut self, pattern: &str) -> Option<Vec<String>> {
        if !expression::looks_around(pattern) {
            return Some(vec![pattern.to_owned()]);
        }
        if let Some(known) = self.patterns.get(pattern) {
            return known.clone();
        }
        let rewritten = expression::without_look_around(pattern, &mut self.work);
        self.patterns.insert(pattern.to_owned(), rewritten.clone());
        rewritten
    }

    fn one_pattern(&mut self, pattern: &str) -> Option<String> {
        let mut patterns = self.patterns(pattern)?;
        if patterns.len() == 1 { patterns.pop() } else { expression::all_of(&patterns, &mut self.work) }
    }

    fn list(&mut self, value: &'a Value, at: &str) -> Result<Value, SchemaError> {
        let list = value.as_array().into_iter().flatten();
        list.enumerate().map(|(i, value)| self.schema(value, &format!("{at}/{i}"))).collect::<Result<Vec<_>, _>>().map(Value::from)
    }
}

/// The most characters shown of the path to a part that is nested too deeply.
const PATH_SHOWN_MAX: usize = 200;

/// The most references followed one from another.
const DEPTH_MAX: usize = 16;

const LOOKS_AROUND: &str = "its look-around (`(?=…)`, `(?!…)`, `(?<…)`) could not be rewritten: write the pattern without it";

/// Keywords that apply other schemas to the same value.
const APPLIED: [&str; 5] = ["allOf", "anyOf", "oneOf", "$ref", "if"];

/// Adds a schema to `allOf`, and returns its index there.
fn push_all_of(schema: &mut Map<String, Value>, part: Value) -> usize {
    let all = schema.entry("allOf").or_insert_with(|| json!([]));
    let all = all.as_array_mut().expect("`allOf` was rewritten as a list");
    all.push(part);
    all.len() - 1
}

/// Restricts a part created for a schema to that schema's type, so that the compiler has fewer types to distinguish.
fn typed(object: &Map<String, Value>, mut part: Value) -> Value {
    if let (Some(kind @ Value::String(_)), Some(part)) = (object.get("type"), part.as_object_mut())
        && !part.contains_key("type")
        && !part.contains_key("$ref")
    {
        match part.get_mut("anyOf").and_then(Value::as_array_mut) {
            Some(options) => options.iter_mut().for_each(|option| *option = typed(object, option.take())),
            None => drop(part.insert("type".into(), kind.clone())),
        }
    }
    part
}

/// Checks for keywords of one schema that cannot be kept together.
fn check_together(object: &Map<String, Value>, new: &Map<String, Value>, at: &str) -> Result<(), SchemaError> {
    // An object may repeat a name that is not listed, which readers count once.
    let required = new.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    if new.get("minProperties").and_then(count).is_some_and(|min| min > required + 1) {
        let problem = "`minProperties` is not supported beyond one more than the required properties";
        return Err(refused(at, "minProperties", problem.into()));
    }
    for (low, high) in [("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")] {
        if let (Some(min), Some(max)) = (new.get(low).and_then(count), new.get(high).and_then(count))
            && min > max
        {
            return Err(refused(at, low, format!("`{low}` is {min}, more than `{high}`, which is {max}")));
        }
    }
    // This is a list of schemas that `items` would follow, in the notation of another draft.
    if object.get("items").is_some_and(Value::is_array) && object.contains_key("prefixItems") {
        return Err(refused(at, "items", "`items` must be a schema beside `prefixItems`".into()));
    }
    Ok(())
}

fn refused(at: &str, key: &str, problem: String) -> SchemaError {
    SchemaError { path: path_of(&format!("{at}/{}", escaped(key))), problem }
}

fn is_known_draft(draft: &Value) -> bool {
    let known = ["https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"];
    let older =
        ["http://json-schema.org/draft-07/schema", "http://json-schema.org/draft-06/schema", "http://json-schema.org/draft-04/schema"];
    draft.as_str().is_some_and(|draft| known.into_iter().chain(older).any(|known| known == draft.trim_end_matches('#')))
}

fn is_type(value: &Value) -> bool {
    let known = |value: &Value| matches!(value.as_str(), Some("null" | "boolean" | "integer" | "number" | "string" | "array" | "object"));
    known(value) || value.as_array().is_some_and(|types| !types.is_empty() && types.iter().all(known))
}

/// A schema that every value matches.
fn is_anything(value: &Value) -> bool {
    *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty)
}

/// A count, which may be written as `3.0`.
fn count(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| value.as_f64().filter(|count| count.fract() == 0.0 && (0.0..EXACT_INTEGER_MAX).contains(count)).map(|c| c as u64))
}

/// Returns a value, unless there is a number in it that changes when it is read, or that no answer has.
fn exact(value: &Value, at: &str, key: &str) -> Result<Value, SchemaError> {
    for number in numbers(value) {
        let Some(read) = number.as_f64() else { continue };
        if read.fract() == 0.0 && read.abs() >= EXACT_INTEGER_MAX {
            return Err(refused(at, key, format!("{number} is too large to be exact: write numbers from 2^53 on as strings")));
        }
        // The compiler writes numbers without exponents, too.
        if read.to_string().split_once('.').is_some_and(|(_, fraction)| fraction.len() > FRACTION_DIGITS_MAX) {
            let problem = format!("{number} has more than {FRACTION_DIGITS_MAX} digits after its point when it is written out");
            return Err(refused(at, key, problem));
        }
    }
    Ok(value.clone())
}

/// The numbers in a value, at any depth.
fn numbers(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Number(_) => Box::new(std::iter::once(value)),
        Value::Array(list) => Box::new(list.iter().flat_map(numbers)),
        Value::Object(object) => Box::new(object.values().flat_map(numbers)),
        _ => Box::new(std::iter::empty()),
    }
}

/// Returns a numeric bound, limited to the range of exact integers.
fn bound(value: &Value, at: &str, key: &str) -> Result<Value, SchemaError> {
    let last = EXACT_INTEGER_MAX - 1.0;
    match value.as_f64() {
        Some(bound) if bound > last && key.ends_with("aximum") => Ok((last as u64).into()),
        Some(bound) if bound < -last && key.ends_with("inimum") => Ok((-last as i64).into()),
        _ => exact(value, at, key),
    }
}

/// A key as a part of a JSON pointer.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// A JSON pointer in the usual notation of paths: `.properties.a.anyOf[2]`.
pub fn path_of(place: &str) -> String {
    let mut path = String::new();
    for part in place.split('/').skip(1) {
        let part = part.replace("~1", "/").replace("~0", "~");
        let is_name = part.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '$')
            && part.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '$'));
        let _ = match part.parse::<usize>() {
            Ok(index) => write!(path, "[{index}]"),
            Err(_) if is_name => write!(path, ".{part}"),
            Err(_) => write!(path, "[{}]", Value::from(part)),
        };
    }
    path
}

#[cfg(test)]
mod tests;
