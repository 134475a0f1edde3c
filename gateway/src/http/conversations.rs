//! `/v1/conversations`: dialogs stored for their owner, in OpenAI's shape and with further product features: lists, titles, branches,
//! exports.
//!
//! - [`record`]: a conversation's own fields; [`turn`]: a chat's turn in one; `export`: JSON lines

pub mod export;
pub mod record;
pub mod turn;

use super::{
    access::Client,
    parameters::{Path, Query},
    responses::request,
    written,
};
use crate::{
    base::stamp::{new_id, unix_seconds},
    context::summary::Summaries,
    http::pages::{PageQuery, page_wanted},
    requests::{
        computing::checkpoint,
        error::ApiError,
        items::{ItemContent, Sent},
        parse,
    },
    serving::gateway::Gateway,
    store::{self, Addition, Item, ItemPage, Kind, NewRecord, Part, Record, RecordPage, Rewrite, StoreError, access::Loaded},
};
use axum::{
    Json,
    body::Body,
    response::{IntoResponse, Response},
};
use record::{Changes, Conversation};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::sync::Arc;

type Answered = Result<Response, ApiError>;

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
    let body = gateway.read(body).await?;
    let now = unix_seconds();
    let worker = Arc::clone(&gateway);
    let made = gateway.compute_body(body.weight(), move || {
        let Fields { changes, items } = fields(&body)?;
        let mut conversation = Conversation::new(now);
        conversation.change(&worker, changes)?;
        let items = new_items(&worker, items.unwrap_or_default())?;
        conversation.take_title(&items);
        Ok((conversation, items))
    });
    let (conversation, items) = made.await?;
    put(&gateway, conversation, Vec::new(), items, now).await
}

/// `GET /v1/conversations`: the caller's own, the newest first.
pub async fn list(Client(gateway): Client, Query(query): Query<PageQuery>) -> Answered {
    let page = page_wanted(query)?;
    let found = gateway.store().list(&gateway.owner(), Kind::Conversation, page).await;
    let RecordPage { records, has_more } = found.map_err(|error| ApiError::of_store("after", error))?;
    let bytes = records.iter().map(|record| record.body.len()).sum();
    let listed = move || {
        let data = records.iter().map(shown).collect::<Result<Vec<_>, _>>()?;
        let id = |record: Option<&Record>| record.map(|record| record.id.clone());
        Ok(json!({
            "object": "list", "data": data, "first_id": id(records.first()), "last_id": id(records.last()), "has_more": has_more,
        }))
    };
    written::write(&gateway, bytes, listed).await
}

/// `GET /v1/conversations/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    show(&gateway, load(&gateway, &id, Part::Nothing).await?).await
}

/// `POST /v1/conversations/{id}`: changes the title, model, system prompt or metadata.
pub async fn update(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    let body = gateway.read(body).await?;
    let Fields { changes, .. } = gateway.compute_body(body.weight(), move || fields(&body)).await?;
    let record = load(&gateway, &id, Part::Nothing).await?;
    let worker = Arc::clone(&gateway);
    let changed = gateway.compute_body(record.body.len(), move || {
        let mut conversation = Conversation::read(&record)?;
        conversation.change(&worker, changes)?;
        let body = conversation.body();
        Ok((record, conversation, body))
    });
    let (record, conversation, body) = changed.await?;
    let (now, bytes) = (unix_seconds(), body.len());
    gateway.store().update(&gateway.owner(), &id, body, now).await.map_err(of_store)?;
    let shown = move || Ok(conversation.shown(now, record.totals, Summaries::read(record.summary.as_deref()).newest()));
    written::write(&gateway, bytes, shown).await
}

/// `DELETE /v1/conversations/{id}`, with its items, except those that other histories name.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    check_id(&id)?;
    gateway.store().delete(&gateway.owner(), &id).await.map_err(of_store)?;
    Ok(Json(json!({"id": id, "object": "conversation.deleted", "deleted": true})).into_response())
}

/// `POST /v1/conversations/{id}/branch`: creates a conversation with the same beginning, up to the item `at`, or with all of it.
pub async fn branch(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    let body = gateway.read(body).await?;
    let BranchFields { at, changes } = gateway.compute_body(body.weight(), move || fields(&body)).await?;
    let record = load(&gateway, &id, Part::All).await?;
    let kept = match &at {
        None => record.items.len(),
        Some(at) => place_of(&record, at).ok_or_else(|| no_item("at", &id, at))? + 1,
    };
    let now = unix_seconds();
    let worker = Arc::clone(&gateway);
    let branched = gateway.compute_body(record.body.len(), move || {
        let mut branch = Conversation::read(&record)?.branched(record.items[..kept].last().map(|item| item.id.as_str()), now);
        branch.change(&worker, changes)?;
        Ok((record, branch))
    });
    let (record, branch) = branched.await?;
    let earlier = record.items[..kept].iter().map(|item| item.id.clone()).collect();
    let id = branch.id().to_owned();
    let put = put(&gateway, branch, earlier, Vec::new(), now).await?;
    let summaries = Summaries::read(record.summary.as_deref()).within(kept);
    let items = summaries.newest().map_or(0, |summary| summary.items);
    let Some(last) = items.checked_sub(1).and_then(|last| record.items.get(last)) else { return Ok(put) };
    // A summary of the beginning covers the same items in the branch.
    let summary = store::Summary { body: summaries.write(), items, last: last.id.clone() };
    match gateway.store().summarize(&gateway.owner(), &id, summary).await {
        Ok(()) => show(&gateway, load(&gateway, &id, Part::Nothing).await?).await,
        Err(error) => {
            tracing::warn!(%error, "could not copy the summary to a branch; it is made again");
            Ok(put)
        }
    }
}

