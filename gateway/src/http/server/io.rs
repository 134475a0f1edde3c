//! A connection's bytes and requests, observed to tell what it waits for.

use super::{
    super::paths,
    guests::{Progress, Stage},
    unread,
};
use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::{HeaderValue, Response, Version, header},
};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    rt::{Read, ReadBufCursor, Write},
    service::Service,
};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use std::{
    convert::Infallible,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Instant,
};

/// The address of a request's connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// A connection's progress with its clock.
#[derive(Clone, Debug)]
pub(super) struct Watch(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    progress: Arc<Progress>,
    /// The start of the server's time.
    began: Instant,
    /// The number of requests being handled. HTTP/2 has several at a time.
    running: Mutex<usize>,
    /// Whether it speaks HTTP/2, where incoming bytes need not be the start of a request.
    is_http2: AtomicBool,
}

impl Watch {
    pub(super) fn new(progress: Arc<Progress>, began: Instant) -> Self {
        Self(Arc::new(Connection { progress, began, running: Mutex::new(0), is_http2: AtomicBool::new(false) }))
    }

    fn set(&self, stage: Stage) {
        self.0.progress.set(stage, self.0.began.elapsed());
    }

    /// Notes bytes from its client.
    fn hear(&self) {
        if self.0.progress.get().0 == Stage::Idle && !self.0.is_http2.load(Ordering::Relaxed) {
            self.set(Stage::Head);
        }
    }

    /// Notes a request, which runs until the returned value is dropped.
    fn begin(&self, version: Version) -> Running {
        self.0.is_http2.store(version == Version::HTTP_2, Ordering::Relaxed);
        let mut running = self.0.running.lock();
        *running += 1;
        self.set(Stage::Busy);
        Running(self.clone())
    }
}

/// A request that is being handled.
#[derive(Debug)]
struct Running(Watch);

impl Drop for Running {
    fn drop(&mut self) {
        // Under the lock, since a new request may start at this moment.
        let mut running = self.0.0.running.lock();
        *running -= 1;
        if *running == 0 {
            self.0.set(Stage::Idle);
        }
    }
}

/// A stream that notices when the next request starts.
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
        if read.is_ready() {
            self.watch.hear();
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
        let running = self.watch.begin(request.version());
        request.extensions_mut().insert(self.peer);
        name_host(&mut request);
        paths::straighten(request.uri_mut());
        let response = self.router.call(request);
        Box::pin(async move { Ok(response.await?.map(|body| Answer { body, _running: running })) })
    }
}

/// Copies HTTP/2's host, which stands beside the path, into the header of HTTP/1.1, where handlers look.
fn name_host<B>(request: &mut Request<B>) {
    if request.version() == Version::HTTP_2
        && let Some(authority) = request.uri().authority()
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().insert(header::HOST, host);
    }
}

/// An answer's body. Its end is the end of the request.
#[derive(Debug)]
pub(super) struct Answer {
    body: Body,
    _running: Running,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        unread::asked();
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(Some(_))) {
            unread::given();
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
