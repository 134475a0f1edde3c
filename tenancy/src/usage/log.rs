//! A segment of the usage log as bytes: a header, then records, each with its length and a checksum of its content (JSON). What follows
//! the last whole record is the torn end of a write that was never acknowledged.

use super::Event;
use twox_hash::XxHash3_64;

pub const HEADER: &[u8] = b"tidemill usage 1\n";
/// Before a record's content: its length (4 bytes) and its checksum (8), little-endian.
const FRAME_BYTES: usize = 12;
/// No event is longer, so a length beyond this is damage.
const RECORD_BYTES_MAX: usize = 64 << 10;

/// How the names of segments end. They begin with a number, in their order.
pub const SEGMENT_SUFFIX: &str = ".usage";

pub fn segment_name(number: u64) -> String {
    format!("{number:010}{SEGMENT_SUFFIX}")
}

/// `None`: not a segment's name.
pub fn segment_number(name: &str) -> Option<u64> {
    name.strip_suffix(SEGMENT_SUFFIX)?.parse().ok()
}

/// Appends an event's record.
pub fn write(bytes: &mut Vec<u8>, event: &Event) {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; FRAME_BYTES]);
    serde_json::to_writer(&mut *bytes, event).expect("an event is made of texts and numbers");
    let content = &bytes[start + FRAME_BYTES..];
    let (length, checksum) = (content.len() as u32, XxHash3_64::oneshot(content));
    bytes[start..start + 4].copy_from_slice(&length.to_le_bytes());
    bytes[start + 4..start + FRAME_BYTES].copy_from_slice(&checksum.to_le_bytes());
}

/// What a segment holds.
#[derive(Debug, Default)]
pub struct Segment {
    pub events: Vec<Event>,
    /// Up to the end of the last whole record.
    pub whole_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no usage log of this version")]
pub struct NotOurs;

/// Reads a segment, up to where it is torn.
pub fn read(bytes: &[u8]) -> Result<Segment, NotOurs> {
    if !bytes.starts_with(HEADER) {
        // A crash may have come between its making and its header.
        return if HEADER.starts_with(bytes) { Ok(Segment::default()) } else { Err(NotOurs) };
    }
    let mut segment = Segment { events: Vec::new(), whole_bytes: HEADER.len() };
    while let Some((event, bytes)) = record(&bytes[segment.whole_bytes..]) {
        segment.events.push(event);
        segment.whole_bytes += bytes;
    }
    Ok(segment)
}

/// The first record, and the bytes that it takes. `None`: it is torn, or damaged.
pub fn record(bytes: &[u8]) -> Option<(Event, usize)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (checksum, rest) = rest.split_first_chunk::<8>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let content = rest.get(..length).filter(|_| length <= RECORD_BYTES_MAX)?;
    if XxHash3_64::oneshot(content) != u64::from_le_bytes(*checksum) {
        return None;
    }
    Some((serde_json::from_slice(content).ok()?, FRAME_BYTES + length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(count: usize) -> (Vec<u8>, Vec<Event>) {
        let event = |n: usize| Event { id: format!("req_{n}"), tenant: "acme".into(), prompt_tokens: n as u64, ..Event::default() };
        let events: Vec<_> = (0..count).map(event).collect();
        let mut bytes = HEADER.to_vec();
        events.iter().for_each(|event| write(&mut bytes, event));
        (bytes, events)
    }

    #[test]
    fn a_torn_segment_has_its_whole_records_wherever_it_is_torn() {
        let (bytes, events) = segment(3);
        let ends: Vec<_> = (0..=3).map(|count| segment(count).0.len()).collect();
        for end in 0..=bytes.len() {
            let read = read(&bytes[..end]).unwrap();
            let whole = ends.iter().filter(|&&whole| whole <= end).count().saturating_sub(1);
            assert_eq!(read.events, events[..whole], "{end}");
            assert_eq!(read.whole_bytes, if end < HEADER.len() { 0 } else { ends[whole] }, "{end}");
        }
    }

    #[test]
    fn damage_ends_a_segment_and_is_not_believed() {
        let (bytes, events) = segment(2);
        let first = segment(1).0.len();
        for at in first..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert_eq!(read(&damaged).unwrap().events, events[..1], "{at}");
        }
        assert_eq!(read(b"something else").unwrap_err(), NotOurs);
    }

    #[test]
    fn segments_are_known_by_their_names() {
        assert_eq!(segment_number(&segment_name(42)), Some(42));
        for other in ["x.usage", "42", ".usage", "42.usage.tmp"] {
            assert_eq!(segment_number(other), None, "{other}");
        }
    }
}
