//! Tells coordinators what the node holds: everything when a link comes up, changes from then on.

use super::store::Store;
use tidemill_net::uplink::Uplink;
use tidemill_proto::{
    ids::LinkId,
    message::{PoolEvent, WorkerEvent},
};

/// What each coordinator has been told.
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
    /// Knows nothing, or what it knows is void; the next event it is told has this number.
    Fresh(LinkId, u64),
    /// Knows everything up to the last announcement; the next event it is told has this number.
    Told(LinkId, u64),
}

/// Keeps messages far below the frame limit.
const EVENTS_PER_MESSAGE: usize = 4096;

impl Announcer {
    pub(super) fn new(links: usize) -> Self {
        Self { links: vec![Link::Down; links], next: 0 }
    }

    pub(super) fn up(&mut self, link: LinkId) {
        self.links[link.coordinator] = Link::Fresh(link, 0);
    }

    pub(super) fn down(&mut self, link: LinkId) {
        self.links[link.coordinator] = Link::Down;
    }

    /// Brings every link that is up to what the store holds now. `None`: there is no store yet.
    pub(super) fn announce(&mut self, store: Option<&Store>, uplink: &Uplink) {
        let (mut changes, mut snapshot) = (Vec::new(), None);
        if let Some(store) = store {
            let fresh = self.links.iter().any(|link| matches!(link, Link::Fresh(..)));
            let (events, all) = store.take_events(|events| fresh || events.from != self.next);
            if events.from != self.next {
                tracing::warn!("events were lost: telling everything again");
                for link in &mut self.links {
                    if let Link::Told(id, next) = *link {
                        *link = Link::Fresh(id, next);
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
                Link::Fresh(id, from) => (id, from, &everything),
                Link::Told(id, from) => (id, from, &changes),
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
    Link::Told(link, from)
}
