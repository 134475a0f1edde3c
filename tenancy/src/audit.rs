//! An append-only log whose records are chained by their digests: changing, removing or reordering a record breaks the chain there.
//!
//! A record is a JSON object with the digest (BLAKE3) of the bytes of the record before it:
//!
//! ```text
//!   {"seq":2,"at":1764000000,"prev":"a07e…","event":{"kind":"block",…}}
//! ```
//!
//! Old records may be removed from the beginning: the log announces it first, in a record with the last digest that goes. The log itself
//! reveals neither that records are missing at its end, nor that all of it was rewritten: that takes a head that was noted elsewhere.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const NOTHING: blake3::Hash = blake3::Hash::from_bytes([0; 32]);
/// The kind of the event that announces the removal of records.
const RETIRED: &str = "retired";

/// The exact text of a record: its digest depends on all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line(pub(crate) String);

/// The end of a log, to which records are appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The number of the last record; 0 if there is none.
    pub seq: u64,
    /// The digest of the last record.
    pub head: blake3::Hash,
}

impl Default for Chain {
    fn default() -> Self {
        Self { seq: 0, head: NOTHING }
    }
}

impl Chain {
    /// The next record, and the end after it. `at` is in Unix seconds.
    pub fn next(self, at: u64, event: &Value) -> (Self, Line) {
        let seq = self.seq + 1;
        let line = json!({"seq": seq, "at": at, "prev": self.head.to_hex().as_str(), "event": event}).to_string();
        (Self { seq, head: blake3::hash(line.as_bytes()) }, Line(line))
    }

    /// The event that must be logged before the records up to this end are removed.
    pub fn retirement(self) -> Value {
        json!(Retired { kind: RETIRED.into(), through: self.seq, digest: self.head.to_hex().to_string() })
    }
}

/// One record, read back.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The number of the record, from 1.
    pub seq: u64,
    /// The time in Unix seconds.
    pub at: u64,
    pub event: Value,
    /// The end of the log after this record.
    pub end: Chain,
}

#[derive(Serialize, Deserialize)]
struct Body {
    seq: u64,
    at: u64,
    prev: String,
    event: Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Retired {
    kind: String,
    through: u64,
    digest: String,
}

/// The reason why a log cannot be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("record {0} was changed: it is no record any more")]
    Damaged(u64),
    #[error("record {0} was changed: record {next} is chained to different contents", next = .0 + 1)]
    Changed(u64),
    #[error("records {from} to {to} are not where they belong: they were removed or moved")]
    Removed { from: u64, to: u64 },
    #[error("record {found} follows record {after}: records were moved or inserted")]
    Moved { after: u64, found: u64 },
    #[error("the log starts with record {0}, and does not say that the records before it were retired")]
    NoBeginning(u64),
    #[error("no record has the digest {0}: the end of the log is missing, or this is a different log")]
    HeadMissing(String),
}

/// Verifies a log from its beginning.
#[derive(Debug, Default)]
pub struct Verifier {
    records: u64,
    last: Option<Chain>,
    /// The number of the first record and the digest of its predecessor, unless it is the very first.
    begins: Option<(u64, String)>,
    retired: Option<Retired>,
    wanted: Option<String>,
}

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    pub records: u64,
    /// The number of the first record.
    pub first: u64,
    pub end: Chain,
}

impl Verifier {
    /// Also looks for a record with this digest (hexadecimal).
    pub fn looking_for(head: Option<String>) -> Self {
        Self { wanted: head, ..Self::default() }
    }

    /// Verifies the next record.
    pub fn record(&mut self, Line(line): &Line) -> Result<Record, Broken> {
        let Body { seq, at, prev, event } = serde_json::from_str(line).map_err(|_| Broken::Damaged(self.seq() + 1))?;
        match self.last {
            None if seq == 1 && prev == NOTHING.to_hex().as_str() => {}
            None => self.begins = Some((seq, prev)),
            Some(last) if seq > last.seq + 1 => return Err(Broken::Removed { from: last.seq + 1, to: seq - 1 }),
            Some(last) if seq <= last.seq => return Err(Broken::Moved { after: last.seq, found: seq }),
            Some(last) if prev != last.head.to_hex().as_str() => return Err(Broken::Changed(last.seq)),
            Some(_) => {}
        }
        let end = Chain { seq, head: blake3::hash(line.as_bytes()) };
        self.records += 1;
        self.last = Some(end);
        if event["kind"] == RETIRED {
            self.retired = serde_json::from_value(event.clone()).ok();
        }
        if self.wanted.as_deref() == Some(end.head.to_hex().as_str()) {
            self.wanted = None;
        }
        Ok(Record { seq, at, event, end })
    }

