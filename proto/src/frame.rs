//! Encodes messages to bytes and back. Only this module knows the codec.
//!
//! A frame is a little-endian `u32` length, followed by that many bytes of bincode. Both ends refuse a frame above [`FRAME_BYTES_MAX`]
//! before they allocate, and decoding allocates no more than that limit, so a hostile peer costs at most one frame of memory. A stream
//! opens with a [`Preamble`], which carries the [`Version`] of the protocol that the two ends have agreed on.

use serde::{Serialize, de::DeserializeOwned};
use std::fmt;

/// Largest payload of one frame. A 128k-token prompt needs about 640 KB.
pub const FRAME_BYTES_MAX: usize = 8 << 20;

/// Bytes of the length that precedes each payload.
pub const HEADER_BYTES: usize = 4;

/// A version of the protocol. Adjacent versions understand each other, so that a cluster can be upgraded process by process.
///
/// Ends agree on the newest version that both speak, in the TLS handshake: each offers the [names](Self::names) of its versions (ALPN, RFC
/// 7301). A message never changes its shape, or the older release could not read it. A new shape is a new variant at the end of its enum,
/// and goes only to a peer whose version has it; the old variant stays for one more version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version(u16);

impl Version {
    /// The version of this release.
    pub const NEWEST: Self = Self(16);
    /// The oldest version that this release speaks.
    pub const OLDEST: Self = Self(14);

    /// All versions that this release speaks, the newest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (Self::OLDEST.0..=Self::NEWEST.0).rev().map(Self)
    }

    /// The names of all versions that this release speaks, the newest first.
    pub fn names() -> Vec<Vec<u8>> {
        Self::all().map(|version| version.name().into_bytes()).collect()
    }

    /// The version with this name, if this release speaks it.
    pub fn named(name: &[u8]) -> Option<Self> {
        let version = Self(std::str::from_utf8(name).ok()?.strip_prefix(NAME_PREFIX)?.parse().ok()?);
        (Self::OLDEST..=Self::NEWEST).contains(&version).then_some(version)
    }

    /// Whether a worker can tell its release ([`WorkerEvent::Release`](crate::message::WorkerEvent::Release)).
    pub fn has_release(self) -> bool {
        self >= Self(15)
    }

    /// Whether a worker keeps a limit on a thought ([`ToWorker::DecodeLimited`](crate::message::ToWorker::DecodeLimited)).
    pub fn keeps_thought_limits(self) -> bool {
        self >= Self(16)
    }

    fn name(self) -> String {
        format!("{NAME_PREFIX}{}", self.0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

const NAME_PREFIX: &str = "tidemill/";

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
    #[error("peer opened a stream of protocol version {theirs} on a link of version {agreed}: upgrade by one release at a time")]
    Version { theirs: u16, agreed: Version },
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
    pub fn bytes(self, version: Version) -> [u8; 8] {
        let mut bytes = *b"TIDE\0\0\0\0";
        bytes[4..6].copy_from_slice(&version.0.to_le_bytes());
        bytes[6..].copy_from_slice(&(self as u16).to_le_bytes());
        bytes
    }

    pub fn check(self, version: Version, bytes: [u8; 8]) -> Result<(), FrameError> {
        Self::one_of(&[self], version, bytes).map(drop)
    }

    /// Returns the one of `kinds` that a peer has opened, on a link of this version.
    pub fn one_of(kinds: &[Self], version: Version, bytes: [u8; 8]) -> Result<Self, FrameError> {
        if bytes[..4] != *b"TIDE" {
            return Err(FrameError::BadPreamble(bytes));
        }
        let theirs = u16::from_le_bytes([bytes[4], bytes[5]]);
        if theirs != version.0 {
            return Err(FrameError::Version { theirs, agreed: version });
        }
        kinds.iter().copied().find(|kind| bytes == kind.bytes(version)).ok_or(FrameError::BadPreamble(bytes))
    }
}

const CODEC: bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<FRAME_BYTES_MAX>,
> = bincode::config::standard().with_limit::<FRAME_BYTES_MAX>();
