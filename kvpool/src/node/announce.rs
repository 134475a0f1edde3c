//! Tells coordinators what the node holds: everything when a link comes up, then changes.

use super::store::Store;
use tidemill_net::uplink::Uplink;
use tidemill_proto::{
    ids::LinkId,
    message::{PoolEvent, WorkerEvent},
};

/// How much each coordinator knows.
#[derive(Debug)]
pub(super) struct Announcer {
    /// By coordinator.
    links: Vec<Link>,
    /// Number of the directory's next event.
    next: u64,
}

#[derive(Clone, Copy, Debug)]
enum Link {
    Down,
    /// Knows nothing valid. Its next event has this number.
    Outdated(LinkId, u64),
    /// Knows everything up to the last announcement. Its next event has this number.
    UpToDate(LinkId, u64),
}

/// Keeps messages far below the frame limit.
const EVENTS_PER_MESSAGE: usize = 4096;

impl Announcer {
    pub(super) fn new(links: usize) -> Self {
        Self { links: vec![Link::Down; links], next: 0 }
    }

    pub(super) fn up(&mut self, link: LinkId) {
        self.links[link.coordinator] = Link::Outdated(link, 0);
    }

    pub(super) fn down(&mut self, link: LinkId) {
        self.links[link.coordinator] = Link::Down;
    }

    /// Brings every link that is up to date. `None`: there is no store yet.
    pub(super) fn announce(&mut self, store: Option<&Store>, uplink: &Uplink) {
        let (mut changes, mut snapshot) = (Vec::new(), None);
        if let Some(store) = store {
            let outdated = self.links.iter().any(|link| matches!(link, Link::Outdated(..)));
            let (events, all) = store.take_events(|events| outdated || events.from != self.next);
            if events.from != self.next {
                tracing::warn!("events were lost: telling everything again");
                for link in &mut self.links {
                    if let Link::UpToDate(id, next) = *link {
                        *link = Link::Outdated(id, next);
                    }
                }
            }
            self.next = events.next();
            (changes, snapshot) = (events.events, all);
        }
        let everything: Vec<PoolEvent> = [PoolEvent::Cleared].into_iter().chain(snapshot.into_iter().flatten()).collect();
        for link in &mut self.links {
            let (id, from, events) = match *link {
                Link::Down => continue,
                Link::Outdated(id, from) => (id, from, &everything),
                Link::UpToDate(id, from) => (id, from, &changes),
            };
            *link = tell(uplink, id, from, events);
        }
    }
}

fn tell(uplink: &Uplink, link: LinkId, mut from: u64, events: &[PoolEvent]) -> Link {
    for part in events.chunks(EVENTS_PER_MESSAGE) {
        if !uplink.send(link, WorkerEvent::PoolEvents { from, events: part.to_vec() }) {
            // The uplink ends a link whose queue is full, and reports it.
            return Link::Down;
        }
        from += part.len() as u64;
    }
    Link::UpToDate(link, from)
}
