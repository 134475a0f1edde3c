//! The node as a worker of one model: it is registered with each coordinator, and informs it of the model's blocks.

use super::{Node, store::Store};
use crate::core::{announce::Announcer, division::LayoutNumber};
use std::{mem, sync::Arc};
use tidemill_net::{
    link::Endpoint,
    uplink::{LinkEvent, Uplink},
    worker::WorkerSettings,
};
use tidemill_proto::{
    ids::LinkId,
    message::{Peer, RoleInfo, ToWorker, WorkerEvent},
};
use tokio::sync::{mpsc, watch};

pub(super) struct Member {
    node: Arc<Node>,
    model: usize,
    uplink: Uplink,
    links: mpsc::Receiver<(LinkId, LinkEvent)>,
    announcer: Announcer,
    /// The layout that is announced.
    announced: Option<LayoutNumber>,
}

/// The phases of a node's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Serving,
    Leaving,
    Ended,
}

impl Member {
    pub(super) fn start(node: &Arc<Node>, model: usize, endpoint: &Endpoint, worker: &WorkerSettings, role: RoleInfo) -> Self {
        let mut register = worker.register(role);
        register.model = node.models[model].name.clone();
        let reporting = Arc::clone(node);
        let reports = (worker.heartbeat, Arc::new(move || reporting.report(model)) as _);
        let (uplink, links) = Uplink::start(endpoint, &worker.coordinators, register, reports);
        let announcer = Announcer::new(worker.coordinators.len());
        Self { node: Arc::clone(node), model, uplink, links, announcer, announced: None }
    }

    /// Keeps the coordinators up to date until the node has ended. `peers` gets what they say of nodes that may take over.
    pub(super) async fn run(mut self, mut phase: watch::Receiver<Phase>, peers: mpsc::Sender<(usize, Vec<Peer>)>) {
        let node = Arc::clone(&self.node);
        loop {
            tokio::select! {
                changed = phase.changed() => match *phase.borrow_and_update() {
                    Phase::Serving if changed.is_ok() => {}
                    Phase::Leaving if changed.is_ok() => self.uplink.broadcast(&WorkerEvent::Leaving),
                    _ => break,
                },
                () = node.models[self.model].changed.notified() => self.announce(),
                Some((link, event)) = self.links.recv() => match event {
                    LinkEvent::Up => {
                        self.announcer.up(link);
                        self.announce();
                    }
                    LinkEvent::Down => self.announcer.down(link),
                    LinkEvent::Message(message) => match *message {
                        // The first answer counts, and the channel has room for one of each model.
                        ToWorker::Peers(told) => drop(peers.try_send((self.model, told))),
                        message => tracing::warn!(?message, "a pool node has no use for this message"),
                    },
                },
            }
        }
        self.uplink.close().await;
    }

    /// Brings every coordinator up to date.
    fn announce(&mut self) {
        let store = self.node.store(self.model);
        let number = store.as_ref().map(|store| store.number());
        if mem::replace(&mut self.announced, number) != number
            && let Some(store) = &store
        {
            store.turn_here(&mut self.announcer);
            // Coordinators should know the free room before the next heartbeat.
            self.uplink.broadcast(&WorkerEvent::Heartbeat(Box::new(self.node.report(self.model))));
        }
        let announcement = match &store {
            Some(store) => Store::announce(store, &mut self.announcer),
            None => self.announcer.announce(None),
        };
        if announcement.repeats {
            tracing::warn!("events were lost: telling everything again");
        }
        for (link, event) in announcement.messages {
            if !self.uplink.send(link, event) {
                // The uplink ends a link whose queue is full, and reports it.
                self.announcer.down(link);
            }
        }
    }
}
