//! `/v1/memories`: facts about a user that are kept from one conversation to the next. Only their owner creates, lists and deletes them,
//! and they reach only chats that ask for them (`memory: true`).

use super::{
    access::Client,
    parameters::{Path, Query},
};
use crate::{
    base::{
        memories::{Facts, Limits},
        stamp::{new_id, unix_seconds},
    },
    http::pages::{PageQuery, page_wanted, parsed},
    requests::error::ApiError,
    serving::gateway::Gateway,
    store::{Kind, NewRecord, Page, Part, Record, RecordPage, StoreError},
};
use axum::{Json, body::Body};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// The maximum length of one fact: longer ones are notes, and would take the room of all others.
const TEXT_BYTES_MAX: usize = 1024;
/// The number of facts that are deleted at a time.
const DELETED_AT_A_TIME: usize = 100;

/// A fact, as stored and as shown.
#[derive(Debug, Serialize, Deserialize)]
struct Memory {
    id: String,
    object: String,
    created_at: u64,
    text: String,
}

#[derive(Debug, Deserialize)]
struct Fields {
    text: String,
}

type Answered = Result<Json<Value>, ApiError>;

/// `POST /v1/memories`.
pub async fn create(Client(gateway): Client, body: Body) -> Answered {
    let limits = limits(&gateway)?;
    let Fields { text } = gateway.read_json(body).await?;
    let text = text.trim().to_owned();
    if !(1..=TEXT_BYTES_MAX).contains(&text.len()) {
        let message = format!("`text` must have 1 to {TEXT_BYTES_MAX} bytes, and this one has {}", text.len());
        return Err(ApiError::invalid("text", message));
    }
    // It will be part of system prompts.
    let worker = Arc::clone(&gateway);
    let (text, doubts) = gateway
        .compute(move || {
            let doubts = worker.check_input("text", [text.as_str()], &[])?;
            Ok((text, doubts))
        })
        .await?;
    gateway.moderate("text", doubts).await?;
    let now = unix_seconds();
    let memory = Memory { id: new_id("mem_"), object: "memory".into(), created_at: now, text };
    let body = serde_json::to_string(&memory).expect("it is made of strings and a number");
    let record = NewRecord { id: memory.id.clone(), kind: Kind::Memory, body, ..NewRecord::default() };
    let owner = gateway.owner();
    gateway.store().put(&owner, record, now).await.map_err(of_store)?;
    // Checked after it was stored: of several that are stored at once, the first ones stay.
    match check_room(&gateway, limits, &memory.id).await {
        Ok(()) => Ok(Json(json!(memory))),
        Err(error) => {
            if let Err(left) = gateway.store().delete(&owner, &memory.id).await {
                tracing::warn!(error = %left, "could not remove a memory that exceeds the limit");
            }
            Err(error)
        }
    }
}

/// `GET /v1/memories`: the caller's own, the newest first.
pub async fn list(Client(gateway): Client, Query(query): Query<PageQuery>) -> Answered {
    limits(&gateway)?;
    let found = gateway.store().list(&gateway.owner(), Kind::Memory, page_wanted(query)?).await;
    let RecordPage { records, has_more } = found.map_err(|error| ApiError::of_store("after", error))?;
    let data = records.iter().map(|record| read(record).map(|memory| json!(memory))).collect::<Result<Vec<_>, _>>()?;
    let id = |record: Option<&Record>| record.map(|record| record.id.clone());
    Ok(Json(json!({
        "object": "list", "data": data, "first_id": id(records.first()), "last_id": id(records.last()), "has_more": has_more,
    })))
}

/// `GET /v1/memories/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    limits(&gateway)?;
    check_id(&id)?;
    let record = gateway.store().load(&gateway.owner(), &id, Part::Nothing).await.map_err(of_store)?;
    Ok(Json(json!(read(&record)?)))
}

/// `DELETE /v1/memories/{id}`.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    limits(&gateway)?;
    check_id(&id)?;
    gateway.store().delete(&gateway.owner(), &id).await.map_err(of_store)?;
    Ok(Json(json!({"id": id, "object": "memory.deleted", "deleted": true})))
}

/// `DELETE /v1/memories`: all facts of the caller.
pub async fn delete_all(Client(gateway): Client) -> Answered {
    limits(&gateway)?;
    let owner = gateway.owner();
    let mut deleted = 0;
    loop {
        let RecordPage { records, has_more } = all(&gateway, DELETED_AT_A_TIME).await.map_err(of_store)?;
        for record in records {
            match gateway.store().delete(&owner, &record.id).await {
                Ok(()) => deleted += 1,
                // A concurrent request deleted it first.
                Err(StoreError::NotFound(_)) => {}
                Err(error) => return Err(of_store(error)),
            }
        }
        if !has_more {
            return Ok(Json(json!({"object": "memories.deleted", "deleted": deleted})));
        }
    }
}

/// Loads the facts for a chat that asks for them. If the store does not answer, the chat is answered without them, and the answer reports
/// it.
pub async fn facts(gateway: &Gateway) -> Result<Facts, ApiError> {
    let limits = gateway.memories().ok_or_else(|| {
        ApiError::invalid(
            "memory",
            "`memory` is true, but this server remembers nothing between conversations: it was started without [memory]",
        )
    })?;
    match all(gateway, limits.facts).await {
        Ok(RecordPage { records, .. }) => {
            let texts = records.iter().map(|record| read(record).map(|memory| memory.text)).collect::<Result<_, _>>()?;
            Ok(Facts { texts, lost: None })
        }
        Err(error @ (StoreError::Failed(_) | StoreError::Busy)) => {
            tracing::warn!(%error, "could not load a user's memories; answering the chat without them");
            Ok(Facts { texts: Vec::new(), lost: Some(error.to_string()) })
        }
        Err(error) => Err(ApiError::of_store("memory", error)),
    }
}

/// Removes a fact that was stored although there is no room for it, and refuses it.
async fn check_room(gateway: &Gateway, limits: Limits, id: &str) -> Result<(), ApiError> {
    let RecordPage { records, .. } = all(gateway, limits.facts).await.map_err(of_store)?;
    let Some(place) = records.iter().position(|record| record.id == id) else {
        return Err(ApiError::no_room_to_remember(format!("you have {} facts, and may have no more: delete some first", limits.facts)));
    };
    let bytes = records[..=place].iter().map(|record| read(record).map(|memory| memory.text.len())).sum::<Result<usize, _>>()?;
    if bytes <= limits.bytes {
        return Ok(());
    }
    Err(ApiError::no_room_to_remember(format!("your facts would have {bytes} bytes, and may have {}: delete some first", limits.bytes)))
}

/// Returns the first of the caller's facts.
async fn all(gateway: &Gateway, limit: usize) -> Result<RecordPage, StoreError> {
    gateway.store().list(&gateway.owner(), Kind::Memory, Page { after: None, limit, descending: false }).await
}

fn read(record: &Record) -> Result<Memory, ApiError> {
    serde_json::from_value(parsed(&record.id, &record.body)?)
        .map_err(|error| ApiError::internal(format!("what is stored as `{}` is no fact: {error}", record.id)))
}

fn limits(gateway: &Gateway) -> Result<Limits, ApiError> {
    gateway.memories().ok_or_else(ApiError::no_memories)
}

fn check_id(id: &str) -> Result<(), ApiError> {
    if id.starts_with("mem_") { Ok(()) } else { Err(ApiError::not_found("memory_id", format!("`{id}` is not a memory's id"))) }
}

fn of_store(error: StoreError) -> ApiError {
    ApiError::of_store("memory_id", error)
}
