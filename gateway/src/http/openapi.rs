//! The ports' routes as documents of OpenAPI 3.1, from which clients are generated.
//!
//! - `schema`: forms of values as data; `operation`: routes as data
//! - `clients`, `operators`: the routes of both ports; `objects`: what they read and write
//! - `compared`, in tests: the structs that read and write bodies, field by field
//!
//! A new route or field needs its row here: tests compare the documents with both ports' tables of routes, and with the structs.

mod clients;
#[cfg(test)]
mod compared;
mod objects;
mod operation;
mod operators;
mod schema;

use super::{
    prices::{self, Price},
    roles::{self, Needed},
    written,
};
use axum::{body::Bytes, http::Method, response::Response};
use operation::Operation;
use serde_json::{Map, Value, json};
use std::{collections::BTreeSet, sync::LazyLock};

static CLIENTS: LazyLock<Bytes> = LazyLock::new(|| clients_document().to_string().into());
static OPERATORS: LazyLock<Bytes> = LazyLock::new(|| operators_document().to_string().into());

/// Renders both documents, so that no request has to.
pub(super) fn prepare() {
    LazyLock::force(&CLIENTS);
    LazyLock::force(&OPERATORS);
}

/// `GET /openapi.json` of the clients' port.
pub(super) async fn of_clients() -> Response {
    written::json(CLIENTS.clone())
}

/// `GET /openapi.json` of the operators' port.
pub(super) async fn of_operators() -> Response {
    written::json(OPERATORS.clone())
}

/// The clients' port: OpenAI's and Anthropic's API, with extensions marked.
pub fn clients_document() -> Value {
    let price = |operation: &Operation| {
        let row = prices::TABLE.iter().find(|row| row.method == operation.method && row.path == operation.path);
        row.map_or(Price::Tokens, |row| row.price)
    };
    let paths = paths(clients::OPERATIONS, |operation| {
        let (name, needs): (_, &[&str]) = match price(operation) {
            Price::Nothing => ("nothing", &[]),
            Price::Key => ("key", &["key", "x-api-key"]),
            Price::Request => ("request", &["key", "x-api-key"]),
            Price::Tokens => ("tokens", &["key", "x-api-key"]),
        };
        (needs, "x-tidemill-price", name)
    });
    let schemes = json!({
        "key": {"type": "http", "scheme": "bearer", "description": "A key, where the server needs one."},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, as Anthropic's clients send it."},
    });
    document(
        "Tidemill",
        "OpenAI's and Anthropic's API. Routes and fields with `x-tidemill-extension` are in neither. `x-tidemill-price` is what a route takes \
         of a key's quota: nothing, nothing but the key, one request, or one request and its tokens. Fields that are not listed are ignored.",
        clients::OPERATIONS,
        paths,
        &schemes,
    )
}

/// The operators' port.
pub fn operators_document() -> Value {
    let paths = paths(operators::OPERATIONS, |operation| {
        let method = operation.method.parse::<Method>().unwrap_or_default();
        match roles::row(&method, operation.path).map(|row| row.needed) {
            Some(Needed::Nothing) => (&[], "x-tidemill-role", "nothing"),
            Some(Needed::Role(role)) => (&["token"], "x-tidemill-role", role.name()),
            None => (&["token"], "x-tidemill-role", "none has it"),
        }
    });
    let schemes = json!({
        "token": {"type": "http", "scheme": "bearer", "description": "An operator's token, where operators sign in."},
    });
    document(
        "Tidemill for operators",
        "The operators' port. `x-tidemill-role` is the role that a route needs where operators sign in.",
        operators::OPERATIONS,
        paths,
        &schemes,
    )
}

/// Writes the paths. `needs` gives the schemes of an operation, and the name and value of its own mark.
fn paths(
    operations: &[Operation],
    needs: impl Fn(&Operation) -> (&'static [&'static str], &'static str, &'static str),
) -> Map<String, Value> {
    let mut paths = Map::new();
    for operation in operations {
        let (schemes, mark, value) = needs(operation);
        let mut written = operation.written(schemes);
        written[mark] = value.into();
        let path = paths.entry(operation.open_path()).or_insert_with(|| json!({}));
        path[operation.method.to_ascii_lowercase()] = written;
    }
    paths
}

