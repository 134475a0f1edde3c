//! `GET /admin/export`: all that is kept of a user, or of a tenant and its users, as JSON lines, for operators.
//!
//! A task writes lines as fast as they are read, and a bounded number ahead: the longest has a page of items. The last line is
//! `{"kind": "end", …}`: without it, a part is missing.

use super::{admin, parameters::Query};
use crate::{
    base::owner::Whose,
    requests::error::ApiError,
    serving::gateway::Gateway,
    store::{Item, Kind, Owner, Page, Part, StoreError},
};
use axum::{
    body::{Body, Bytes},
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};
use std::{io::Read, sync::Arc, time::Duration};
use tokio::sync::mpsc;

/// The number of lines that wait to be read.
const LINES_AHEAD: usize = 4;
const OWNERS_AT_A_TIME: usize = 100;
const RECORDS_AT_A_TIME: usize = 20;
const ITEMS_AT_A_TIME: usize = 200;
/// The part of a file that one line has.
const PART_BYTES: usize = 48 << 10;
/// The time for which a line waits to be read: then its reader is taken for gone.
const READ_MAX: Duration = Duration::from_secs(120);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    tenant: String,
    #[serde(default)]
    user: Option<String>,
}

/// Writes lines, until their reader is gone.
struct Lines {
    to: mpsc::Sender<Result<Bytes, String>>,
    count: u64,
}

/// The reason why an export ends early.
enum Broken {
    /// Its reader is gone, or too slow.
    Unread,
    Failed(String),
}

impl From<StoreError> for Broken {
    fn from(error: StoreError) -> Self {
        Self::Failed(error.to_string())
    }
}

pub async fn export(State(gateway): State<Arc<Gateway>>, Query(wanted): Query<Wanted>) -> Result<Response, ApiError> {
    let whose = admin::whose(wanted.tenant, wanted.user)?;
    // If the store is down, the answer still has a status.
    gateway.store().owners(&whose, None, 1).await.map_err(|error| ApiError::of_store("tenant", error))?;
    let (to, lines) = mpsc::channel(LINES_AHEAD);
    tokio::spawn(async move {
        let mut lines = Lines { to: to.clone(), count: 0 };
        if let Err(Broken::Failed(problem)) = write_all(&gateway, &whose, &mut lines).await {
            tracing::error!(tenant = whose.tenant, problem, "an export broke off");
            let _ = to.send(Err(problem)).await;
        }
    });
    let lines = stream::unfold(lines, |mut lines| async move { Some((lines.recv().await?, lines)) });
    let headers = [(header::CONTENT_TYPE, "application/jsonl"), (header::CONTENT_DISPOSITION, "attachment; filename=\"export.jsonl\"")];
    Ok((headers, Body::from_stream(lines)).into_response())
}

impl Lines {
    async fn write(&mut self, line: &impl Serialize) -> Result<(), Broken> {
        let mut bytes = serde_json::to_vec(line).map_err(|error| Broken::Failed(error.to_string()))?;
        bytes.push(b'\n');
        self.count += 1;
        self.to.send_timeout(Ok(bytes.into()), READ_MAX).await.map_err(|_| Broken::Unread)
    }
}

async fn write_all(gateway: &Arc<Gateway>, whose: &Whose, lines: &mut Lines) -> Result<(), Broken> {
    lines.write(&json!({"kind": "export", "tenant": whose.tenant, "user": whose.user})).await?;
    let mut after = None;
    loop {
        let owners = gateway.store().owners(whose, after, OWNERS_AT_A_TIME).await?;
        for owner in &owners {
            for (kind, name) in [(Kind::Response, "response"), (Kind::Conversation, "conversation"), (Kind::Memory, "memory")] {
                write_records(gateway, owner, kind, name, lines).await?;
            }
        }
        match owners.into_iter().next_back() {
            Some(last) => after = Some(last.0),
            None => break,
        }
    }
    write_files(gateway, whose, lines).await?;
    write_blocking(gateway, whose, lines).await?;
    let count = lines.count;
    lines.write(&json!({"kind": "end", "lines": count})).await
}

