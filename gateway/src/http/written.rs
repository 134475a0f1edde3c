//! Answers that are serialized on a compute thread. Stored items are JSON already and pass through unchanged.

use crate::{
    base::shares::Share,
    http::pages::not_json,
    requests::error::ApiError,
    serving::gateway::Gateway,
    store::{Item, ItemPage},
};
use axum::{
    body::{Body, Bytes, HttpBody},
    http::header,
    response::{IntoResponse, Response},
};
use hyper::body::{Frame, SizeHint};
use serde::Serialize;
use serde_json::value::RawValue;
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// Answers with text that is JSON already.
pub fn json(body: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}

/// Serializes an answer of about this many bytes on a compute thread.
pub async fn write<T: Serialize>(
    gateway: &Arc<Gateway>,
    bytes: usize,
    make: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let share = gateway.admit_answer(bytes)?;
    let written = gateway.compute_body(bytes, move || {
        serde_json::to_vec(&make()?).map_err(|error| ApiError::internal(format!("the answer cannot be written: {error}")))
    });
    Ok(json(held(written.await?.into(), share)))
}

/// Answers with a page of items as a list.
pub async fn items(gateway: &Arc<Gateway>, page: ItemPage) -> Result<Response, ApiError> {
    #[derive(Serialize)]
    struct List<'a> {
        object: &'static str,
        data: Vec<&'a RawValue>,
        first_id: Option<&'a str>,
        last_id: Option<&'a str>,
        has_more: bool,
    }
    let bytes = page.items.iter().map(|item| item.body.len()).sum();
    let share = gateway.admit_answer(bytes)?;
    let written = gateway.compute_body(bytes, move || {
        let ItemPage { items, has_more } = &page;
        let data = items.iter().map(raw).collect::<Result<_, _>>()?;
        let (first_id, last_id) = (items.first().map(|item| &*item.id), items.last().map(|item| &*item.id));
        let list = List { object: "list", data, first_id, last_id, has_more: *has_more };
        Ok(serde_json::to_vec(&list).expect("it is JSON already"))
    });
    Ok(json(held(written.await?.into(), share)))
}

/// Reads a stored item as JSON, without parsing its contents.
pub fn raw(Item { id, body, .. }: &Item) -> Result<&RawValue, ApiError> {
    serde_json::from_str(body).map_err(|error| not_json(id, &error))
}

/// Makes a body that holds its share until it is sent.
pub fn held(bytes: Bytes, share: Share) -> Body {
    Body::new(Held { bytes: Some(bytes), _share: share })
}

struct Held {
    bytes: Option<Bytes>,
    _share: Share,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.bytes.take().filter(|bytes| !bytes.is_empty()).map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.as_ref().is_none_or(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, Bytes::len) as u64)
    }
}