fn document(title: &str, says: &str, operations: &[Operation], paths: Map<String, Value>, schemes: &Value) -> Value {
    let mentioned = mentioned(operations);
    let schemas: Map<String, Value> =
        objects::all().filter(|object| mentioned.contains(object.name)).map(|object| (object.name.to_owned(), object.schema())).collect();
    json!({
        "openapi": "3.1.0",
        "info": {"title": title, "version": env!("CARGO_PKG_VERSION"), "description": says},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    })
}

/// The names of all objects that operations mention, also within other objects.
fn mentioned(operations: &[Operation]) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    let mut next = Vec::new();
    operations.iter().for_each(|operation| operation.names(&mut |name| next.push(name)));
    while let Some(name) = next.pop() {
        if found.insert(name)
            && let Some(object) = objects::all().find(|object| object.name == name)
        {
            object.fields().for_each(|field| field.kind.names(&mut |name| next.push(name)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn routes(operations: &[Operation]) -> BTreeSet<(String, String)> {
        operations.iter().map(|operation| (operation.method.to_owned(), operation.path.to_owned())).collect()
    }

    #[test]
    fn every_route_of_both_ports_is_in_its_document_once_and_no_other() {
        let priced: BTreeSet<_> = prices::TABLE.iter().map(|row| (row.method.to_owned(), row.path.to_owned())).collect();
        assert_eq!(routes(clients::OPERATIONS), priced);
        assert_eq!(clients::OPERATIONS.len(), priced.len());
        assert_eq!(routes(operators::OPERATIONS), roles::tests::routes());
        assert_eq!(operators::OPERATIONS.len(), roles::tests::routes().len());
    }

    #[test]
    fn each_name_stands_for_one_operation_or_object_and_all_of_them_are_there() {
        let mut objects = BTreeMap::new();
        for object in objects::all() {
            assert!(objects.insert(object.name, object).is_none(), "{} is there twice", object.name);
            let names: BTreeSet<_> = object.fields().map(|field| field.name).collect();
            assert_eq!(names.len(), object.fields().count(), "{} has a field twice", object.name);
        }
        let all: BTreeSet<_> = mentioned(clients::OPERATIONS).union(&mentioned(operators::OPERATIONS)).copied().collect();
        let tables: BTreeSet<_> = objects.keys().copied().collect();
        let differing: Vec<_> = tables.symmetric_difference(&all).collect();
        assert!(differing.is_empty(), "no route mentions these, or no table has them: {differing:?}");
        for document in [clients_document(), operators_document()] {
            let paths = document["paths"].as_object().unwrap();
            let operations = paths.values().flat_map(|path| path.as_object().unwrap().values());
            let ids: Vec<_> = operations.map(|operation| operation["operationId"].as_str().unwrap()).collect();
            assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
        }
    }

    #[test]
    fn extensions_are_marked_and_prices_and_roles_are_those_of_the_tables() {
        let document = clients_document();
        let fields = |object: &str| document["components"]["schemas"][object]["properties"].clone();
        let is_ours = |object: &str, field: &str| fields(object)[field][schema::EXTENSION] == true;
        assert!(is_ours("ChatRequest", "top_k") && !is_ours("MessageRequest", "top_k"));
        assert!(is_ours("Usage", "tidemill") && !is_ours("Usage", "prompt_tokens"));
        let chat = &document["paths"]["/v1/chat/completions"]["post"];
        assert_eq!((&chat["x-tidemill-price"], chat["security"].as_array().unwrap().len()), (&json!("tokens"), 2));
        assert_eq!(document["paths"]["/openapi.json"]["get"]["security"], json!([]));
        assert_eq!(operators_document()["paths"]["/admin/keys"]["post"]["x-tidemill-role"], "administer");
    }
}
