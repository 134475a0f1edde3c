//! One client's rails, opened and closed by the node.

use super::store::Store;
use crate::{core::directory::ClientId, transport::rdma::node::ClientRails};
use parking_lot::Mutex;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
};
use tidemill_proto::pool::{FromPool, RailEnd, RailOpened};
use tokio::sync::mpsc;

/// One client's rails. Their lock is taken before the store's, never while that is held. Everything that is done under it takes a while:
/// call it on threads that may block.
#[derive(Debug)]
pub(super) struct SessionRails {
    client: ClientId,
    /// The open rails; `None` once the session has ended.
    rails: Mutex<Option<ClientRails>>,
}

impl SessionRails {
    pub(super) fn new(client: ClientId) -> Arc<Self> {
        Arc::new(Self { client, rails: Mutex::new(Some(ClientRails::default())) })
    }

    pub(super) fn open(&self, store: &Store, ends: &[RailEnd]) -> Vec<Option<RailOpened>> {
        let nics = store.nics();
        let mut rails = self.rails.lock();
        let Some(rails) = &mut *rails else { return vec![None; ends.len()] };
        let opened = rails.open(nics, ends);
        if !rails.is_empty() {
            store.apply(|directory, _| directory.writes_remotely(self.client));
        }
        opened
    }

    pub(super) fn close(&self, pair: u32) {
        if let Some(rails) = &mut *self.rails.lock() {
            rails.close(pair);
        }
    }

    /// Closes all rails, and informs the directory and the client. The client may open new ones afterwards.
    pub(super) fn fence(self: Arc<Self>, store: Arc<Store>, messages: mpsc::Sender<FromPool>) {
        let fencing = move || {
            let mut rails = self.rails.lock();
            if let Some(rails) = &mut *rails {
                rails.close_all();
            }
            store.apply(|directory, now| directory.fenced(self.client, now));
            store.fenced.fetch_add(1, Relaxed);
            tracing::warn!(client = self.client.0, "late to fill a slot: its rails are closed");
            // A client that does not keep up will soon be disconnected.
            let _ = messages.try_send(FromPool::RailsClosed);
        };
        if let Err(error) = thread::Builder::new().name("fence".into()).spawn(fencing) {
            tracing::error!(%error, "a client cannot be fenced: the slots that it was late to fill stay unused");
        }
    }

    /// Closes all rails for good.
    pub(super) fn end(&self) {
        self.rails.lock().take();
    }
}
