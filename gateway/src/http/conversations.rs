//! `/v1/conversations`: what was said, kept for its owner, in OpenAI's shape and with what a product needs besides: lists, titles,
//! branches, exports.
//!
//! - [`record`]: a conversation's own fields; [`turn`]: a chat's turn in one; `export`: JSON lines

mod export;
pub mod record;
pub mod turn;

pub use export::{export, export_all};

use super::{
    access::Client,
    errors::ApiError,
    parse,
    responses::{
        PageWish, as_json, checked,
        items::{Said, Sent},
        listed, page_wanted, request,
    },
};
use crate::{
    context::summary::Summaries,
    gateway::Gateway,
    stamp::{new_id, unix_seconds},
    store::{self, Addition, Item, ItemPage, Kind, NewRecord, Part, Record, RecordPage, Rewrite, StoreError},
};
use axum::{Json, body::Body, extract::Path, response::Response};
use record::{Changes, Conversation};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::sync::Arc;

type Answered = Result<Json<Value>, ApiError>;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    #[serde(flatten)]
    changes: Changes,
    items: Option<Vec<Value>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BranchFields {
    at: Option<String>,
    #[serde(flatten)]
    changes: Changes,
}

/// `POST /v1/conversations`.
pub async fn create(Client(gateway): Client, body: Body) -> Answered {
    let Fields { changes, items } = fields(&gateway, body).await?;
    let now = unix_seconds();
    let mut conversation = Conversation::new(now);
    conversation.change(&gateway, changes)?;
    let items = new_items(&gateway, items.unwrap_or_default()).await?;
    conversation.take_title(&items);
    put(&gateway, conversation, Vec::new(), items, now).await
}

/// `GET /v1/conversations`: the caller's own, the newest first.
pub async fn list(Client(gateway): Client, query: PageWish) -> Answered {
    let page = page_wanted(query)?;
    let found = gateway.store().list(&gateway.owner(), Kind::Conversation, page).await;
    let RecordPage { records, has_more } = found.map_err(|error| ApiError::of_store("after", error))?;
    let data = records.iter().map(shown).collect::<Result<Vec<_>, _>>()?;
    let id = |record: Option<&Record>| record.map(|record| record.id.clone());
    Ok(Json(json!({
        "object": "list", "data": data, "first_id": id(records.first()), "last_id": id(records.last()), "has_more": has_more,
    })))
}

/// `GET /v1/conversations/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    shown(&load(&gateway, &id, Part::Nothing).await?).map(Json)
}

/// `POST /v1/conversations/{id}`: another title, model, system prompt or metadata.
pub async fn update(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    let Fields { changes, .. } = fields(&gateway, body).await?;
    let record = load(&gateway, &id, Part::Nothing).await?;
    let mut conversation = Conversation::read(&record)?;
    conversation.change(&gateway, changes)?;
    let now = unix_seconds();
    gateway.store().update(&gateway.owner(), &id, conversation.body(), now).await.map_err(of_store)?;
    Ok(Json(conversation.shown(now, record.totals, Summaries::read(record.summary.as_deref()).newest())))
}

/// `DELETE /v1/conversations/{id}`, with its items: but other histories keep what they were made from.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    check_id(&id)?;
    gateway.store().delete(&gateway.owner(), &id).await.map_err(of_store)?;
    Ok(Json(json!({"id": id, "object": "conversation.deleted", "deleted": true})))
}

/// `POST /v1/conversations/{id}/branch`: another conversation with the same beginning, up to the item `at`, or with all of it.
pub async fn branch(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    let BranchFields { at, changes } = fields(&gateway, body).await?;
    let record = load(&gateway, &id, Part::All).await?;
    let kept = match &at {
        None => record.items.len(),
        Some(at) => place_of(&record, at).ok_or_else(|| no_item("at", &id, at))? + 1,
    };
    let now = unix_seconds();
    let mut branch = Conversation::read(&record)?.branched(record.items[..kept].last().map(|item| item.id.as_str()), now);
    branch.change(&gateway, changes)?;
    let earlier = record.items[..kept].iter().map(|item| item.id.clone()).collect();
    let id = branch.id().to_owned();
    let put = put(&gateway, branch, earlier, Vec::new(), now).await?;
    let summaries = Summaries::read(record.summary.as_deref()).within(kept);
    let items = summaries.newest().map_or(0, |summary| summary.items);
    let Some(last) = items.checked_sub(1).and_then(|last| record.items.get(last)) else { return Ok(put) };
    // What tells of the beginning tells of the same there.
    let summary = store::Summary { body: summaries.write(), items, last: last.id.clone() };
    match gateway.store().summarize(&gateway.owner(), &id, summary).await {
        Ok(()) => shown(&load(&gateway, &id, Part::Nothing).await?).map(Json),
        Err(error) => {
            tracing::warn!(%error, "a branch begins without a summary, which is made again");
            Ok(put)
        }
    }
}

