//! The fields that clients of other servers send, and their fate here: one table, in which `docs/compatibility.md` and the check of every
//! request agree. A field that the table refuses is a 400 that names it and what to send instead; one that changes nothing about an answer
//! is passed over, with its reason; one that no API has is passed over, as OpenAI's servers do with older clients' fields.
//!
//! - [`row`]: the parts of a row; [`table`]: the rows

pub mod row;
pub mod table;

use crate::requests::{error::ApiError, generate::GenerateRequest, parse::JsonBody};
use row::{Door, Fate, Row};
use serde_json::{Map, Value};
use std::{collections::HashMap, sync::LazyLock};
use table::TABLE;

/// The refused fields by name. Those within an object have the object's name before a dot.
static REFUSED: LazyLock<HashMap<&str, Vec<&Row>>> = LazyLock::new(|| {
    let mut refused: HashMap<_, Vec<_>> = HashMap::new();
    for row in TABLE.iter().filter(|row| matches!(row.fate, Fate::Refused { .. })) {
        refused.entry(row.name).or_default().push(row);
    }
    refused
});

/// Reads the fields that all generating endpoints share, after [checking](check) the body's.
pub fn generating(door: Door, body: &JsonBody) -> Result<GenerateRequest, ApiError> {
    check(door, body.fields())?;
    let mut request: GenerateRequest = body.read()?;
    request.settle();
    Ok(request)
}

/// Refuses a body with a field that would be ignored although its sender counts on it.
pub fn check(door: Door, body: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, value) in body {
        check_field(door, name, value)?;
        // Only these have rows of their own.
        if let ("nvext" | "structured_outputs", Value::Object(fields)) = (name.as_str(), value) {
            fields.iter().try_for_each(|(field, value)| check_field(door, &format!("{name}.{field}"), value))?;
        }
    }
    Ok(())
}

fn check_field(door: Door, name: &str, value: &Value) -> Result<(), ApiError> {
    let rows = REFUSED.get(name).into_iter().flatten();
    for row in rows.filter(|row| row.doors.contains(&door)) {
        if let Fate::Refused { unless, instead } = row.fate
            && !is_nothing(value)
            && !unless.split(' ').any(|usual| is_usual(value, usual))
        {
            return Err(ApiError::foreign(name, instead));
        }
    }
    Ok(())
}

/// Whether a value says no more than the field's absence does.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether a value is the one that `usual` writes. Clients write a whole number as a fraction, too.
fn is_usual(value: &Value, usual: &str) -> bool {
    match value {
        Value::Bool(value) => usual == if *value { "true" } else { "false" },
        Value::Number(number) => usual.parse().is_ok_and(|usual: f64| number.as_f64() == Some(usual)),
        Value::String(text) => text.eq_ignore_ascii_case(usual),
        Value::Array(items) => matches!(&items[..], [Value::String(text)] if text == usual),
        Value::Null | Value::Object(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::fields::row::GENERATING;
    use serde_json::json;
    use std::{collections::BTreeSet, fmt::Write};

    /// The table as the page has it.
    fn page() -> String {
        let mut page = "| field | documented by | at | what becomes of it |\n|---|---|---|---|\n".to_owned();
        for Row { name, of, doors, fate } in TABLE {
            let doors = match doors {
                doors if *doors == GENERATING => "generating".to_owned(),
                doors => doors.iter().map(|door| door.name()).collect::<Vec<_>>().join(", "),
            };
            let fate = match fate {
                Fate::Read => "implemented".to_owned(),
                Fate::As(other) => format!("implemented, as {other}"),
                Fate::Refused { unless: "", instead } => format!("400: {instead}"),
                Fate::Refused { unless, instead } => format!("400, unless `{}`: {instead}", unless.replace(' ', "` or `")),
                Fate::Harmless(why) => format!("ignored: {why}"),
            };
            writeln!(page, "| `{name}` | {of} | {doors} | {fate} |").unwrap();
        }
        page
    }

    #[test]
    fn the_page_and_the_table_are_the_same() {
        let docs = include_str!("../../../docs/compatibility.md");
        let page = page();
        assert!(docs.contains(&page), "docs/compatibility.md needs this table:\n{page}");
    }

    #[test]
    fn a_field_has_one_fate_at_a_door() {
        let mut seen = BTreeSet::new();
        for row in TABLE {
            assert!(!row.doors.is_empty() && !row.of.is_empty(), "{}", row.name);
            for door in row.doors {
                assert!(seen.insert((row.name, door.name())), "{} twice at {}", row.name, door.name());
            }
            if let Fate::Refused { instead: reason, .. } | Fate::Harmless(reason) = row.fate {
                assert!(reason.len() > 8 && !reason.ends_with('.'), "{}: {reason}", row.name);
            }
        }
        let within = TABLE.iter().filter_map(|row| row.name.split_once('.')).filter(|(object, _)| *object != "speculative");
        assert!(within.map(|(object, _)| object).collect::<BTreeSet<_>>().is_subset(&BTreeSet::from(["nvext", "structured_outputs"])));
    }

    #[test]
    fn what_is_refused_is_named_and_the_usual_value_is_not_refused() {
        let sent = |door, body: Value| check(door, body.as_object().unwrap()).map_err(|error| error.body()["error"].clone());
        for row in TABLE {
            let Fate::Refused { unless, instead } = row.fate else { continue };
            let body = |value: Value| match row.name.split_once('.') {
                Some((object, field)) => json!({object: {field: value}}),
                None => json!({row.name: value}),
            };
            for door in row.doors {
                let error = sent(*door, body(json!("nonsense"))).unwrap_err();
                assert!(error["param"] == row.name && error["message"].as_str().unwrap().ends_with(instead), "{error}");
                let usual = unless.split(' ').map(|usual| serde_json::from_str(usual).unwrap_or(json!(usual)));
                for usual in usual.chain([json!(null), json!([]), json!({})]) {
                    assert_eq!(sent(*door, body(usual.clone())), Ok(()), "{} {usual}", row.name);
                }
            }
        }
        assert_eq!(sent(Door::Chat, json!({"length_penalty": 1, "modalities": ["text"], "of_nobody": 3})), Ok(()));
        assert!(sent(Door::Chat, json!({"length_penalty": 1.5})).is_err() && sent(Door::Chat, json!({"modalities": ["audio"]})).is_err());
    }

    #[test]
    fn other_names_reach_the_fields_that_they_mean() {
        let read = |body: Value| generating(Door::Completions, &JsonBody::parse(body.to_string().as_bytes()).unwrap()).unwrap();
        let request = read(json!({
            "n_predict": 7, "max_tokens": 9, "repeat_penalty": 1.5, "no_stop_trim": true,
            "nvext": {"greed_sampling": true, "top_k": 3, "ignore_eos": true, "repetition_penalty": 1.2},
        }));
        assert_eq!((request.max_tokens, request.repetition_penalty, request.include_stop_str_in_output), (Some(7), Some(1.5), Some(true)));
        assert_eq!((request.temperature, request.top_k, request.ignore_eos), (Some(0.0), Some(3), Some(true)));
        let request = read(json!({"n_predict": -1, "nvext": {"repetition_penalty": 1.25}}));
        assert_eq!((request.max_tokens, request.repetition_penalty), (None, Some(1.25)));
    }
}
