//! Frames between coordinator and helper: four bytes of length, then JSON. Both sides are the same program.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// The most bytes of a frame: a grammar of the largest size, with each of its characters escaped.
const FRAME_BYTES_MAX: usize = 4 << 20;

pub(super) fn write(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    if body.len() > FRAME_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is longer than a frame may be"));
    }
    let frame = [&(body.len() as u32).to_le_bytes()[..], &body].concat();
    to.write_all(&frame)
}

/// Reads a frame; `None` if the other side has ended between two frames.
pub(super) fn read<T: DeserializeOwned>(mut from: impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read(&mut length)? {
        0 => return Ok(None),
        some => from.read_exact(&mut length[some..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the frame is too long"));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok(Some(serde_json::from_slice(&body)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_as_they_went() {
        let mut bytes = Vec::new();
        for message in ["", "a \"b\" \n", &"x".repeat(100_000)] {
            write(&mut bytes, &message).unwrap();
        }
        let mut from = &bytes[..];
        assert_eq!(read::<String>(&mut from).unwrap().as_deref(), Some(""));
        assert_eq!(read::<String>(&mut from).unwrap().as_deref(), Some("a \"b\" \n"));
        assert_eq!(read::<String>(&mut from).unwrap().map(|text| text.len()), Some(100_000));
        assert_eq!(read::<String>(&mut from).unwrap(), None);
        assert!(read::<String>(&bytes[..5]).is_err(), "a frame that breaks off");
        assert!(read::<String>(&[0xff; 9][..]).is_err(), "a length that is none");
        assert!(write(&mut bytes, &"x".repeat(FRAME_BYTES_MAX)).is_err());
    }
}