    pub fn finish(self) -> Result<Verified, Broken> {
        if let Some((seq, prev)) = &self.begins {
            // After a crash in between, the first of the records that were announced as removed may still be there.
            let said = self.retired.as_ref().is_some_and(|retired| match (seq - 1).cmp(&retired.through) {
                std::cmp::Ordering::Less => true,
                std::cmp::Ordering::Equal => *prev == retired.digest,
                std::cmp::Ordering::Greater => false,
            });
            if !said {
                return Err(Broken::NoBeginning(*seq));
            }
        }
        match self.wanted {
            Some(head) => Err(Broken::HeadMissing(head)),
            None => {
                Ok(Verified { records: self.records, first: self.begins.map_or(1, |(seq, _)| seq), end: self.last.unwrap_or_default() })
            }
        }
    }

    fn seq(&self) -> u64 {
        self.last.map_or(0, |last| last.seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn log(records: u64) -> (Chain, Vec<Line>) {
        let mut chain = Chain::default();
        let mut next = |at| {
            let (end, line) = chain.next(at, &json!({"kind": "block", "text": format!("no {at}")}));
            chain = end;
            line
        };
        let lines = (0..records).map(&mut next).collect();
        (chain, lines)
    }

    fn verify_with(lines: &[Line], head: Option<String>) -> Result<Verified, Broken> {
        let mut verifier = Verifier::looking_for(head);
        lines.iter().try_for_each(|line| verifier.record(line).map(drop))?;
        verifier.finish()
    }

    fn verify(lines: &[Line]) -> Result<Verified, Broken> {
        verify_with(lines, None)
    }

    fn changed(line: &Line) -> Line {
        Line(line.0.replace("no ", "on "))
    }

    #[test]
    fn a_log_reads_back_and_goes_on() {
        let (chain, mut lines) = log(3);
        let read = verify(&lines).unwrap();
        assert_eq!((read.records, read.first, read.end), (3, 1, chain));
        lines.push(chain.next(9, &json!({})).1);
        assert_eq!(verify(&lines).unwrap().records, 4);
        assert_eq!(verify(&[]).unwrap().records, 0);
    }

    #[test]
    fn what_was_done_is_named() {
        let (_, lines) = log(6);
        let with = |change: &dyn Fn(&mut Vec<Line>)| {
            let mut lines = lines.clone();
            change(&mut lines);
            verify(&lines).unwrap_err()
        };
        assert_eq!(with(&|lines| lines[2] = changed(&lines[2])), Broken::Changed(3));
        assert_eq!(with(&|lines| drop(lines.drain(2..4))), Broken::Removed { from: 3, to: 4 });
        assert_eq!(with(&|lines| lines.swap(2, 3)), Broken::Removed { from: 3, to: 3 });
        assert_eq!(with(&|lines| lines.insert(3, lines[2].clone())), Broken::Moved { after: 3, found: 3 });
        assert_eq!(with(&|lines| drop(lines.drain(..2))), Broken::NoBeginning(3));
        assert_eq!(with(&|lines| lines[2].0.truncate(40)), Broken::Damaged(3));
    }

    #[test]
    fn a_beginning_may_go_if_the_log_says_so() {
        let (chain, mut lines) = log(4);
        let end = verify(&lines[..2]).unwrap().end;
        lines.push(chain.next(5, &end.retirement()).1);
        assert_eq!(verify(&lines[2..]).unwrap().first, 3);
        assert_eq!(verify(&lines[1..]).unwrap().first, 2, "a crash came between");
        assert_eq!(verify(&lines[3..]), Err(Broken::NoBeginning(4)), "more went than was said");
    }

    #[test]
    fn an_end_that_went_is_told_by_its_digest() {
        let (chain, lines) = log(3);
        let head = chain.head.to_hex().to_string();
        assert!(verify_with(&lines, Some(head.clone())).is_ok());
        assert_eq!(verify_with(&lines[..2], Some(head.clone())), Err(Broken::HeadMissing(head)));
    }

    proptest! {
        /// A change of one bit anywhere is detected with the head, and except in the last record also without it.
        #[test]
        fn no_bit_changes_unnoticed(at in 0_usize..4096, bit in 0_u32..8) {
            let (chain, mut lines) = log(4);
            let head = chain.head.to_hex().to_string();
            let line = at % lines.len();
            let mut changed = lines[line].0.clone().into_bytes();
            let at = at / lines.len() % changed.len();
            changed[at] ^= 1 << bit;
            lines[line] = Line(String::from_utf8_lossy(&changed).into_owned());
            prop_assert!(verify_with(&lines, Some(head)).is_err());
            prop_assert!(line == 3 || verify(&lines).is_err());
        }

        #[test]
        fn no_record_goes_or_moves_unnoticed(gone in 0_usize..3, first in 0_usize..4, second in 0_usize..4) {
            let (_, mut lines) = log(4);
            let mut swapped = lines.clone();
            swapped.swap(first, second);
            prop_assert_eq!(verify(&swapped).is_ok(), first == second);
            lines.remove(gone);
            prop_assert!(verify(&lines).is_err());
        }
    }
}
