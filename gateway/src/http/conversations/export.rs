//! Conversations as JSON lines: one conversation each, with all its items.

use super::{
    super::{access::Client, parameters::Path, written},
    load, of_store, shown,
};
use crate::{
    base::shares::Share,
    requests::error::ApiError,
    serving::gateway::Gateway,
    store::{Kind, Page, Part, Record, RecordPage, access::Loaded},
};
use axum::{
    body::{Body, Bytes},
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;
use serde_json::{Value, value::RawValue};
use std::{collections::VecDeque, sync::Arc};

/// The number of conversations whose ids are fetched at a time.
const PAGE: usize = 100;

/// `GET /v1/conversations/{id}/export`.
pub async fn export(Client(gateway): Client, Path(id): Path<String>) -> Result<Response, ApiError> {
    let record = load(&gateway, &id, Part::All).await?;
    let (line, share) = line(&gateway, record).await?;
    Ok(jsonl(written::held(line, share)))
}

/// `GET /v1/conversations/export`: all of the caller's conversations, the oldest first. An unreadable conversation breaks the export off,
/// so that a part cannot pass for the whole.
pub async fn export_all(Client(gateway): Client) -> Result<Response, ApiError> {
    let mut walk = Walk { gateway, ids: VecDeque::new(), after: None, last: false, sent: None };
    // The first page is fetched now: if the store is down, the response still has a status.
    walk.more().await?;
    let lines = stream::unfold(Some(walk), |walk| async move {
        let mut walk = walk?;
        match walk.next().await {
            // The share of one line is released when the next one is made.
            Ok(Some((line, share))) => {
                walk.sent = Some(share);
                Some((Ok(line), Some(walk)))
            }
            Ok(None) => None,
            Err(error) => Some((Err(error.message().to_owned()), None)),
        }
    });
    Ok(jsonl(Body::from_stream(lines)))
}

struct Walk {
    gateway: Arc<Gateway>,
    ids: VecDeque<String>,
    after: Option<String>,
    last: bool,
    /// The share of the line that was sent last.
    sent: Option<Share>,
}

impl Walk {
    async fn next(&mut self) -> Result<Option<(Bytes, Share)>, ApiError> {
        self.sent = None;
        loop {
            let Some(id) = self.ids.pop_front() else {
                if self.last {
                    return Ok(None);
                }
                self.more().await?;
                continue;
            };
            match load(&self.gateway, &id, Part::All).await {
                Ok(record) => return line(&self.gateway, record).await.map(Some),
                // It was deleted in the meantime.
                Err(error) if error.status() == 404 => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn more(&mut self) -> Result<(), ApiError> {
        let page = Page { after: self.after.take(), limit: PAGE, descending: false };
        let found = self.gateway.store().list(&self.gateway.owner(), Kind::Conversation, page).await;
        let RecordPage { records, has_more } = found.map_err(of_store)?;
        self.last = !has_more;
        self.after = records.last().map(|record| record.id.clone());
        self.ids = records.into_iter().map(|record| record.id).collect();
        Ok(())
    }
}

async fn line(gateway: &Arc<Gateway>, loaded: Loaded<Record>) -> Result<(Bytes, Share), ApiError> {
    #[derive(Serialize)]
    struct Line<'a> {
        #[serde(flatten)]
        conversation: Value,
        items: Vec<&'a RawValue>,
    }
    // The line takes the place of what it is made of.
    let (record, share) = loaded.into_parts();
    let bytes = record.items.iter().map(|item| item.body.len()).sum();
    let line = gateway.compute_body(bytes, move || {
        let items = record.items.iter().map(written::raw).collect::<Result<_, _>>()?;
        let mut line = serde_json::to_vec(&Line { conversation: shown(&record)?, items }).expect("its keys are strings");
        line.push(b'\n');
        Ok(line.into())
    });
    Ok((line.await?, share))
}

fn jsonl(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/jsonl"), (header::CONTENT_DISPOSITION, "attachment; filename=\"conversations.jsonl\"")], body)
        .into_response()
}
