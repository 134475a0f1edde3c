//! `/v1/conversations`: items that responses go on from and are added to.

use super::{
    access::Client,
    errors::ApiError,
    parse,
    responses::{
        PageWish,
        items::{Said, Sent},
        listed,
        output::new_id,
        page_wanted, parsed, request,
    },
};
use crate::{
    gateway::{Gateway, unix_seconds},
    store::{Item, ItemPage, NewRecord, Part, StoreError},
};
use axum::{Json, body::Body, extract::Path};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::collections::BTreeMap;

type Answered = Result<Json<Value>, ApiError>;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    metadata: Option<BTreeMap<String, String>>,
    items: Option<Vec<Value>>,
}

/// `POST /v1/conversations`.
pub async fn create(Client(gateway): Client, body: Body) -> Answered {
    let Fields { metadata, items } = fields(&gateway, body).await?;
    let metadata = request::metadata(metadata)?;
    let items = new_items(items.unwrap_or_default())?;
    let (id, now) = (new_id("conv"), unix_seconds());
    let conversation = json!({"id": id, "object": "conversation", "created_at": now, "metadata": metadata});
    let record = NewRecord { id, body: conversation.to_string(), items, ..NewRecord::default() };
    gateway.store().put(&gateway.owner(), record, now).await.map_err(of_store)?;
    Ok(Json(conversation))
}

/// `GET /v1/conversations/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    conversation(&gateway, &id).await.map(Json)
}

/// `POST /v1/conversations/{id}`: other metadata.
pub async fn update(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    let Fields { metadata, .. } = fields(&gateway, body).await?;
    let mut conversation = conversation(&gateway, &id).await?;
    conversation["metadata"] = json!(request::metadata(metadata)?);
    gateway.store().update(&gateway.owner(), &id, conversation.to_string(), unix_seconds()).await.map_err(of_store)?;
    Ok(Json(conversation))
}

/// `DELETE /v1/conversations/{id}`. Responses keep the items that they were made from.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    check_id(&id)?;
    gateway.store().delete(&gateway.owner(), &id).await.map_err(of_store)?;
    Ok(Json(json!({"id": id, "object": "conversation.deleted", "deleted": true})))
}

/// `GET /v1/conversations/{id}/items`.
pub async fn items(Client(gateway): Client, Path(id): Path<String>, query: PageWish) -> Answered {
    check_id(&id)?;
    let page = gateway.store().page(&gateway.owner(), &id, page_wanted(query, Part::All)?).await.map_err(of_store)?;
    listed(page).map(Json)
}

/// `POST /v1/conversations/{id}/items`.
pub async fn add(Client(gateway): Client, Path(id): Path<String>, body: Body) -> Answered {
    check_id(&id)?;
    let Fields { items, .. } = fields(&gateway, body).await?;
    let items = new_items(items.ok_or_else(|| ApiError::invalid("items", "`items` is missing"))?)?;
    gateway.store().append(&gateway.owner(), &id, items.clone(), unix_seconds()).await.map_err(of_store)?;
    listed(ItemPage { items, has_more: false }).map(Json)
}

/// `GET /v1/conversations/{id}/items/{item}`.
pub async fn item(Client(gateway): Client, Path((id, item)): Path<(String, String)>) -> Answered {
    check_id(&id)?;
    let record = gateway.store().load(&gateway.owner(), &id, Part::All).await.map_err(of_store)?;
    match record.items.iter().find(|stored| stored.id == item) {
        Some(Item { id, body }) => parsed(id, body).map(Json),
        None => Err(ApiError::not_found("item_id", format!("`{id}` has no item `{item}`"))),
    }
}

/// `DELETE /v1/conversations/{id}/items/{item}`. Answers with the conversation.
pub async fn remove(Client(gateway): Client, Path((id, item)): Path<(String, String)>) -> Answered {
    check_id(&id)?;
    gateway.store().remove(&gateway.owner(), &id, &item).await.map_err(of_store)?;
    conversation(&gateway, &id).await.map(Json)
}

/// An empty body is one without fields.
async fn fields<T: DeserializeOwned + Default>(gateway: &Gateway, body: Body) -> Result<T, ApiError> {
    let body = gateway.read(body).await?;
    if body.is_empty() { Ok(T::default()) } else { parse::json(&body) }
}

/// Each with an id of its own: a conversation may say the same twice.
fn new_items(items: Vec<Value>) -> Result<Vec<Item>, ApiError> {
    let named = |sent: Sent| match &sent.said {
        Said::Reference(_) => Err(ApiError::invalid("items", "`items` must be items themselves, not references to stored ones")),
        _ => Ok(sent.named(new_id(sent.prefix()))),
    };
    request::sent(items, "items")?.into_iter().map(named).collect()
}

async fn conversation(gateway: &Gateway, id: &str) -> Result<Value, ApiError> {
    check_id(id)?;
    let record = gateway.store().load(&gateway.owner(), id, Part::Nothing).await.map_err(of_store)?;
    parsed(id, &record.body)
}

fn check_id(id: &str) -> Result<(), ApiError> {
    if id.starts_with("conv_") { Ok(()) } else { Err(ApiError::not_found("conversation_id", format!("`{id}` is not a conversation's id"))) }
}

fn of_store(error: StoreError) -> ApiError {
    ApiError::of_store("conversation_id", error)
}
