//! JSON answers, whole or as event streams, without the characters outside ASCII that end a line for Unicode: clients that split by such
//! lines lose text in silence. A layer around a whole port, so that no endpoint can leave them in. It looks at bytes, of which few can
//! begin such a character.

use crate::base::json;
use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::header::{CONTENT_LENGTH, CONTENT_TYPE},
    middleware::Next,
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

/// The types of answers that are JSON, or lines or events of it. Others leave as they are.
const KINDS: [&str; 4] = ["application/json", "text/event-stream", "application/jsonl", "application/x-ndjson"];

/// Layer around a whole port.
pub(super) async fn layer(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !KINDS.contains(&kind.split(';').next().unwrap_or_default().trim_end()) {
        return response;
    }
    let (mut head, mut body) = response.into_parts();
    let Some(length) = body.size_hint().exact().filter(|length| *length > 0) else {
        return Response::from_parts(head, Body::new(Unbroken::of(body)));
    };
    // Most are one piece, which is looked at here, so that its length is still known.
    let first = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
    let whole = match first {
        Some(Ok(frame)) => match frame.into_data() {
            Ok(piece) if piece.len() as u64 == length => piece,
            other => {
                head.headers.remove(CONTENT_LENGTH);
                let first = Some(Ok(other.map_or_else(|trailers| trailers, Frame::data)));
                return Response::from_parts(head, Body::new(Unbroken { first, ..Unbroken::of(body) }));
            }
        },
        other => return Response::from_parts(head, Body::new(Unbroken { first: other, ..Unbroken::of(body) })),
    };
    let whole = match json::unbroken(&whole) {
        Some(escaped) => {
            head.headers.remove(CONTENT_LENGTH);
            escaped.into()
        }
        None => whole,
    };
    Response::from_parts(head, Body::new(Whole { piece: Some(whole), _body: body }))
}

/// A body in one piece. What its original holds is held until it is sent.
struct Whole {
    piece: Option<Bytes>,
    _body: Body,
}

impl HttpBody for Whole {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Poll::Ready(self.piece.take().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.piece.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.piece.as_ref().map_or(0, Bytes::len) as u64)
    }
}

/// A body in pieces, whose length is not known.
struct Unbroken {
    /// The first frame, if it was taken already.
    first: Option<Result<Frame<Bytes>, axum::Error>>,
    body: Body,
    /// The end of the last piece, with which a character may begin.
    begun: Vec<u8>,
}

impl Unbroken {
    fn of(body: Body) -> Self {
        Self { first: None, body, begun: Vec::new() }
    }

    /// Returns as much of the body as is known to be whole characters.
    fn written(&mut self, piece: Bytes) -> Bytes {
        let mut piece = match self.begun.is_empty() {
            true => piece,
            false => [&std::mem::take(&mut self.begun)[..], &piece].concat().into(),
        };
        let begun = json::unfinished_break(&piece);
        self.begun = piece.split_off(piece.len() - begun).into();
        json::unbroken(&piece).map_or(piece, Bytes::from)
    }
}

impl HttpBody for Unbroken {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        loop {
            let frame = match self.first.take() {
                Some(first) => Some(first),
                None => ready!(Pin::new(&mut self.body).poll_frame(context)),
            };
            let piece = match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => piece,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None if self.begun.is_empty() => return Poll::Ready(None),
                None => return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.begun).into())))),
            };
            let written = self.written(piece);
            if !written.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(written))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.begun.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{
        Json, Router,
        body::to_bytes,
        http::{Method, StatusCode, header},
        middleware::from_fn,
        response::{IntoResponse, Sse, sse::Event},
        routing::get,
    };
    use futures_util::stream;
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    use serde_json::json;
    use std::convert::Infallible;

    const TEXT: &str = "潮\u{2028}a\u{85}b\u{2029}";
    const ESCAPED: &str = r"潮\u2028a\u0085b\u2029";

    async fn asked(endpoint: axum::routing::MethodRouter, method: Method) -> (Option<u64>, String) {
        let service = TowerToHyperService::new(Router::new().route("/", endpoint).layer(from_fn(layer)));
        let request = Request::builder().method(method).uri("/").body(Body::empty()).unwrap();
        let response = service.call(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let length = response.headers().get(header::CONTENT_LENGTH).map(|length| length.to_str().unwrap().parse().unwrap());
        (length, String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().into()).unwrap())
    }

    fn pieces(pieces: Vec<Vec<u8>>) -> Body {
        Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, Infallible>)))
    }

    #[tokio::test]
    async fn no_answer_in_json_leaves_with_a_character_that_ends_a_line_elsewhere() {
        let whole = async || Json(json!({"text": TEXT}));
        let expected = format!(r#"{{"text":"{ESCAPED}"}}"#);
        assert_eq!(asked(get(whole), Method::GET).await, (Some(expected.len() as u64), expected.clone()));
        assert_eq!(asked(get(whole), Method::HEAD).await, (Some(expected.len() as u64), String::new()));
        let measured =
            async || ([(header::CONTENT_TYPE, "application/json"), (header::CONTENT_LENGTH, "10")], "\"\u{2028}\" \"\"\n").into_response();
        assert_eq!(asked(get(measured), Method::GET).await.1, "\"\\u2028\" \"\"\n");

        let events = async || {
            let event = Event::default().data(json!({"text": TEXT}).to_string());
            Sse::new(stream::iter([Ok::<_, Infallible>(event.clone()), Ok(event)]))
        };
        assert_eq!(asked(get(events), Method::GET).await, (None, format!("data: {expected}\n\n").repeat(2)));
        let lines = async || ([(header::CONTENT_TYPE, "application/jsonl")], pieces(vec![format!("\"{TEXT}\"\n").into()]));
        assert_eq!(asked(get(lines), Method::GET).await, (None, format!("\"{ESCAPED}\"\n")));
    }

    #[tokio::test]
    async fn a_character_may_come_in_pieces() {
        let bytes = format!("\"{TEXT}\"").into_bytes();
        for cut in 0..=bytes.len() {
            let (first, second) = (bytes[..cut].to_vec(), bytes[cut..].to_vec());
            let json = async move || ([(header::CONTENT_TYPE, "application/json")], pieces(vec![first.clone(), second.clone()]));
            assert_eq!(asked(get(json), Method::GET).await, (None, format!("\"{ESCAPED}\"")), "{cut}");
        }
    }

    #[tokio::test]
    async fn what_is_no_json_leaves_as_it_is() {
        let file = async || ([(header::CONTENT_TYPE, "application/octet-stream")], TEXT);
        assert_eq!(asked(get(file), Method::GET).await, (Some(TEXT.len() as u64), TEXT.to_owned()));
    }
}
