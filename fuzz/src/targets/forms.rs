//! Forms of clients (`multipart/form-data`): the parts that come out do not depend on the pieces in which the bytes arrive.

use crate::{
    dice::Dice,
    mutate::{bytes, text},
    target::{Subject, Target},
};
use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::HeaderValue,
};
use futures_util::stream;
use std::{convert::Infallible, time::Duration};
use tidemill_gateway::{http::form::Form, requests::error::ApiError};

pub(crate) const FORMS: Target = Target {
    name: "forms",
    about: "forms of clients, in any pieces",
    open,
    cpu_max: Duration::from_secs(10),
    bytes_max: 32 << 20,
    short: 400,
};

/// The size up to which no form is refused for bytes that belong to no part, in whatever pieces they arrive.
const SMALL_BYTES: usize = 16 << 10;
/// The most bytes of a field that are given out at a time: as many as the parser takes in, beside those that it has.
const CHUNK_BYTES_MAX: usize = 512 << 10;

const BOUNDARIES: [&str; 6] =
    ["b", "----WebKitFormBoundary7MA4YWxkTrZu0gW", "-", "--", "a'b+c", "0123456789012345678901234567890123456789"];
const HEADS: [&str; 9] = [
    "content-disposition: form-data; name=\"file\"; filename=\"a.jsonl\"",
    "content-disposition: form-data; name=\"purpose\"",
    "Content-Disposition: form-data; name=file; filename*=UTF-8''%e2%82%ac.jsonl",
    "content-disposition: form-data; name=\"a\\\"b\"; filename=\"c\\\\d\"",
    "content-disposition: attachment",
    "content-disposition: form-data",
    "content-type: application/jsonl; charset=utf-8",
    "content-transfer-encoding: base64",
    "x: y",
];

type Parts = Vec<(String, Option<String>, Vec<u8>)>;

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    Ok(Box::new(move |dice: &mut Dice| {
        let boundary = *dice.pick(&BOUNDARIES);
        let mut kind = format!("multipart/form-data; boundary={boundary}");
        if dice.one_in(20) {
            kind = text::mutate(dice, &kind, &["boundary", "=", ";", "\""]);
        }
        let Ok(kind) = HeaderValue::from_bytes(kind.as_bytes()) else { return Ok(()) };
        let form = form(dice, boundary);
        dice.show("content type", kind.as_bytes());
        dice.show("form", &form);
        let mut read = || {
            let pieces = pieces(dice, &form);
            runtime.block_on(read(kind.clone(), pieces)).map_or_else(|error| refusal(&error).map(Err), |parts| Ok(Ok(parts?)))
        };
        match (read()?, read()?) {
            (Ok(one), Ok(other)) if one != other => Err(format!("{} parts, and {} in other pieces", one.len(), other.len())),
            (Ok(_), Err(refused)) | (Err(refused), Ok(_)) if form.len() < SMALL_BYTES => {
                Err(format!("in some pieces it is read, in others it is refused: {refused}"))
            }
            _ => Ok(()),
        }
    }))
}

/// The text of a refusal, which is the client's fault.
fn refusal(error: &ApiError) -> Result<String, String> {
    match error.status().as_u16() {
        400..=499 => Ok(error.message().to_owned()),
        status => Err(format!("{status}: {}", error.message())),
    }
}

/// All parts of a form: an error of the outer kind is a refusal, one of the inner kind a broken promise.
async fn read(kind: HeaderValue, pieces: Vec<Bytes>) -> Result<Result<Parts, String>, ApiError> {
    let body = Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, Infallible>)));
    let mut request = Request::new(body);
    request.headers_mut().insert("content-type", kind);
    let mut form = Form::of(request).await?;
    let mut parts = Parts::new();
    while let Some(mut part) = form.next().await? {
        let (name, file, mut content) = (part.name().to_owned(), part.file_name().map(str::to_owned), Vec::new());
        while let Some(chunk) = part.chunk().await? {
            if chunk.len() > CHUNK_BYTES_MAX {
                return Ok(Err(format!("{} bytes of a field at a time", chunk.len())));
            }
            content.extend_from_slice(&chunk);
        }
        parts.push((name, file, content));
    }
    Ok(Ok(parts))
}

fn form(dice: &mut Dice, boundary: &str) -> Vec<u8> {
    let mut form = Vec::new();
    if dice.one_in(6) {
        form.extend(filler(dice, boundary));
        form.extend(b"\r\n");
    }
    for _ in 0..dice.below(6) {
        form.extend(format!("--{boundary}\r\n").bytes());
        for _ in 0..dice.few(6) {
            form.extend(dice.pick(&HEADS).bytes());
            form.extend(b"\r\n");
        }
        if dice.one_in(20) {
            form.extend(format!("x-{}: {}\r\n", dice.below(9), "y".repeat(dice.below(20_000))).bytes());
        }
        form.extend(b"\r\n");
        form.extend(filler(dice, boundary));
        form.extend(b"\r\n");
    }
    form.extend(format!("--{boundary}--\r\n").bytes());
    if dice.one_in(8) {
        form.extend(filler(dice, boundary));
    }
    if dice.one_in(2) {
        bytes::mutate(dice, &mut form);
    }
    form
}

/// Content that is almost a boundary, or long, or odd.
fn filler(dice: &mut Dice, boundary: &str) -> Vec<u8> {
    let piece = match dice.below(7) {
        0 => format!("\r\n--{}", &boundary[..dice.below(boundary.len())]),
        1 => format!("--{boundary}"),
        2 => "\r\n-".into(),
        3 => "\r".into(),
        4 => format!("\n--{boundary}--"),
        5 => dice.odd_text(),
        _ => "{\"custom_id\": \"1\"}\n".into(),
    };
    let times = if dice.one_in(30) { dice.below(40_000) } else { dice.few(40) };
    piece.repeat(times.min(600_000 / piece.len().max(1))).into_bytes()
}

/// The same bytes in pieces: whole, of one size, or of any.
fn pieces(dice: &mut Dice, form: &[u8]) -> Vec<Bytes> {
    let step = match dice.below(5) {
        0 => form.len(),
        1 if form.len() < 10_000 => 1,
        2 if form.len() < 100_000 => 1 + dice.below(100),
        3 => 1 + dice.below(70_000),
        _ => 0,
    };
    let (mut rest, mut pieces) = (form, Vec::new());
    while !rest.is_empty() {
        let bits = dice.below(18);
        let size = if step > 0 { step } else { form.len() / 10_000 + dice.below(2 << bits) };
        let (piece, after) = rest.split_at(size.min(rest.len()));
        pieces.push(Bytes::copy_from_slice(piece));
        rest = after;
    }
    pieces
}