/// `GET /v1/conversations/{id}/items`.
pub async fn items(Client(gateway): Client, Path(id): Path<String>, query: PageWish) -> Result<Response, ApiError> {
    check_id(&id)?;
    let page = gateway.store().page(&gateway.owner(), &id, Part::All, page_wanted(query)?).await.map_err(of_store)?;
    listed(&gateway, page).await
}

/// `POST /v1/conversations/{id}/items`.
pub async fn add(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Result<Response, ApiError> {
    let Fields { items, .. } = fields(&gateway, body).await?;
    let items = new_items(&gateway, items.ok_or_else(|| ApiError::invalid("items", "`items` is missing"))?).await?;
    let record = load(&gateway, &id, Part::Nothing).await?;
    let body = retitled(&record, &items)?;
    let addition = Addition { body, ..Addition::of(items.clone()) };
    gateway.store().append(&gateway.owner(), &id, addition, unix_seconds()).await.map_err(of_store)?;
    listed(&gateway, ItemPage { items, has_more: false }).await
}

/// `GET /v1/conversations/{id}/items/{item}`.
pub async fn item(Client(gateway): Client, Path((id, item)): Path<(String, String)>) -> Result<Response, ApiError> {
    let record = load(&gateway, &id, Part::All).await?;
    let stored = record.items.into_iter().find(|stored| stored.id == item).ok_or_else(|| no_item("item_id", &id, &item))?;
    Ok(as_json(gateway.compute(move || checked(&stored).map(str::to_owned)).await?))
}

/// `DELETE /v1/conversations/{id}/items/{item}`. Answers with the conversation.
pub async fn remove(Client(gateway): Client, Path((id, item)): Path<(String, String)>) -> Answered {
    check_id(&id)?;
    gateway.store().remove(&gateway.owner(), &id, &item).await.map_err(of_store)?;
    shown(&load(&gateway, &id, Part::Nothing).await?).map(Json)
}

async fn put(gateway: &Gateway, conversation: Conversation, earlier: Vec<String>, items: Vec<Item>, now: u64) -> Answered {
    let id = conversation.id().to_owned();
    let record = NewRecord { id: id.clone(), kind: Kind::Conversation, body: conversation.body(), earlier, items, ..NewRecord::default() };
    gateway.store().put(&gateway.owner(), record, now).await.map_err(of_store)?;
    shown(&load(gateway, &id, Part::Nothing).await?).map(Json)
}

/// An empty body is one without fields.
async fn fields<T: DeserializeOwned + Default>(gateway: &Gateway, body: Body) -> Result<T, ApiError> {
    let body = gateway.read(body).await?;
    if body.is_empty() { Ok(T::default()) } else { parse::json(&body) }
}

/// Each with an id of its own: a conversation may say the same twice.
async fn new_items(gateway: &Arc<Gateway>, items: Vec<Value>) -> Result<Vec<Item>, ApiError> {
    let named = |sent: Sent| match &sent.said {
        Said::Reference(_) => Err(ApiError::invalid("items", "`items` must be items themselves, not references to stored ones")),
        _ => Ok((sent.named(new_id(sent.prefix())), sent.said)),
    };
    let items = request::sent(items, "items")?.into_iter().map(named).collect::<Result<Vec<_>, _>>()?;
    let worker = Arc::clone(gateway);
    let counted = move |(item, said): (Item, Said)| Item { tokens: said.tokens(&worker.text().tokenizer), ..item };
    gateway.compute(move || Ok(items.into_iter().map(counted).collect())).await
}

async fn load(gateway: &Gateway, id: &str, part: Part) -> Result<Record, ApiError> {
    check_id(id)?;
    gateway.store().load(&gateway.owner(), id, part).await.map_err(of_store)
}

fn shown(record: &Record) -> Result<Value, ApiError> {
    let summaries = Summaries::read(record.summary.as_deref());
    Ok(Conversation::read(record)?.shown(record.updated, record.totals, summaries.newest()))
}

/// The place of an item in a history: the last, if it is there twice.
fn place_of(record: &Record, item: &str) -> Option<usize> {
    record.items.iter().rposition(|stored| stored.id == item)
}

/// A record's body, where new items give it a title.
pub(super) fn retitled(record: &Record, items: &[Item]) -> Result<Option<Rewrite>, ApiError> {
    let mut conversation = Conversation::read(record)?;
    Ok(conversation.take_title(items).then(|| Rewrite { from: record.body.clone(), to: conversation.body() }))
}

fn no_item(param: &str, id: &str, item: &str) -> ApiError {
    ApiError::not_found(param, format!("`{id}` has no item `{item}`"))
}

fn check_id(id: &str) -> Result<(), ApiError> {
    if id.starts_with("conv_") { Ok(()) } else { Err(ApiError::not_found("conversation_id", format!("`{id}` is not a conversation's id"))) }
}

fn of_store(error: StoreError) -> ApiError {
    ApiError::of_store("conversation_id", error)
}
