//! A form as it arrives, `multipart/form-data`, in bounded memory.
//!
//! The parser keeps what it cannot cut into parts yet: all bytes before the first boundary, and the head of a field. It also takes in
//! whatever its source has, before it looks at what it keeps, and searches that again with every chunk. So the source here first lets the
//! parser look: only if there is no part, or no content, in what it keeps does it get more. When it has got as much as may be kept without
//! any being seen, it looks once more; asked again, the source ends the form with an error.

use crate::requests::error::ApiError;
use axum::{
    body::{Body, BodyDataStream, Bytes},
    extract::{
        FromRequest, Multipart, Request,
        multipart::{Field, MultipartError},
    },
};
use futures_util::{Stream, StreamExt};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

/// The maximum number of bytes before the first boundary, and of a field's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// The maximum number of bytes that the parser takes in for one chunk of a field.
const CHUNK_BYTES_MAX: usize = 256 << 10;

/// A form whose fields are read one after the other.
pub struct Form {
    parts: Multipart,
    allowance: Arc<Allowance>,
}

/// A field, of which the form's next one is read only when this one has ended.
pub struct Part<'a> {
    field: Field<'a>,
    allowance: &'a Allowance,
}

impl Form {
    /// Begins to read a request's body. Fails unless its content type is a form's, with a boundary.
    pub async fn of(request: Request) -> Result<Self, ApiError> {
        let allowance = Arc::new(Allowance::default());
        let metered = |body: Body| Metered { body: body.into_data_stream(), rest: Bytes::new(), allowance: Arc::clone(&allowance) };
        let parts = Multipart::from_request(request.map(|body| Body::from_stream(metered(body))), &()).await;
        let parts =
            parts.map_err(|rejection| ApiError::malformed(format!("a file comes as multipart/form-data: {}", rejection.body_text())))?;
        Ok(Self { parts, allowance })
    }

    /// Reads up to the next field's content; `None` at the end of the form.
    pub async fn next(&mut self) -> Result<Option<Part<'_>>, ApiError> {
        self.allowance.renew(HEAD_BYTES_MAX);
        let field = self.parts.next_field().await.map_err(|error| self.allowance.error(&error))?;
        Ok(field.map(|field| Part { field, allowance: &self.allowance }))
    }
}

impl Part<'_> {
    pub fn name(&self) -> &str {
        self.field.name().unwrap_or_default()
    }

    pub fn file_name(&self) -> Option<&str> {
        self.field.file_name()
    }

    /// Reads more of the field's content; `None` at its end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ApiError> {
        self.allowance.renew(CHUNK_BYTES_MAX);
        self.field.chunk().await.map_err(|error| self.allowance.error(&error))
    }
}

/// The number of bytes that the parser may still take in before it has to show for them.
#[derive(Debug, Default)]
struct Allowance {
    left: AtomicUsize,
    /// Whether it got any: before that there is nothing to look at, and up to the first boundary it would not look again at the end.
    has_begun: AtomicBool,
    /// Whether the parser is to look at what it has before it gets more.
    looks_first: AtomicBool,
    /// Whether it was told to look at all that it got.
    is_told: AtomicBool,
    /// Whether it asked again after that.
    is_exceeded: AtomicBool,
}

impl Allowance {
    fn renew(&self, bytes: usize) {
        self.left.store(bytes, Ordering::Relaxed);
        self.looks_first.store(self.has_begun.load(Ordering::Relaxed), Ordering::Relaxed);
        self.is_told.store(false, Ordering::Relaxed);
    }

    fn error(&self, error: &MultipartError) -> ApiError {
        ApiError::malformed(if self.is_exceeded.load(Ordering::Relaxed) {
            format!("the form has more than {} KiB before a boundary, or in the head of a field", HEAD_BYTES_MAX >> 10)
        } else {
            format!("the form cannot be read: {}", error.body_text())
        })
    }
}

/// A body of which the parser takes in no more than its allowance.
struct Metered {
    body: BodyDataStream,
    /// The end of a frame that was longer than the allowance.
    rest: Bytes,
    allowance: Arc<Allowance>,
}