async fn write_records(gateway: &Arc<Gateway>, owner: &Owner, kind: Kind, name: &str, lines: &mut Lines) -> Result<(), Broken> {
    let mut after = None;
    loop {
        let page = Page { after, limit: RECORDS_AT_A_TIME, descending: false };
        let page = match gateway.store().list(owner, kind, page).await {
            // The last record of the page before was deleted meanwhile.
            Err(StoreError::NotFound(id)) => return Err(Broken::Failed(format!("`{id}` was deleted meanwhile: export again"))),
            page => page?,
        };
        for record in &page.records {
            let record = match gateway.store().load(owner, &record.id, Part::Nothing).await {
                Err(StoreError::NotFound(_)) => continue,
                record => record?,
            };
            let line = json!({
                "kind": name, "owner": owner.0, "id": record.id, "body": value(&record.body), "summary": record.summary,
                "updated": (kind != Kind::Memory).then_some(record.updated),
            });
            lines.write(&line).await?;
            write_items(gateway, owner, &record.id, lines).await?;
        }
        match page.records.last().filter(|_| page.has_more) {
            Some(last) => after = Some(last.id.clone()),
            None => return Ok(()),
        }
    }
}

/// Writes a record's items, a page in one line.
async fn write_items(gateway: &Arc<Gateway>, owner: &Owner, id: &str, lines: &mut Lines) -> Result<(), Broken> {
    #[derive(Serialize)]
    struct Line<'a> {
        kind: &'static str,
        owner: &'a str,
        of: &'a str,
        items: Vec<Box<RawValue>>,
    }
    let mut after = None;
    loop {
        let page = Page { after, limit: ITEMS_AT_A_TIME, descending: false };
        let page = match gateway.store().page(owner, id, Part::All, page).await {
            Err(StoreError::NotFound(_)) => return Ok(()),
            page => page?,
        };
        if !page.items.is_empty() {
            let raw =
                |item: &Item| RawValue::from_string(item.body.clone()).map_err(|error| Broken::Failed(format!("{}: {error}", item.id)));
            let items = page.items.iter().map(raw).collect::<Result<_, _>>()?;
            lines.write(&Line { kind: "items", owner: &owner.0, of: id, items }).await?;
        }
        match page.items.last().filter(|_| page.has_more) {
            Some(last) => after = Some(last.id.clone()),
            None => return Ok(()),
        }
    }
}

/// Writes files, with their contents, and batches.
async fn write_files(gateway: &Arc<Gateway>, whose: &Whose, lines: &mut Lines) -> Result<(), Broken> {
    let Ok(kept) = gateway.batches() else { return Ok(()) };
    let (files, batches) = kept.of_owners(whose);
    for file in files {
        lines.write(&json!({"kind": "file", "file": file})).await?;
        let path = kept.content(&file);
        let Ok(open) = tokio::task::spawn_blocking(move || std::fs::File::open(path)).await else { continue };
        // It was deleted meanwhile.
        let Ok(mut contents) = open else { continue };
        for number in 0_u64.. {
            let read = tokio::task::spawn_blocking(move || {
                let mut part = Vec::with_capacity(PART_BYTES);
                let read = (&mut contents).take(PART_BYTES as u64).read_to_end(&mut part);
                (contents, read.map(|_| part))
            });
            let (again, part) = read.await.map_err(|error| Broken::Failed(error.to_string()))?;
            contents = again;
            let part = part.map_err(|error| Broken::Failed(format!("{}: {error}", file.id)))?;
            if part.is_empty() {
                break;
            }
            let base64 = BASE64_STANDARD.encode(part);
            lines.write(&json!({"kind": "file_part", "of": file.id, "number": number, "base64": base64})).await?;
        }
    }
    for batch in batches {
        lines.write(&json!({"kind": "batch", "batch": batch})).await?;
    }
    Ok(())
}

/// Writes what is read on a thread that may wait for the disk: opinions, and usage.
async fn write_blocking(gateway: &Arc<Gateway>, whose: &Whose, lines: &mut Lines) -> Result<(), Broken> {
    let (found, mut rows) = mpsc::channel::<Value>(LINES_AHEAD);
    let (worker, whose) = (Arc::clone(gateway), whose.clone());
    let reading = tokio::task::spawn_blocking(move || {
        let send = |row: Value| found.blocking_send(row).is_ok();
        let opinions = worker.feedback().map_or(Ok(()), |feedback| {
            feedback.each_of(&whose, |opinion| send(json!({"kind": "opinion", "opinion": opinion}))).map_err(|error| error.to_string())
        });
        let events = |event: &_| send(json!({"kind": "usage", "event": event}));
        opinions.and_then(|()| worker.tenants().each_usage(&whose, events).map_err(|error| error.to_string()))
    });
    while let Some(row) = rows.recv().await {
        lines.write(&row).await?;
    }
    reading.await.map_err(|error| Broken::Failed(error.to_string()))?.map_err(Broken::Failed)
}

fn value(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|_| body.into())
}
