//! Every field of the table of fields, sent through the parser of its endpoint: what is said to be read is read, what is said to be refused
//! is refused, and nothing that an answer depends on is passed over.

use super::{
    chat, classify, embeddings, messages,
    openai::{ChatRequest, CompletionRequest},
    prices::{self, Price},
    rerank, responses, score,
};
use crate::requests::{
    error::ApiError,
    fields::{
        self,
        row::{Door, Fate, Row},
        table::TABLE,
    },
    parse::JsonBody,
    structured,
};
use serde_json::{Value, json};
use std::{fs, path::Path};
use tidemill_grammar::{compiler::json_schema, schema::Terms};

/// The fields without which an endpoint refuses a body.
fn least(door: Door) -> Value {
    match door {
        Door::Chat | Door::Messages => json!({"messages": [{"role": "user", "content": "a"}]}),
        Door::Completions => json!({"prompt": "a"}),
        Door::Responses | Door::Embeddings | Door::Classify => json!({"input": "a"}),
        Door::Rerank => json!({"query": "a", "documents": ["a"]}),
        Door::Score => json!({"text_1": "a", "text_2": "a"}),
    }
}

/// Reads a body as its endpoint does, as far as that depends on no model.
fn read(door: Door, body: &Value) -> Result<(), ApiError> {
    let bytes = body.to_string().into_bytes();
    match door {
        Door::Embeddings => return embeddings::read(&bytes).map(drop),
        Door::Rerank => return rerank::read(&bytes).map(drop),
        Door::Score => return score::read(&bytes).map(drop),
        Door::Classify => return classify::read(&bytes).map(drop),
        Door::Chat | Door::Completions | Door::Responses | Door::Messages => {}
    }
    let body = JsonBody::parse(&bytes)?;
    let mut request = fields::generating(door, &body)?;
    structured::grammar(&mut request, &mut |schema, terms: Terms| Ok(json_schema(schema, terms)?))?;
    match door {
        Door::Chat => chat::dialog(body.into::<ChatRequest>()?).map(drop),
        Door::Messages => messages::read(body),
        Door::Responses => responses::request::read(body),
        _ => body.into::<CompletionRequest>().map(drop),
    }
}

fn with(door: Door, name: &str, value: &Value) -> Value {
    let mut body = least(door);
    match name.split_once('.').filter(|(object, _)| *object != "speculative") {
        Some((object, field)) => body[object] = json!({field: value}),
        None => body[name] = value.clone(),
    }
    body
}

fn names(error: &ApiError, name: &str) -> bool {
    error.status() == 400 && error.message().contains(name.split('.').next_back().unwrap_or(name))
}

/// Values of which no field takes all.
fn odd() -> [Value; 6] {
    [json!({"odd": [[]]}), json!("odd"), json!(-7.5), json!(true), json!([[[]]]), json!(1e300)]
}

#[test]
fn no_field_of_another_server_is_passed_over_in_silence() {
    for door in Door::ALL {
        assert_eq!(read(door, &least(door)).map_err(|error| error.body()), Ok(()), "{}", door.name());
    }
    let all = TABLE.iter().flat_map(|row| row.doors.iter().map(move |door| (row, *door)));
    let wrong: Vec<_> = all.filter_map(|(row, door)| Some(format!("`{}` at {}: {}", row.name, door.name(), fault(row, door)?))).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the difference between a field's fate in the table and at an endpoint, if there is one.
fn fault(Row { name, fate, .. }: &Row, door: Door) -> Option<&'static str> {
    let sent = |value: &Value| read(door, &with(door, name, value));
    let is_named = |value: &Value| sent(value).is_err_and(|error| names(&error, name));
    match fate {
        Fate::Read | Fate::As(_) => (!odd().iter().any(is_named)).then_some("it takes anything, so nobody reads it"),
        Fate::Refused { .. } => (!is_named(&json!("odd"))).then_some("it is not refused by name"),
        Fate::Harmless(_) => {
            (!odd().iter().any(|value| sent(value).is_ok())).then_some("it is refused, although it is said to be harmless")
        }
    }
}

#[test]
fn each_endpoint_that_takes_tokens_has_fields_in_the_table() {
    for row in prices::TABLE.iter().filter(|row| row.price == Price::Tokens) {
        let door = row.path.rsplit('/').next().unwrap();
        let known = Door::ALL.iter().any(|known| known.name() == door || row.path == "/v1/chat/completions");
        assert!(known, "{} has no door: add one, and the fields that its clients send", row.path);
    }
}

#[test]
fn no_endpoint_reads_a_request_without_the_check_of_its_fields() {
    let mut left = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http")];
    let mut files = 0;
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        files += 1;
        let code = fs::read_to_string(&path).unwrap();
        let reads = ["request: GenerateRequest =", "::<GenerateRequest>", "GenerateRequest = body"];
        assert!(
            path.ends_with("dialects.rs") || reads.iter().all(|read| !code.contains(read)),
            "{}: use `fields::generating`",
            path.display()
        );
    }
    assert!(files > 60, "{files}");
}
