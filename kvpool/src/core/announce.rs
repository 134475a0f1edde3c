//! Informs coordinators of the blocks that the node holds: all of them when a link comes up, then changes, in numbered events.

use super::directory::Directory;
use tidemill_proto::{
    ids::LinkId,
    message::{PoolEvent, WorkerEvent},
};

/// The progress of each coordinator's view of the node.
#[derive(Debug)]
pub struct Announcer {
    /// The links by coordinator.
    links: Vec<Link>,
    /// Number of the directory's next event.
    next: u64,
}

#[derive(Clone, Copy, Debug)]
enum Link {
    Down,
    /// The coordinator has no valid view. Its next event has this number.
    Outdated(LinkId, u64),
    /// The coordinator has everything up to the last announcement. Its next event has this number.
    UpToDate(LinkId, u64),
}

/// The messages to send now.
#[derive(Debug, Default)]
pub struct Announcement {
    pub messages: Vec<(LinkId, WorkerEvent)>,
    /// Whether the directory had lost events, so that every coordinator gets a snapshot again.
    pub repeats: bool,
}

/// The most events in one message, which keeps messages far below the frame limit.
const EVENTS_PER_MESSAGE: usize = 4096;

impl Announcer {
    /// An announcer for this many coordinators, all of whose links are down.
    pub fn new(links: usize) -> Self {
        Self { links: vec![Link::Down; links], next: 0 }
    }

    pub fn up(&mut self, link: LinkId) {
        self.links[link.coordinator] = Link::Outdated(link, 0);
    }

    pub fn down(&mut self, link: LinkId) {
        self.links[link.coordinator] = Link::Down;
    }

    /// Announces this directory from now on: every coordinator gets a snapshot of it, instead of what it knew.
    pub fn turn_to(&mut self, directory: &mut Directory) {
        self.next = directory.take_events().next();
        for link in &mut self.links {
            if let Link::UpToDate(id, next) = *link {
                *link = Link::Outdated(id, next);
            }
        }
    }

    /// Whether some link needs a snapshot.
    pub fn is_behind(&self) -> bool {
        self.links.iter().any(|link| matches!(link, Link::Outdated(..)))
    }

    /// Brings every connected coordinator up to date. `directory` is `None` while there is no store yet.
    pub fn announce(&mut self, directory: Option<&mut Directory>) -> Announcement {
        let (mut changes, mut snapshot, mut repeats) = (Vec::new(), Vec::new(), false);
        if let Some(directory) = directory {
            let events = directory.take_events();
            repeats = events.from != self.next;
            if repeats {
                for link in &mut self.links {
                    if let Link::UpToDate(id, next) = *link {
                        *link = Link::Outdated(id, next);
                    }
                }
            }
            self.next = events.next();
            changes = events.events;
            if self.is_behind() {
                snapshot = directory.snapshot().collect();
            }
        }
        let everything: Vec<PoolEvent> = [PoolEvent::Cleared].into_iter().chain(snapshot).collect();
        let mut messages = Vec::new();
        for link in &mut self.links {
            let (id, mut from, events) = match *link {
                Link::Down => continue,
                Link::Outdated(id, from) => (id, from, &everything),
                Link::UpToDate(id, from) => (id, from, &changes),
            };
            for part in events.chunks(EVENTS_PER_MESSAGE) {
                messages.push((id, WorkerEvent::PoolEvents { from, events: part.to_vec() }));
                from += part.len() as u64;
            }
            *link = Link::UpToDate(id, from);
        }
        Announcement { messages, repeats }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        directory::{ClientId, Limits},
        eviction::Policy,
    };
    use std::time::Duration;
    use tidemill_proto::{
        block::{BlockKey, Tenant},
        ids::RequestId,
        pool::{Lineage, Reservation, Room, Tier, Written},
    };

    const NOW: Duration = Duration::ZERO;

    fn link(coordinator: usize, session: u64) -> LinkId {
        LinkId { coordinator, session }
    }

    fn put(directory: &mut Directory, n: u8) {
        let lineage = Lineage { origin: RequestId(1), tenant: Tenant(0), parent: None, position: 0 };
        let answers = directory.put_start(ClientId(1), lineage, Room::Made, &[BlockKey([n; 16])], NOW);
        let [Reservation::Write(at)] = answers[..] else { panic!("{answers:?}") };
        assert_eq!(directory.put_end(ClientId(1), &[Written { at, checksum: 0 }], NOW), 1);
    }

    fn told(announcement: Announcement) -> Vec<(LinkId, u64, usize)> {
        let part = |(link, event)| match event {
            WorkerEvent::PoolEvents { from, events } => (link, from, events.len()),
            other => panic!("{other:?}"),
        };
        announcement.messages.into_iter().map(part).collect()
    }

    #[test]
    fn a_link_learns_everything_first_and_changes_then() {
        let limits = Limits { put_deadline: Duration::from_secs(1), lease: Duration::from_secs(1) };
        let mut directory = Directory::new(4, limits, Policy::Lru.build(4));
        let mut announcer = Announcer::new(2);
        announcer.up(link(0, 0));
        assert_eq!(told(announcer.announce(None)), [(link(0, 0), 0, 1)], "no directory: empty");
        put(&mut directory, 1);
        assert_eq!(told(announcer.announce(Some(&mut directory))), [(link(0, 0), 1, 1)]);
        announcer.up(link(1, 3));
        put(&mut directory, 2);
        assert_eq!(told(announcer.announce(Some(&mut directory))), [(link(0, 0), 2, 1), (link(1, 3), 0, 3)]);
        announcer.down(link(0, 0));
        put(&mut directory, 3);
        assert_eq!(told(announcer.announce(Some(&mut directory))), [(link(1, 3), 3, 1)]);
        announcer.up(link(0, 1));
        assert_eq!(told(announcer.announce(Some(&mut directory))), [(link(0, 1), 0, 4)], "what is told before is void");
        assert!(directory.snapshot().all(|event| matches!(event, PoolEvent::Stored { tier: Tier::Dram, .. })));
    }
}
