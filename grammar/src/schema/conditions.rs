//! `if`, `dependent…`, `contains` and `oneOf` as choices between schemas.
//!
//! Several conditions often concern one property, one after the other (`if` its value is this, `then`…). Each by itself is a choice of two,
//! and all of them together one of 2^n: so they become one choice between the values of the property.

use super::{
    DEPTH_MAX, Extra, Preparer, SchemaError, count, escaped, push_all_of, refused, size, typed, values::ANNOTATIONS, values::list_or_other,
};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// The most options of one `oneOf` that are separated by subtracting the others from each.
const SUBTRACTED_MAX: usize = 8;
/// The most properties of one schema on which others depend: each doubles the choices.
const DEPENDENT_MAX: usize = 6;
/// The number of a list's first items among which one must match `contains`.
const CONTAINED_WITHIN: u64 = 8;

/// An `if` with its `then` and `else`.
pub(super) struct Conditional<'a> {
    condition: &'a Value,
    then: Option<&'a Value>,
    otherwise: Option<&'a Value>,
    /// The place of the schema that has the `if`.
    at: String,
    /// The schema's index in an `allOf`, if it is a member of one.
    member: Option<usize>,
}

impl Conditional<'_> {
    pub(super) fn is_member(&self) -> bool {
        self.member.is_some()
    }
}

/// A condition on the value of one property.
struct Test {
    property: String,
    values: Vec<Value>,
    /// Whether the condition fails if the property is missing.
    is_required: bool,
    /// Whether the condition fails for values that are not objects.
    of_objects: bool,
}

impl<'a> Preparer<'a> {
    /// Returns the conditionals of one schema: its own, and those of the members of its `allOf` that have nothing else.
    pub(super) fn conditionals(&self, object: &'a Map<String, Value>, at: &str) -> Vec<Conditional<'a>> {
        let of = |object: &'a Map<String, Value>, at: String, member| {
            let condition = object.get("if").filter(|_| object.contains_key("then") || object.contains_key("else"))?;
            Some(Conditional { condition, then: object.get("then"), otherwise: object.get("else"), at, member })
        };
        let is_all = |part: &Map<String, Value>| {
            part.keys().all(|key| ["if", "then", "else"].contains(&key.as_str()) || ANNOTATIONS.contains(&key.as_str()))
        };
        let members = object.get("allOf").and_then(Value::as_array).into_iter().flatten().enumerate();
        let members = members.filter_map(|(i, part)| {
            part.as_object().filter(|part| is_all(part)).and_then(|part| of(part, format!("{at}/allOf/{i}"), Some(i)))
        });
        of(object, at.to_owned(), None).into_iter().chain(members).collect()
    }