/// `GET /v1/conversations/{id}/items`.
pub async fn items(Client(gateway): Client, Path(id): Path<String>, Query(query): Query<PageQuery>) -> Result<Response, ApiError> {
    check_id(&id)?;
    let page = gateway.store().page(&gateway.owner(), &id, Part::All, page_wanted(query)?).await.map_err(of_store)?;
    written::items(&gateway, page).await
}

/// `POST /v1/conversations/{id}/items`.
pub async fn add(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(&gateway);
    let sent = gateway.compute_body(body.weight(), move || {
        let Fields { items, .. } = fields(&body)?;
        new_items(&worker, items.ok_or_else(|| ApiError::invalid("items", "`items` is missing"))?)
    });
    let items = sent.await?;
    let record = load(&gateway, &id, Part::Nothing).await?;
    let bytes = items.iter().map(|item| item.body.len()).sum();
    let titled = gateway.compute_body(bytes, move || {
        let body = retitled(&record, &items)?;
        Ok((Addition { body, ..Addition::of(items.clone()) }, items))
    });
    let (addition, items) = titled.await?;
    gateway.store().append(&gateway.owner(), &id, addition, unix_seconds()).await.map_err(of_store)?;
    written::items(&gateway, ItemPage { items, has_more: false }).await
}

/// `GET /v1/conversations/{id}/items/{item}`.
pub async fn item(Client(gateway): Client, Path((id, item)): Path<(String, String)>) -> Result<Response, ApiError> {
    let (record, share) = load(&gateway, &id, Part::All).await?.into_parts();
    match record.items.into_iter().find(|stored| stored.id == item) {
        Some(stored) => Ok(written::json(written::held(stored.body.into(), share))),
        None => Err(no_item("item_id", &id, &item)),
    }
}

/// `DELETE /v1/conversations/{id}/items/{item}`. Answers with the conversation.
pub async fn remove(Client(gateway): Client, Path((id, item)): Path<(String, String)>) -> Answered {
    check_id(&id)?;
    gateway.store().remove(&gateway.owner(), &id, &item).await.map_err(of_store)?;
    show(&gateway, load(&gateway, &id, Part::Nothing).await?).await
}

async fn put(gateway: &Arc<Gateway>, conversation: Conversation, earlier: Vec<String>, items: Vec<Item>, now: u64) -> Answered {
    let id = conversation.id().to_owned();
    let record = NewRecord { id: id.clone(), kind: Kind::Conversation, body: conversation.body(), earlier, items, ..NewRecord::default() };
    gateway.store().put(&gateway.owner(), record, now).await.map_err(of_store)?;
    show(gateway, load(gateway, &id, Part::Nothing).await?).await
}

/// Reads a body, which may be empty: then it has no fields.
fn fields<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, ApiError> {
    if body.is_empty() { Ok(T::default()) } else { parse::json(body) }
}

/// Reads items and gives each an id of its own, since a conversation may contain equal ones. Takes a while: see [`Gateway::compute`].
fn new_items(gateway: &Gateway, items: Vec<Value>) -> Result<Vec<Item>, ApiError> {
    let counted = |sent: Sent| {
        if matches!(sent.said, ItemContent::Reference(_)) {
            return Err(ApiError::invalid("items", "`items` must be items themselves, not references to stored ones"));
        }
        let item = sent.named(new_id(sent.prefix()));
        gateway.check_text_length("items", sent.said.text())?;
        checkpoint()?;
        Ok(Item { tokens: sent.said.tokens(&gateway.text().tokenizer), ..item })
    };
    request::sent(items, "items")?.into_iter().map(counted).collect()
}

async fn load(gateway: &Gateway, id: &str, part: Part) -> Result<Loaded<Record>, ApiError> {
    check_id(id)?;
    gateway.store().load(&gateway.owner(), id, part).await.map_err(of_store)
}

async fn show(gateway: &Arc<Gateway>, record: Loaded<Record>) -> Answered {
    written::write(gateway, record.body.len(), move || shown(&record)).await
}

fn shown(record: &Record) -> Result<Value, ApiError> {
    let summaries = Summaries::read(record.summary.as_deref());
    Ok(Conversation::read(record)?.shown(record.updated, record.totals, summaries.newest()))
}

/// Finds the index of an item in a history: the last, if it occurs twice.
fn place_of(record: &Record, item: &str) -> Option<usize> {
    record.items.iter().rposition(|stored| stored.id == item)
}

/// Returns a record's new body, if new items give it a title.
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
