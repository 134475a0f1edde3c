//! Answers to requests whose bodies were not read to their end: over HTTP/1.1 the connection cannot be reused after one, so the answer
//! closes it. Otherwise the client would send its next request there, and lose it.

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::{HeaderValue, Version, header::CONNECTION},
    middleware::Next,
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

/// Layer around a whole port.
pub(super) async fn layer(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() || request.version() > Version::HTTP_11 {
        return next.run(request).await;
    }
    let is_read = Arc::new(AtomicBool::new(false));
    let request = request.map(|body| Body::new(Noted { body, is_read: Arc::clone(&is_read) }));
    let mut response = next.run(request).await;
    if !is_read.load(Ordering::Relaxed) {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// A body that notes when it has been read to its end.
struct Noted {
    body: Body,
    is_read: Arc<AtomicBool>,
}

impl HttpBody for Noted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.is_read.store(true, Ordering::Relaxed);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Router, middleware::from_fn, routing::post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// The heads of the answers to a body of ten bytes, by whether all of it has arrived, and by the route.
    #[tokio::test]
    async fn an_answer_before_its_body_is_read_is_the_last() {
        let routes = Router::new().route("/read", post(async |_: Bytes| "")).route("/refuse", post(async || ""));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, routes.layer(from_fn(layer))).await });
        for (path, body, is_last) in [("read", "0123456789", false), ("refuse", "01234", true), ("refuse", "0123456789", true)] {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let request = format!("POST /{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{body}");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = vec![0; 1000];
            let read = stream.read(&mut answer).await.unwrap();
            let answer = String::from_utf8_lossy(&answer[..read]).to_lowercase();
            assert!(answer.starts_with("http/1.1 200"), "{answer}");
            assert_eq!(answer.contains("connection: close"), is_last, "{path} {body}: {answer}");
        }
    }
}
