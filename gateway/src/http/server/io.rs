//! A connection's bytes and requests, watched for what it waits for.

use super::guests::{Progress, Stage};
use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::Response,
};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    rt::{Read, ReadBufCursor, Write},
    service::Service,
};
use hyper_util::service::TowerToHyperService;
use std::{
    convert::Infallible,
    io,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

/// The address that a request's connection comes from.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// A connection's progress with the clock that it is measured by.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    pub(super) progress: Arc<Progress>,
    /// The beginning of the server's time.
    pub(super) began: Instant,
}

impl Watch {
    fn set(&self, stage: Stage) {
        self.progress.set(stage, self.began.elapsed());
    }
}

/// A stream that notices when the next request begins.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    watch: Watch,
}

impl<S> Watched<S> {
    pub(super) fn new(stream: S, watch: Watch) -> Self {
        Self { stream, watch }
    }
}

impl<S: Read + Unpin> Read for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() && self.watch.progress.get().0 == Stage::Idle {
            self.watch.set(Stage::Head);
        }
        read
    }
}

impl<S: Write + Unpin> Write for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }
}

/// The routes as one connection's service.
#[derive(Clone, Debug)]
pub(super) struct Routes {
    pub(super) router: TowerToHyperService<Router>,
    pub(super) peer: Peer,
    pub(super) watch: Watch,
}

impl Service<Request<Incoming>> for Routes {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        self.watch.set(Stage::Busy);
        request.extensions_mut().insert(self.peer);
        let (response, watch) = (self.router.call(request), self.watch.clone());
        Box::pin(async move { Ok(response.await?.map(|body| Answer { body, watch })) })
    }
}

/// An answer's body. Its end is the end of the request.
#[derive(Debug)]
pub(super) struct Answer {
    body: Body,
    watch: Watch,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.watch.set(Stage::Idle);
    }
}