impl Stream for Metered {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let left = self.allowance.left.load(Ordering::Relaxed);
        let looks_first = self.allowance.looks_first.swap(false, Ordering::Relaxed);
        if !looks_first && left == 0 && self.allowance.is_told.swap(true, Ordering::Relaxed) {
            self.allowance.is_exceeded.store(true, Ordering::Relaxed);
            return Poll::Ready(Some(Err(axum::Error::new("nothing can be cut from so many bytes"))));
        }
        if looks_first || left == 0 {
            // The parser looks at what it has when its source has no more for now, and is woken to ask again.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.rest.is_empty() {
            match self.body.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(frame))) => self.rest = frame,
                other => return other,
            }
        }
        self.allowance.has_begun.store(true, Ordering::Relaxed);
        let some = self.rest.len().min(left);
        self.allowance.left.store(left - some, Ordering::Relaxed);
        Poll::Ready(Some(Ok(self.rest.split_to(some))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use std::convert::Infallible;

    fn form(chunks: impl Iterator<Item = Vec<u8>> + Send + 'static) -> Request {
        let body = Body::from_stream(stream::iter(chunks.map(Ok::<_, Infallible>)));
        Request::builder().method("POST").header("content-type", "multipart/form-data; boundary=b").body(body).unwrap()
    }

    const HEAD: &[u8] = b"--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
    const END: &[u8] = b"\r\n--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b--\r\n";

    /// Reads a form: each field's name with its content.
    async fn read(request: Request) -> Result<Vec<(String, Vec<u8>)>, ApiError> {
        let mut form = Form::of(request).await?;
        let mut fields = Vec::new();
        while let Some(mut part) = form.next().await? {
            let (name, mut content) = (part.name().to_owned(), Vec::new());
            while let Some(chunk) = part.chunk().await? {
                assert!(chunk.len() <= 2 * CHUNK_BYTES_MAX);
                content.extend_from_slice(&chunk);
            }
            fields.push((name, content));
        }
        Ok(fields)
    }

    #[tokio::test]
    async fn a_form_arrives_whole_however_it_is_cut() {
        let content = b"0123456789\r\n--".repeat(90_000);
        let whole = [HEAD, &content, END].concat();
        for step in [whole.len(), 1 << 20, 65_537, 1000] {
            let chunks: Vec<_> = whole.chunks(step).map(<[u8]>::to_vec).collect();
            let fields = read(form(chunks.into_iter())).await.unwrap();
            assert!(fields.len() == 2 && fields[0] == ("file".into(), content.clone()), "{step}");
            assert_eq!(fields[1], ("purpose".into(), b"batch".to_vec()));
        }
        let bytes: Vec<_> = [HEAD, b"x", END].concat().into_iter().map(|byte| vec![byte]).collect();
        assert_eq!(read(form(bytes.into_iter())).await.unwrap()[0].1, b"x");
    }

    #[tokio::test]
    async fn many_small_fields_do_not_let_the_parser_take_in_what_comes_after_them() {
        let field = b"--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n";
        let taken = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&taken);
        let pieces = std::iter::once(field.repeat(1000)).chain(std::iter::repeat_n(vec![b'a'; 1 << 10], 1 << 20));
        let mut form = Form::of(form(pieces.inspect(move |piece| _ = counted.fetch_add(piece.len(), Ordering::Relaxed)))).await.unwrap();
        for _ in 0..999 {
            let mut part = form.next().await.unwrap().unwrap();
            while part.chunk().await.unwrap().is_some() {}
        }
        assert!(taken.load(Ordering::Relaxed) < 1000 * field.len() + 2 * CHUNK_BYTES_MAX, "{taken:?}");
    }

    #[tokio::test]
    async fn what_comes_before_a_boundary_and_in_heads_is_bounded() {
        let padded = [HEAD, b"x\r\n--b\r\n"].concat();
        for beginning in [&b""[..], b"--b\r\n", b"--b\r\ncontent-disposition: ", &padded] {
            let taken = Arc::new(AtomicUsize::new(0));
            let endless = {
                let taken = Arc::clone(&taken);
                std::iter::repeat_n(vec![b'a'; 1 << 10], 1 << 20).inspect(move |chunk| _ = taken.fetch_add(chunk.len(), Ordering::Relaxed))
            };
            let error = read(form(std::iter::once(beginning.to_vec()).chain(endless))).await.unwrap_err();
            assert!(format!("{error:?}").contains("more than 16 KiB"), "{}: {error:?}", beginning.escape_ascii());
            assert!(taken.load(Ordering::Relaxed) <= CHUNK_BYTES_MAX + 2 * HEAD_BYTES_MAX, "{}", beginning.escape_ascii());
        }
        let preamble = [vec![b'a'; HEAD_BYTES_MAX / 2], b"\r\n".to_vec()].concat();
        assert!(read(form([preamble, HEAD.to_vec(), b"x".to_vec(), END.to_vec()].into_iter())).await.is_ok());
    }
}
