//! Messages between coordinator and helper: frames of JSON. Both sides are the same program.

use crate::confinement::{read_frame, write_frame};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// The most bytes of a frame: a grammar of the largest size, with each of its characters escaped.
const FRAME_BYTES_MAX: usize = 4 << 20;

pub(super) fn write(to: impl Write, message: &impl Serialize) -> io::Result<()> {
    write_frame(to, &[&serde_json::to_vec(message)?], FRAME_BYTES_MAX)
}

/// Reads a message; `None` if the other side has ended between two of them.
pub(super) fn read<T: DeserializeOwned>(from: impl Read) -> io::Result<Option<T>> {
    let body = read_frame(from, FRAME_BYTES_MAX)?;
    Ok(body.map(|body| serde_json::from_slice(&body)).transpose()?)
}
