//! Encodes messages to bytes and back. Only this module knows the codec.
//!
//! A frame is a little-endian `u32` length, followed by that many bytes of bincode. Both ends refuse a frame above [`FRAME_BYTES_MAX`]
//! before they allocate, and decoding allocates no more than that limit, so a hostile peer costs at most one frame of memory. A stream
//! opens with a [`Preamble`], which carries the protocol version.

use serde::{Serialize, de::DeserializeOwned};

/// Largest payload of one frame. A 128k-token prompt needs about 640 KB.
pub const FRAME_BYTES_MAX: usize = 8 << 20;

/// Bytes of the length that precedes each payload.
pub const HEADER_BYTES: usize = 4;

/// Changes whenever a message changes shape. Ends with different versions refuse each other.
pub const PROTOCOL_VERSION: u16 = 13;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("frame of {bytes} bytes is over the limit of {FRAME_BYTES_MAX}")]
    TooLarge { bytes: usize },
    #[error("frame does not decode: {0}")]
    Malformed(String),
    #[error("frame has {0} bytes after its message")]
    TrailingBytes(usize),
    #[error("peer is not a Tidemill process of the expected kind (preamble {0:02x?})")]
    BadPreamble([u8; 8]),
    #[error("peer speaks protocol version {theirs}, this process {PROTOCOL_VERSION}: run one version of Tidemill across the cluster")]
    Version { theirs: u16 },
}

/// Encodes one frame, header included.
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; HEADER_BYTES];
    bincode::serde::encode_into_std_write(message, &mut bytes, CODEC).map_err(|e| FrameError::Malformed(e.to_string()))?;
    let payload = bytes.len() - HEADER_BYTES;
    if payload > FRAME_BYTES_MAX {
        return Err(FrameError::TooLarge { bytes: payload });
    }
    bytes[..HEADER_BYTES].copy_from_slice(&(payload as u32).to_le_bytes());
    Ok(bytes)
}

/// Returns the payload length from a header, if it is within [`FRAME_BYTES_MAX`].
pub fn payload_bytes(header: [u8; HEADER_BYTES]) -> Result<usize, FrameError> {
    let bytes = u32::from_le_bytes(header) as usize;
    if bytes > FRAME_BYTES_MAX { Err(FrameError::TooLarge { bytes }) } else { Ok(bytes) }
}

/// Decodes one payload. The message must use all of it.
pub fn decode<M: DeserializeOwned>(payload: &[u8]) -> Result<M, FrameError> {
    if payload.len() > FRAME_BYTES_MAX {
        return Err(FrameError::TooLarge { bytes: payload.len() });
    }
    let (message, used) = bincode::serde::decode_from_slice(payload, CODEC).map_err(|e| FrameError::Malformed(e.to_string()))?;
    match payload.len() - used {
        0 => Ok(message),
        n => Err(FrameError::TrailingBytes(n)),
    }
}

/// The kind of a stream. A peer that opens a stream of the wrong kind is refused at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Preamble {
    /// Messages between a worker and a coordinator: [`message`](crate::message).
    Control = 1,
    /// Messages between a pool node and its client: [`pool`](crate::pool).
    Pool = 2,
    /// Block bytes to or from a pool node: [`pool`](crate::pool).
    PoolData = 3,
    /// The registry's messages, between coordinators.
    Registry = 4,
    /// Messages between the stages of a worker: [`stage`](crate::stage).
    Stage = 5,
}

impl Preamble {
    pub fn bytes(self) -> [u8; 8] {
        let mut bytes = *b"TIDE\0\0\0\0";
        bytes[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[6..].copy_from_slice(&(self as u16).to_le_bytes());
        bytes
    }

    pub fn check(self, bytes: [u8; 8]) -> Result<(), FrameError> {
        Self::one_of(&[self], bytes).map(drop)
    }

    /// Returns the one of `kinds` that a peer has opened.
    pub fn one_of(kinds: &[Self], bytes: [u8; 8]) -> Result<Self, FrameError> {
        if bytes[..4] != *b"TIDE" {
            return Err(FrameError::BadPreamble(bytes));
        }
        let theirs = u16::from_le_bytes([bytes[4], bytes[5]]);
        if theirs != PROTOCOL_VERSION {
            return Err(FrameError::Version { theirs });
        }
        kinds.iter().copied().find(|kind| bytes == kind.bytes()).ok_or(FrameError::BadPreamble(bytes))
    }
}

const CODEC: bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<FRAME_BYTES_MAX>,
> = bincode::config::standard().with_limit::<FRAME_BYTES_MAX>();
