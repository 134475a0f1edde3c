//! Arena and directory of one node, and whom to tell what the directory says. The lock is held for one operation of the
//! directory: never across a copy, a hash or an await.

use crate::{
    arena::Arena,
    directory::{Action, ClientId, Directory, Events},
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_proto::{
    link::Connection,
    message::PoolEvent,
    pool::{CallId, Found, FromPool, LeaseId, Via},
};
use tokio::sync::{Notify, mpsc};

pub(super) struct Store {
    arena: Arena,
    started: Instant,
    state: Mutex<State>,
    changed: Arc<Notify>,
}

struct State {
    directory: Directory,
    outboxes: HashMap<ClientId, Outbox>,
}

/// What a session has to send. It is closed when it does not keep up: its messages are bounded by what its client may wait
/// for and lease, so a client that reads never gets there.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) connection: Connection,
    pub(super) messages: mpsc::Sender<FromPool>,
    pub(super) streams: mpsc::Sender<StreamJob>,
}

/// Blocks to send on streams.
#[derive(Debug)]
pub(super) struct StreamJob {
    pub(super) call: CallId,
    pub(super) lease: LeaseId,
    pub(super) blocks: Vec<Found>,
}

impl Store {
    pub(super) fn new(arena: Arena, directory: Directory, changed: Arc<Notify>) -> Self {
        let state = Mutex::new(State { directory, outboxes: HashMap::new() });
        Self { arena, started: Instant::now(), state, changed }
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// A time of the directory, as the clock shows it.
    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.started + at
    }

    /// One operation of the directory, at the present time, and everything that follows from it.
    pub(super) fn apply<R>(&self, operation: impl FnOnce(&mut Directory, Duration) -> R) -> R {
        let State { directory, outboxes } = &mut *self.state.lock();
        let result = operation(directory, self.started.elapsed());
        while let Some(action) = directory.poll_action() {
            deliver(outboxes, action);
        }
        if directory.has_events() {
            self.changed.notify_one();
        }
        result
    }

    pub(super) fn join(&self, client: ClientId, outbox: Outbox) {
        self.state.lock().outboxes.insert(client, outbox);
    }

    pub(super) fn leave(&self, client: ClientId) {
        self.state.lock().outboxes.remove(&client);
        self.apply(|directory, now| directory.client_gone(client, now));
    }

    /// What came and went since the last call; and everything that is there, if `wanted` says so for these events.
    pub(super) fn take_events(&self, wanted: impl FnOnce(&Events) -> bool) -> (Events, Option<Vec<PoolEvent>>) {
        let State { directory, .. } = &mut *self.state.lock();
        let events = directory.take_events();
        let snapshot = wanted(&events).then(|| directory.snapshot().collect());
        (events, snapshot)
    }
}

/// Without waiting: this happens under the lock.
fn deliver(outboxes: &HashMap<ClientId, Outbox>, action: Action) {
    let (client, delivered) = match action {
        Action::Found { client, call, via, lease, blocks } => {
            let Some(outbox) = outboxes.get(&client) else { return };
            let delivered = match via {
                Via::Slots => outbox.messages.try_send(FromPool::Found { call, lease, blocks }).is_ok(),
                Via::Streams => outbox.streams.try_send(StreamJob { call, lease, blocks }).is_ok(),
            };
            (outbox, delivered)
        }
        Action::Missed { client, call, indexes } => {
            let Some(outbox) = outboxes.get(&client) else { return };
            (outbox, outbox.messages.try_send(FromPool::Missed { call, indexes }).is_ok())
        }
    };
    if !delivered {
        tracing::warn!(client = %client.connection.peer(), "does not keep up");
        client.connection.close("client does not keep up");
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("arena", &self.arena).finish_non_exhaustive()
    }
}
