//! A segment of a log as bytes: a header, then records, each with its length and a checksum of its content. Bytes after the last whole
//! record are the torn end of a write that was never acknowledged.

use crate::usage::Event;
use twox_hash::XxHash3_64;

/// An entry of a log.
pub trait Entry: Sized + Send + 'static {
    /// The bytes at the start of each segment.
    const HEADER: &'static [u8];
    /// The suffix of segments' names. They start with the segment's number.
    const SUFFIX: &'static str;
    /// The name of the log in messages.
    const LOG: &'static str;

    /// Appends the content of its record.
    fn encode(&self, content: &mut Vec<u8>);
    /// Decodes the content of a record; `None` if it is invalid.
    fn decode(content: &[u8]) -> Option<Self>;
}

impl Entry for Event {
    const HEADER: &'static [u8] = b"tidemill usage 1\n";
    const SUFFIX: &'static str = ".usage";
    const LOG: &'static str = "usage log";

    fn encode(&self, content: &mut Vec<u8>) {
        serde_json::to_writer(content, self).expect("an event is made of texts and numbers");
    }

    fn decode(content: &[u8]) -> Option<Self> {
        serde_json::from_slice(content).ok()
    }
}

/// The length of the frame before a record's content: length (4 bytes) and checksum (8), little-endian.
const FRAME_BYTES: usize = 12;
/// The maximum length of a record: a larger length means damage.
pub const RECORD_BYTES_MAX: usize = 64 << 10;

pub fn name<E: Entry>(number: u64) -> String {
    format!("{number:010}{}", E::SUFFIX)
}

/// The number in a segment's name; `None` for any other name.
pub fn number<E: Entry>(name: &str) -> Option<u64> {
    name.strip_suffix(E::SUFFIX)?.parse().ok()
}

/// Appends an entry's record.
pub fn write<E: Entry>(bytes: &mut Vec<u8>, entry: &E) {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; FRAME_BYTES]);
    entry.encode(bytes);
    let content = &bytes[start + FRAME_BYTES..];
    let (length, checksum) = (content.len() as u32, XxHash3_64::oneshot(content));
    bytes[start..start + 4].copy_from_slice(&length.to_le_bytes());
    bytes[start + 4..start + FRAME_BYTES].copy_from_slice(&checksum.to_le_bytes());
}

/// The contents of a segment.
#[derive(Debug)]
pub struct Segment<E> {
    pub entries: Vec<E>,
    /// The length up to the end of the last whole record.
    pub whole_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no {0} of this version")]
pub struct NotOurs(pub &'static str);

/// Reads a segment up to its torn end.
pub fn read<E: Entry>(bytes: &[u8]) -> Result<Segment<E>, NotOurs> {
    let mut segment = Segment { entries: Vec::new(), whole_bytes: 0 };
    if !bytes.starts_with(E::HEADER) {
        // A crash may have come between the creation of the file and its header.
        return if E::HEADER.starts_with(bytes) { Ok(segment) } else { Err(NotOurs(E::LOG)) };
    }
    segment.whole_bytes = E::HEADER.len();
    while let Some((entry, bytes)) = record(&bytes[segment.whole_bytes..]) {
        segment.entries.push(entry);
        segment.whole_bytes += bytes;
    }
    Ok(segment)
}

/// Reads the first record, and its length; `None` if it is torn or damaged.
pub fn record<E: Entry>(bytes: &[u8]) -> Option<(E, usize)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (checksum, rest) = rest.split_first_chunk::<8>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let content = rest.get(..length).filter(|_| length <= RECORD_BYTES_MAX)?;
    if XxHash3_64::oneshot(content) != u64::from_le_bytes(*checksum) {
        return None;
    }
    Some((E::decode(content)?, FRAME_BYTES + length))
}

/// Whether the bytes after a segment's last whole record are more than the torn end of a write: then a record was changed.
pub fn is_damaged<E: Entry>(rest: &[u8]) -> bool {
    let whole = || (1..rest.len()).any(|at| record::<E>(&rest[at..]).is_some());
    let has_all = rest.split_first_chunk::<4>().is_some_and(|(length, rest)| rest.len() >= 8 + u32::from_le_bytes(*length) as usize);
    has_all || rest.len() > FRAME_BYTES + RECORD_BYTES_MAX || whole()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(count: usize) -> (Vec<u8>, Vec<Event>) {
        let event = |n: usize| Event { id: format!("req_{n}"), tenant: "acme".into(), prompt_tokens: n as u64, ..Event::default() };
        let events: Vec<_> = (0..count).map(event).collect();
        let mut bytes = Event::HEADER.to_vec();
        events.iter().for_each(|event| write(&mut bytes, event));
        (bytes, events)
    }

    #[test]
    fn a_torn_segment_has_its_whole_records_wherever_it_is_torn() {
        let (bytes, events) = segment(3);
        let ends: Vec<_> = (0..=3).map(|count| segment(count).0.len()).collect();
        for end in 0..=bytes.len() {
            let read = read::<Event>(&bytes[..end]).unwrap();
            let whole = ends.iter().filter(|&&whole| whole <= end).count().saturating_sub(1);
            assert_eq!(read.entries, events[..whole], "{end}");
            assert_eq!(read.whole_bytes, if end < Event::HEADER.len() { 0 } else { ends[whole] }, "{end}");
        }
    }

    #[test]
    fn damage_ends_a_segment_and_is_not_believed() {
        let (bytes, events) = segment(2);
        let first = segment(1).0.len();
        for at in first..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            let read = read::<Event>(&damaged).unwrap();
            assert_eq!(read.entries, events[..1], "{at}");
        }
        assert_eq!(read::<Event>(b"something else").unwrap_err(), NotOurs("usage log"));
    }

    #[test]
    fn a_torn_end_is_no_damage_and_a_changed_record_is() {
        let (bytes, _) = segment(3);
        let (first, second) = (segment(1).0.len(), segment(2).0.len());
        assert!((second + 1..bytes.len()).all(|end| !is_damaged::<Event>(&bytes[second..end])));
        for at in first..second {
            let mut changed = bytes.clone();
            changed[at] ^= 0x40;
            assert!(is_damaged::<Event>(&changed[first..]), "{at}");
        }
    }

    #[test]
    fn segments_are_known_by_their_names() {
        assert_eq!(number::<Event>(&name::<Event>(42)), Some(42));
        for other in ["x.usage", "42", ".usage", "42.usage.tmp"] {
            assert_eq!(number::<Event>(other), None, "{other}");
        }
    }
}