    /// Rewrites an `allOf` without the members that are conditionals.
    pub(super) fn without_conditionals(
        &mut self,
        value: &'a Value,
        inner: &str,
        conditionals: &[Conditional<'a>],
        new: &mut Map<String, Value>,
    ) -> Result<(), SchemaError> {
        let members: HashSet<usize> = conditionals.iter().filter_map(|conditional| conditional.member).collect();
        for (i, part) in value.as_array().into_iter().flatten().enumerate() {
            if !members.contains(&i) {
                let part = self.schema(part, &format!("{inner}/{i}"))?;
                let number = push_all_of(new, part);
                self.moved.insert(format!("{inner}/{number}"), format!("{inner}/{i}"));
            }
        }
        Ok(())
    }

    pub(super) fn conditions(
        &mut self,
        object: &'a Map<String, Value>,
        conditionals: &[Conditional<'a>],
        at: &str,
        extra: &mut Extra<'a>,
    ) -> Result<(), SchemaError> {
        let mut tested: Vec<(Test, &Conditional<'a>)> = Vec::new();
        for conditional in conditionals {
            self.pay(1, at)?;
            match self.test(conditional.condition) {
                Some(test) => tested.push((test, conditional)),
                None => {
                    let part = self.condition(conditional)?;
                    extra.push((keyword(conditional), typed(object, part)));
                }
            }
        }
        while let Some((Test { property, .. }, first)) = tested.first() {
            let (property, first) = (property.clone(), *first);
            let (group, others): (Vec<_>, Vec<_>) = tested.into_iter().partition(|(test, _)| test.property == property);
            tested = others;
            let part = match self.cases(object, &property, &group)? {
                Some(part) => part,
                None => return Err(refused(&first.at, "if", UNWRITTEN.into())),
            };
            extra.push((keyword(first), part));
        }
        Ok(())
    }

    /// Rewrites a conditional as a choice: the condition and `then`, or its negation and `else`.
    fn condition(&mut self, conditional: &Conditional<'a>) -> Result<Value, SchemaError> {
        let Conditional { condition, then, otherwise, at, .. } = conditional;
        let place = |key: &str| format!("{at}/{key}");
        let other = self.negation(condition, &place("if"), DEPTH_MAX).ok_or_else(|| refused(at, "if", UNWRITTEN.into()))?;
        let mut holds = vec![self.schema(condition, &place("if"))?];
        if let Some(then) = then {
            holds.push(self.schema(then, &place("then"))?);
        }
        let mut fails = vec![other];
        if let Some(otherwise) = otherwise {
            fails.push(self.schema(otherwise, &place("else"))?);
        }
        Ok(json!({"anyOf": [{"allOf": holds}, {"allOf": fails}]}))
    }

    /// Reads a condition that is the `const` or `enum` of one property.
    fn test(&mut self, condition: &'a Value) -> Option<Test> {
        let object = condition.as_object()?;
        let known = |key: &String| ["properties", "required", "type"].contains(&key.as_str()) || ANNOTATIONS.contains(&key.as_str());
        let properties = object.get("properties")?.as_object()?;
        let (property, schema) = properties.iter().next()?;
        let required = object.get("required").map(|required| required.as_array());
        let names = required.flatten().map_or(&[][..], Vec::as_slice);
        let is_simple = object.keys().all(known)
            && properties.len() == 1
            && required.is_none_or(|required| required.is_some())
            && names.iter().all(|name| name == property)
            && object.get("type").is_none_or(|kind| kind == "object");
        is_simple.then_some(())?;
        let values = self.values(schema, DEPTH_MAX)?;
        Some(Test { property: property.clone(), values, is_required: !names.is_empty(), of_objects: object.contains_key("type") })
    }

    /// Rewrites conditionals on one property as a choice between its values, each with the resulting constraints, or returns `None` if the
    /// other values cannot be written.
    fn cases(
        &mut self,
        object: &'a Map<String, Value>,
        property: &str,
        group: &[(Test, &Conditional<'a>)],
    ) -> Result<Option<Value>, SchemaError> {
        let mut consequences = Vec::new();
        for (_, Conditional { then, otherwise, at, .. }) in group {
            let then = then.map(|then| self.schema(then, &format!("{at}/then"))).transpose()?;
            let otherwise = otherwise.map(|otherwise| self.schema(otherwise, &format!("{at}/else"))).transpose()?;
            consequences.push((then, otherwise));
        }
        let mut known = HashSet::new();
        let named = group.iter().flat_map(|(test, _)| test.values.iter().cloned());
        let named: Vec<Value> = named.filter(|value| known.insert(super::values::same(value))).collect();
        let sets: Vec<HashSet<String>> = group.iter().map(|(test, _)| test.values.iter().map(super::values::same).collect()).collect();
        // Each entry has values for which the same conditions hold, and these conditions.
        let mut cases: Vec<(Vec<bool>, Vec<Value>)> = Vec::new();
        for value in &named {
            self.pay(group.len(), &group[0].1.at)?;
            let same = super::values::same(value);
            let holds: Vec<bool> = sets.iter().map(|set| set.contains(&same)).collect();
            match cases.iter_mut().find(|(known, _)| *known == holds) {
                Some((_, values)) => values.push(value.clone()),
                None => cases.push((holds, vec![value.clone()])),
            }
        }
        let Some(others) = self.other_values(&named) else { return Ok(None) };
        let mut options = Vec::new();
        for (holds, values) in cases {
            options.push((holds, json!({"properties": {property: {"enum": values}}, "required": [property]})));
        }
        options.push((vec![false; group.len()], json!({"properties": {property: others}, "required": [property]})));
        let without = group.iter().map(|(test, _)| !test.is_required).collect();
        options.push((without, json!({"properties": {property: false}})));
        for (_, option) in &mut options {
            option["type"] = "object".into();
        }
        if object.get("type").is_none_or(|kind| kind != "object") {
            let holds = group.iter().map(|(test, _)| !test.of_objects).collect();
            options.push((holds, json!({"type": ["null", "boolean", "number", "string", "array"]})));
        }
        let mut any = Vec::new();
        for (holds, mut option) in options {
            let asked = holds
                .iter()
                .zip(&consequences)
                .filter_map(|(holds, (then, otherwise))| if *holds { then.as_ref() } else { otherwise.as_ref() });
            let asked: Vec<&Value> = asked.collect();
            self.pay(asked.iter().map(|part| size(part)).sum(), &group[0].1.at)?;
            if !asked.is_empty() {
                option["allOf"] = asked.into_iter().cloned().collect();
            }
            any.push(option);
        }
        Ok(Some(json!({"anyOf": any})))
    }

    /// Rewrites `contains` as a choice between the first items of the list.
    pub(super) fn contains(
        &mut self,
        object: &'a Map<String, Value>,
        value: &'a Value,
        inner: &str,
        at: &str,
        extra: &mut Extra<'a>,
    ) -> Result<(), SchemaError> {
        let bound = |key: &str| object.get(key).and_then(count);
        let item = self.schema(value, inner)?;
        if object.contains_key("maxContains") || bound("minContains").is_some_and(|least| least > 1) {
            let key = if object.contains_key("maxContains") { "maxContains" } else { "minContains" };
            return Err(refused(at, key, format!("`{key}` is not supported: a list is kept to one item at least that it contains")));
        }
        if bound("minContains") == Some(0) {
            return Ok(());
        }
        let places = bound("maxItems").unwrap_or(u64::MAX).min(CONTAINED_WITHIN);
        let mut options = Vec::new();
        for before in 0..places {
            self.pay(size(&item) + before as usize, at)?;
            let mut items = vec![Value::Bool(true); before as usize];
            items.push(item.clone());
            // This notation is valid in every draft.
            options.push(json!({"type": "array", "items": items, "minItems": before + 1}));
        }
        extra.push(("contains", list_or_other(object, json!({"anyOf": options}))));
        Ok(())
    }

    /// Rewrites `dependentRequired`, `dependentSchemas` and `dependencies` as choices: a property is missing, or its constraints hold.
    pub(super) fn dependent(
        &mut self,
        object: &'a Map<String, Value>,
        key: &'a str,
        value: &'a Value,
        inner: &str,
        at: &str,
        extra: &mut Extra<'a>,
    ) -> Result<(), SchemaError> {
        let Some(properties) = value.as_object() else { return Err(refused(at, key, format!("`{key}` must be an object"))) };
        if properties.len() > DEPENDENT_MAX {
            return Err(refused(at, key, format!("`{key}` is supported for {DEPENDENT_MAX} properties at most")));
        }
        for (name, asked) in properties {
            let asked = match asked {
                Value::Array(names) if key != "dependentSchemas" && names.iter().all(Value::is_string) => {
                    self.pay(names.len(), at)?;
                    let all: Vec<&Value> = names.iter().filter(|other| *other != name).collect();
                    let all: Vec<Value> = std::iter::once(name.as_str().into()).chain(all.into_iter().cloned()).collect();
                    json!({"required": all})
                }
                Value::Array(_) => return Err(refused(at, key, format!("`{key}` must be an object of lists of names, or of schemas"))),
                _ if key == "dependentRequired" => return Err(refused(at, key, format!("`{key}` must be an object of lists of names"))),
                asked => self.schema(asked, &format!("{inner}/{}", escaped(name)))?,
            };
            let without = json!({"properties": {name: false}});
            extra.push((key, json!({"anyOf": [typed(object, without), typed(object, asked)]})));
        }
        Ok(())
    }

    /// Rewrites `oneOf` as `anyOf` if its options exclude each other or can be subtracted from each other, and otherwise relaxes it.
    pub(super) fn one_of(
        &mut self,
        value: &'a Value,
        inner: &str,
        at: &str,
        new: &mut Map<String, Value>,
        extra: &mut Extra<'a>,
    ) -> Result<(), SchemaError> {
        let Some(options) = value.as_array().filter(|options| !options.is_empty()) else {
            return Err(refused(at, "oneOf", "`oneOf` must be a list of schemas, not empty".into()));
        };
        let exclude = self.exclude_each_other(options);
        let rewritten = self.list(value, inner)?;
        if !exclude && let Some(apart) = self.apart(options, &rewritten, inner) {
            extra.push(("oneOf", apart));
            return Ok(());
        }
        // If the client is strict, the compiler may still prove it, or refuse it.
        let key = if exclude || !self.strict { "anyOf" } else { "oneOf" };
        match new.contains_key(key) {
            true => drop(push_all_of(new, json!({key: rewritten}))),
            false => drop(new.insert(key.into(), rewritten)),
        }
        Ok(())
    }

    /// Returns the options as a choice, each without those that it overlaps with, or `None` if that cannot be written.
    fn apart(&mut self, options: &'a [Value], rewritten: &Value, inner: &str) -> Option<Value> {
        if options.len() > SUBTRACTED_MAX {
            return None;
        }
        let mut others: Vec<Option<Value>> = vec![None; options.len()];
        let mut any = Vec::new();
        for (i, option) in options.iter().enumerate() {
            let mut all = vec![rewritten[i].clone()];
            for (j, other) in options.iter().enumerate().filter(|(j, _)| *j != i) {
                if self.exclude(option, other) {
                    continue;
                }
                if others[j].is_none() {
                    others[j] = Some(self.negation(other, &format!("{inner}/{j}"), DEPTH_MAX)?);
                }
                all.extend(others[j].clone());
            }
            self.left = self.left.checked_sub(all.iter().map(size).sum())?;
            any.push(json!({"allOf": all}));
        }
        Some(json!({"anyOf": any}))
    }
}

const UNWRITTEN: &str = "`if` is supported where its condition is made of types, values, patterns, bounds, required and named properties, \
                         so that what fails it can be written";

/// Returns the keyword that an error about a conditional names.
fn keyword<'a>(conditional: &Conditional<'a>) -> &'a str {
    if conditional.member.is_some() { "allOf" } else { "if" }
}
