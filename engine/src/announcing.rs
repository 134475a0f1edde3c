//! Announces the contents of the device's prefix cache to coordinators: everything when a link comes up, then changes, in numbered events.
//! Coordinators send a sequence to a worker that already has its beginning.

use crate::residency::Residency;
use std::{collections::BTreeMap, time::Duration};
use tidemill_proto::{
    block::BlockKey,
    ids::LinkId,
    message::{CacheEvent, WorkerEvent},
};

/// The interval at which changes are announced while steps follow one another, long enough to cost a step hardly anything.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// The events per message, few enough to stay far below the frame limit.
const EVENTS_PER_MESSAGE: usize = 4096;
/// The most changes that are kept until they are announced. With more, everything is announced again.
const CHANGES_MAX: usize = 1 << 16;

/// The changes since the last [`take_changes`](Residency::take_changes).
#[derive(Debug, Default)]
pub(crate) struct Changes {
    events: Vec<CacheEvent>,
    /// Whether some changes are missing.
    incomplete: bool,
}

/// The state of each coordinator's knowledge.
#[derive(Debug, Default)]
pub struct Announcer {
    /// The number of a link's next event, and whether the link knows everything before it.
    links: BTreeMap<LinkId, (u64, bool)>,
    told: Duration,
}

impl Changes {
    pub(crate) fn stored(&mut self, key: BlockKey) {
        self.push(CacheEvent::Stored(key));
    }

    pub(crate) fn evicted(&mut self, key: BlockKey) {
        self.push(CacheEvent::Evicted(key));
    }

    fn push(&mut self, event: CacheEvent) {
        if self.events.len() == CHANGES_MAX {
            self.events.clear();
            self.incomplete = true;
        }
        if !self.incomplete {
            self.events.push(event);
        }
    }
}

impl Announcer {
    pub fn up(&mut self, link: LinkId) {
        self.links.insert(link, (0, false));
    }

    pub fn down(&mut self, link: LinkId) {
        self.links.remove(&link);
    }

    /// The messages to send now, each with its link. `busy`: another step follows at once.
    pub fn announce(&mut self, residency: &mut Residency, busy: bool, now: Duration) -> Vec<(LinkId, WorkerEvent)> {
        if busy && now.saturating_sub(self.told) < TELL_EVERY {
            return Vec::new();
        }
        self.told = now;
        let Changes { events, incomplete } = residency.take_changes();
        let mut everything = None;
        let mut messages = Vec::new();
        for (link, (from, up_to_date)) in &mut self.links {
            let complete = std::mem::replace(up_to_date, true) && !incomplete;
            let events = if complete {
                &events
            } else {
                everything.get_or_insert_with(|| [&[CacheEvent::Cleared][..], &residency.cached()].concat())
            };
            for part in events.chunks(EVENTS_PER_MESSAGE) {
                messages.push((*link, WorkerEvent::CacheEvents { from: *from, events: part.to_vec() }));
                *from += part.len() as u64;
            }
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobId, ScheduledChunk};
    use crate::residency::JobKv;
    use std::collections::BTreeSet;
    use tidemill_proto::{
        block::{BLOCK_TOKENS, LayoutFingerprint, Token},
        ids::RequestId,
    };

    const LINK: LinkId = LinkId { coordinator: 0, session: 0 };
    const OTHER: LinkId = LinkId { coordinator: 1, session: 4 };
    const NOW: Duration = Duration::from_secs(1);

    /// Computes and releases a job of `blocks` blocks of its own.
    fn run(residency: &mut Residency, id: u64, blocks: usize) -> Vec<BlockKey> {
        let tokens = vec![id as Token; blocks * BLOCK_TOKENS];
        let mut kv = JobKv::new(JobId(id), RequestId(id), &LayoutFingerprint([1; 16]), b"", &tokens);
        assert!(residency.admit(&mut kv, 0, blocks, 0));
        residency.advance(&mut kv, &ScheduledChunk { job: JobId(id), start: 0, len: tokens.len() });
        residency.release(&mut kv);
        kv.keys().to_vec()
    }

    /// Applies the messages of a link as a coordinator does.
    fn hear(known: &mut BTreeSet<BlockKey>, next: &mut u64, messages: &[(LinkId, WorkerEvent)], link: LinkId) {
        for (_, message) in messages.iter().filter(|(to, _)| *to == link) {
            let WorkerEvent::CacheEvents { from, events } = message else { panic!("{message:?}") };
            assert_eq!(from, next, "no gap");
            *next += events.len() as u64;
            for event in events {
                match event {
                    CacheEvent::Stored(key) => assert!(known.insert(*key), "each block once"),
                    CacheEvent::Evicted(key) => assert!(known.remove(key), "only what was there"),
                    CacheEvent::Cleared => known.clear(),
                }
            }
        }
    }

    #[test]
    fn a_link_learns_everything_first_and_changes_then() {
        let (mut residency, mut announcer) = (Residency::new(4), Announcer::default());
        let (mut known, mut next) = (BTreeSet::new(), 0);
        let first = run(&mut residency, 1, 3);
        announcer.up(LINK);
        hear(&mut known, &mut next, &announcer.announce(&mut residency, false, NOW), LINK);
        assert_eq!(known, BTreeSet::from_iter(first.clone()));
        assert!(announcer.announce(&mut residency, false, NOW).is_empty(), "nothing new");

        // Four blocks: the end of the first chain makes room.
        let second = run(&mut residency, 2, 2);
        assert!(announcer.announce(&mut residency, true, NOW).is_empty(), "not in the middle of work");
        announcer.up(OTHER);
        let messages = announcer.announce(&mut residency, true, NOW + TELL_EVERY);
        hear(&mut known, &mut next, &messages, LINK);
        let now = BTreeSet::from_iter(first[..2].iter().chain(&second).copied());
        assert_eq!(known, now);
        let (mut known_there, mut next_there) = (BTreeSet::new(), 0);
        hear(&mut known_there, &mut next_there, &messages, OTHER);
        assert_eq!(known_there, now);
    }

    #[test]
    fn changes_that_pile_up_are_told_as_a_whole() {
        let (mut residency, mut announcer) = (Residency::new(4), Announcer::default());
        let (mut known, mut next) = (BTreeSet::new(), 0);
        announcer.up(LINK);
        hear(&mut known, &mut next, &announcer.announce(&mut residency, false, NOW), LINK);
        let last = (0..CHANGES_MAX as u64 / 4).map(|id| run(&mut residency, id, 4)).last().unwrap();
        hear(&mut known, &mut next, &announcer.announce(&mut residency, false, NOW), LINK);
        assert_eq!((known, next), (BTreeSet::from_iter(last), 1 + 5));
    }
}
