//! Trees of JSON: a value replaced, dropped, doubled, nested, moved; and texts that are almost JSON.

use crate::dice::Dice;
use serde_json::{Map, Value, json};

const NODES_MAX: usize = 20_000;
const TEXT_BYTES_MAX: usize = 1 << 20;
const COPIES_BYTES_MAX: usize = 2 << 20;
/// The prefix of a text that is written without quotes or escapes: numbers that no type holds, halves of characters.
const AS_IT_IS: &str = "\u{1}\u{2}";

/// Mutates some places of a tree. `keys`: keys with a meaning in objects here.
pub(crate) fn mutate(dice: &mut Dice, tree: &mut Value, keys: &[String]) {
    for _ in 0..dice.few(8) {
        let nodes = nodes(tree);
        if nodes > NODES_MAX {
            return;
        }
        // Another part of the same tree, which is inserted elsewhere.
        let mut other = dice.below(nodes);
        let other = node(tree, &mut other).map(|node| node.clone()).unwrap_or_default();
        let mut at = dice.below(nodes);
        if let Some(place) = node(tree, &mut at) {
            once(dice, place, other, keys);
        }
    }
}

fn once(dice: &mut Dice, place: &mut Value, other: Value, keys: &[String]) {
    match dice.below(12) {
        0 => *place = other,
        1 | 2 => *place = value(dice, 0),
        3 => *place = json!([place.take()]),
        4 => {
            let depth = if dice.one_in(8) { dice.below(300) } else { dice.few(10) };
            let key = keys.get(dice.below(keys.len())).cloned();
            for _ in 0..depth {
                *place = match &key {
                    Some(key) if dice.one_in(2) => json!({ key.as_str(): place.take() }),
                    _ => json!([place.take()]),
                };
            }
        }
        5 => *place = Value::Null,
        6 | 7 => match place {
            Value::Object(fields) if !fields.is_empty() => {
                let key = fields.keys().nth(dice.below(fields.len())).cloned().unwrap_or_default();
                let old = fields.shift_remove(&key).unwrap_or_default();
                if dice.one_in(2) && !keys.is_empty() {
                    fields.insert(dice.pick(keys).clone(), old);
                }
            }
            Value::Array(items) if !items.is_empty() => {
                let at = dice.below(items.len());
                if dice.one_in(2) {
                    items.remove(at);
                } else {
                    let copies = if dice.one_in(8) { dice.below(3000) } else { dice.few(20) };
                    items.extend(vec![items[at].clone(); copies.min(COPIES_BYTES_MAX / items[at].to_string().len())]);
                }
            }
            Value::String(text) => {
                let times = if dice.one_in(8) { dice.below(5000) } else { dice.few(20) };
                *text = text.repeat(times.min(TEXT_BYTES_MAX / text.len().max(1)));
            }
            number => *number = number_of(dice),
        },
        _ => match place {
            Value::Object(fields) => {
                let key = if keys.is_empty() || dice.one_in(10) { dice.odd_text() } else { dice.pick(keys).clone() };
                let new = if dice.one_in(2) { other } else { value(dice, 0) };
                fields.insert(key, new);
            }
            Value::Array(items) => {
                let at = dice.below(items.len() + 1);
                let new = if dice.one_in(2) { other } else { value(dice, 0) };
                items.insert(at, new);
            }
            Value::String(text) => *text = super::text::mutate(dice, text, &[]),
            number => *number = number_of(dice),
        },
    }
}

/// Any value.
pub(crate) fn value(dice: &mut Dice, depth: usize) -> Value {
    match dice.below(if depth > 3 { 8 } else { 11 }) {
        0 => Value::Null,
        1 => Value::from(dice.one_in(2)),
        2..=4 => number_of(dice),
        5..=7 => Value::String(dice.odd_text()),
        8 | 9 => Value::Array((0..dice.below(5)).map(|_| value(dice, depth + 1)).collect()),
        _ => Value::Object((0..dice.below(5)).map(|_| (dice.odd_text(), value(dice, depth + 1))).collect::<Map<_, _>>()),
    }
}

fn number_of(dice: &mut Dice) -> Value {
    let as_it_is = |text: &str| Value::String(format!("{AS_IT_IS}{text}"));
    match dice.below(10) {
        0 => Value::from(f64::from_bits(dice.bits())),
        1 => as_it_is(&dice.integer().to_string()),
        2 => as_it_is(dice.pick::<&str>(&[
            "1e400",
            "-1e400",
            "1e-400",
            "-0",
            "-0.0",
            "0.1e1",
            "99999999999999999999999",
            "1E308",
            "\"\\ud800\"",
            "\"\\u0000\"",
        ])),
        3 => json!(dice.integer() as f64 / 8.0),
        _ => json!(dice.integer() as i64),
    }
}

/// All keys in these trees.
pub(crate) fn keys<'a>(trees: impl IntoIterator<Item = &'a Value>) -> Vec<String> {
    fn collect(tree: &Value, keys: &mut Vec<String>) {
        match tree {
            Value::Object(fields) => fields.iter().for_each(|(key, value)| {
                keys.push(key.clone());
                collect(value, keys);
            }),
            Value::Array(items) => items.iter().for_each(|item| collect(item, keys)),
            _ => {}
        }
    }
    let mut keys_of_all = Vec::new();
    trees.into_iter().for_each(|tree| collect(tree, &mut keys_of_all));
    keys_of_all.sort_unstable();
    keys_of_all.dedup();
    keys_of_all
}

/// The size beyond which no key is doubled: each level of a deep tree would double everything below it.
const DOUBLED_MAX: usize = 1 << 16;

/// The tree as text, in which keys may be doubled.
pub(crate) fn text(dice: &mut Dice, tree: &Value) -> String {
    let mut out = String::new();
    let doubles = dice.one_in(20);
    write(dice, tree, doubles, &mut out);
    out
}

fn write(dice: &mut Dice, tree: &Value, doubles: bool, out: &mut String) {
    match tree {
        Value::Object(fields) => {
            out.push('{');
            for (i, (key, value)) in fields.iter().enumerate() {
                for time in 0..if doubles && out.len() < DOUBLED_MAX && dice.one_in(4) { 2 } else { 1 } {
                    if i + time > 0 {
                        out.push(',');
                    }
                    out.push_str(&Value::from(key.as_str()).to_string());
                    out.push(':');
                    write(dice, value, doubles, out);
                }
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write(dice, item, doubles, out);
            }
            out.push(']');
        }
        Value::String(text) => match text.strip_prefix(AS_IT_IS) {
            Some(raw) => out.push_str(raw),
            None => out.push_str(&tree.to_string()),
        },
        _ => out.push_str(&tree.to_string()),
    }
}

fn nodes(tree: &Value) -> usize {
    1 + match tree {
        Value::Object(fields) => fields.values().map(nodes).sum(),
        Value::Array(items) => items.iter().map(nodes).sum::<usize>(),
        _ => 0,
    }
}

/// The node with this number, counted from the root down.
fn node<'a>(tree: &'a mut Value, number: &mut usize) -> Option<&'a mut Value> {
    if *number == 0 {
        return Some(tree);
    }
    *number -= 1;
    match tree {
        Value::Object(fields) => fields.values_mut().find_map(|value| node(value, number)),
        Value::Array(items) => items.iter_mut().find_map(|item| node(item, number)),
        _ => None,
    }
}
