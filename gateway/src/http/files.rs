//! `/v1/files`: requests of batches, and their answers.

use super::{
    access::Client,
    form::{Form, Part},
    parameters::{Path, Query},
};
use crate::{
    batch::file::{INPUT, StoredFile},
    batches::{BatchError, Batches, Listed, Page},
    requests::{error::ApiError, parse},
    serving::gateway::Gateway,
};
use axum::{
    Json,
    body::{Body, Bytes},
    extract::Request,
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{io::AsyncReadExt, time};

/// The longest time of an upload.
const UPLOAD_MAX: Duration = Duration::from_secs(3600);
/// The least mean rate of an upload, in bytes per second, since places for uploads are few.
const RATE_MIN: u64 = 16 << 10;
/// The part of the longest silence during which the rate is not checked, at the start of an upload.
const RATE_AFTER: u32 = 3;
/// The maximum size of a form field other than the file.
const FIELD_BYTES_MAX: usize = 1024;
const NAME_CHARS_MAX: usize = 255;
/// Limits of `expires_after`, as in OpenAI's API.
const AGE_S_MIN: u64 = 3600;
const AGE_S_MAX: u64 = 2_592_000;
const PAGE_MAX: usize = 10_000;
const CHUNK_BYTES: usize = 64 << 10;

type Answered = Result<Json<Value>, ApiError>;

/// `POST /v1/files`.
pub async fn create(Client(gateway): Client, request: Request) -> Answered {
    gateway.check_draining()?;
    let batches = gateway.batches()?;
    let _place = gateway.admit_upload()?;
    let form = Form::of(request).await?;
    let stored = time::timeout(UPLOAD_MAX, store(&gateway, batches, form)).await;
    Ok(Json(stored.unwrap_or_else(|_| Err(ApiError::too_slow(UPLOAD_MAX)))?.view()))
}

async fn store(gateway: &Gateway, batches: &Batches, mut form: Form) -> Result<StoredFile, ApiError> {
    let owner = gateway.owner().0;
    let mut pace = Pace::new(gateway.body_timeout());
    let (mut arrived, mut purpose, mut anchor, mut age) = (None, None, None, None);
    while let Some(mut field) = pace.in_time(form.next()).await? {
        match field.name() {
            "file" if arrived.is_some() => return Err(ApiError::invalid("file", "the form has a second `file`")),
            "file" => {
                let filename: String = field.file_name().unwrap_or("requests.jsonl").chars().take(NAME_CHARS_MAX).collect();
                let mut arriving = batches.upload(&owner).await.map_err(of_file)?;
                while let Some(chunk) = pace.in_time(field.chunk()).await? {
                    pace.heard(chunk.len());
                    arriving.write(&chunk).await.map_err(of_file)?;
                }
                arrived = Some((arriving, filename));
            }
            "purpose" => purpose = Some(text("purpose", field, &pace).await?),
            "expires_after[anchor]" => anchor = Some(text("expires_after[anchor]", field, &pace).await?),
            "expires_after[seconds]" => age = Some(text("expires_after[seconds]", field, &pace).await?),
            other => return Err(ApiError::malformed(format!("the form has a field `{}`, which files do not have", other.escape_debug()))),
        }
    }
    match purpose.as_deref() {
        Some(INPUT) => {}
        Some(other) => {
            let message = format!("`purpose` is `{}`: files are kept for `{INPUT}` only", other.escape_debug());
            return Err(ApiError::invalid("purpose", message));
        }
        None => return Err(ApiError::invalid("purpose", format!("`purpose` is missing: it must be `{INPUT}`"))),
    }
    let age =
        age.map(|age| age.parse().map_err(|_| ApiError::invalid("expires_after.seconds", "`expires_after[seconds]` is not a number")));
    let age = check_age(anchor.as_deref(), age.transpose()?)?;
    let (arrived, filename) = arrived.ok_or_else(|| ApiError::invalid("file", "`file` is missing"))?;
    if arrived.bytes() == 0 {
        return Err(ApiError::invalid("file", "`file` is empty: it must have a line per request"));
    }
    batches.keep(arrived, &owner, filename, age).await.map_err(of_file)
}

/// Reads `expires_after`, if it was given.
pub(super) fn check_age(anchor: Option<&str>, seconds: Option<u64>) -> Result<Option<u64>, ApiError> {
    match (anchor, seconds) {
        (None, None) => Ok(None),
        (Some("created_at") | None, Some(seconds)) => parse::in_range("expires_after.seconds", seconds, AGE_S_MIN..=AGE_S_MAX).map(Some),
        _ => Err(ApiError::invalid("expires_after", "`expires_after` has an `anchor`, which is `created_at`, and `seconds`")),
    }
}

async fn text(name: &str, mut field: Part<'_>, pace: &Pace) -> Result<String, ApiError> {
    let mut text = Vec::new();
    while let Some(chunk) = pace.in_time(field.chunk()).await? {
        text.extend_from_slice(&chunk);
        if text.len() > FIELD_BYTES_MAX {
            return Err(ApiError::invalid(name, format!("`{name}` is longer than {FIELD_BYTES_MAX} bytes")));
        }
    }
    String::from_utf8(text).map_err(|_| ApiError::invalid(name, format!("`{name}` is not UTF-8")))
}

/// The pace of an upload, which has a lower bound.
#[derive(Debug)]
struct Pace {
    began: Instant,
    bytes: u64,
    /// The longest silence of the client.
    silence_max: Duration,
}

impl Pace {
    fn new(silence_max: Duration) -> Self {
        Self { began: Instant::now(), bytes: 0, silence_max }
    }

    fn heard(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// The time at which the bytes so far are too few. Each further byte postpones it.
    fn due(&self) -> Instant {
        self.began + self.silence_max / RATE_AFTER + Duration::from_secs_f64(self.bytes as f64 / RATE_MIN as f64)
    }

    /// Waits for the next part of the form.
    async fn in_time<T>(&self, read: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        let (silent, slow) = (Instant::now() + self.silence_max, self.due());
        let read = time::timeout_at(silent.min(slow).into(), read).await;
        read.unwrap_or_else(|_| Err(if slow < silent { ApiError::too_slow_for(RATE_MIN) } else { ApiError::too_slow(self.silence_max) }))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ListQuery {
    pub(super) after: Option<String>,
    pub(super) limit: Option<usize>,
    pub(super) order: Option<String>,
    purpose: Option<String>,
}

/// `GET /v1/files`.
pub async fn list(Client(gateway): Client, Query(query): Query<ListQuery>) -> Answered {
    let page = page(&query, PAGE_MAX, PAGE_MAX)?;
    let files = gateway.batches()?.files(&gateway.owner().0, query.purpose.as_deref(), &page);
    Ok(Json(listed(files.map_err(|error| ApiError::of_batches("after", error))?, StoredFile::view)))
}

pub(super) fn page(query: &ListQuery, limit_default: usize, limit_max: usize) -> Result<Page, ApiError> {
    let ascending = match query.order.as_deref() {
        None | Some("desc") => false,
        Some("asc") => true,
        Some(other) => return Err(ApiError::invalid("order", format!("`order` is `{other}`: it must be `asc` or `desc`"))),
    };
    let limit = parse::in_range("limit", query.limit.unwrap_or(limit_default), 1..=limit_max)?;
    Ok(Page { after: query.after.clone(), limit, ascending })
}

pub(super) fn listed<T>(page: Listed<T>, view: impl Fn(&T) -> Value) -> Value {
    let data: Vec<_> = page.items.iter().map(view).collect();
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    json!({"object": "list", "first_id": id(data.first()), "last_id": id(data.last()), "has_more": page.has_more, "data": data})
}

/// `GET /v1/files/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    gateway.batches()?.stored_file(&gateway.owner().0, &id).map(|file| Json(file.view())).map_err(of_file)
}

/// `DELETE /v1/files/{id}`.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    gateway.batches()?.delete_file(&gateway.owner().0, &id).await.map_err(of_file)?;
    Ok(Json(json!({"id": id, "object": "file", "deleted": true})))
}

/// `GET /v1/files/{id}/content`.
pub async fn content(Client(gateway): Client, Path(id): Path<String>) -> Result<Response, ApiError> {
    let batches: &Arc<Batches> = gateway.batches()?;
    let stored = batches.stored_file(&gateway.owner().0, &id).map_err(of_file)?;
    let file = tokio::fs::File::open(batches.content(&stored)).await.map_err(|error| of_file(error.into()))?;
    let chunks = stream::try_unfold(file, |mut file| async move {
        let mut chunk = vec![0; CHUNK_BYTES];
        let bytes = file.read(&mut chunk).await?;
        chunk.truncate(bytes);
        Ok::<_, std::io::Error>((bytes > 0).then(|| (Bytes::from(chunk), file)))
    });
    let headers = [(header::CONTENT_TYPE, "application/octet-stream".to_owned()), (header::CONTENT_LENGTH, stored.bytes.to_string())];
    Ok((headers, Body::from_stream(chunks)).into_response())
}

fn of_file(error: BatchError) -> ApiError {
    ApiError::of_batches("file_id", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_come_at_the_least_rate_for_as_long_as_it_takes() {
        let (mut pace, first) = (Pace::new(Duration::from_secs(60)), Duration::from_secs(20));
        assert_eq!(pace.due(), pace.began + first);
        (0..600).for_each(|_| pace.heard(RATE_MIN as usize));
        assert_eq!(pace.due(), pace.began + first + Duration::from_secs(600));
    }
}
