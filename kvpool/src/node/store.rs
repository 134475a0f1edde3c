//! A node's arena and directory, and the routing of the directory's answers. The lock is held for one directory operation at a time, never
//! across a copy, a hash or an await.

use super::{
    nvme::{DiskJob, NvmeThreads},
    objects::{FetchJob, ObjectTier},
    rails::SessionRails,
};
use crate::{
    arena::Arena,
    core::{
        announce::{Announcement, Announcer},
        directory::{Action, ClientId, Directory},
    },
    transport::rdma::{DeviceNames, node::ArenaNics},
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, OnceLock, Weak, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tidemill_net::link::Connection;
use tidemill_proto::pool::{CallId, Found, FromPool, LeaseId, Via};
use tokio::sync::{Notify, mpsc};

pub(super) struct Store {
    arena: Arc<Arena>,
    /// The devices that can access the arena, opened for the first client that can use them.
    nics: OnceLock<ArenaNics>,
    devices: DeviceNames,
    /// The number of times that a client's rails were closed because it was late.
    pub(super) fenced: AtomicU64,
    /// A reference to this store, for threads that outlive a call.
    this: Weak<Store>,
    started: Instant,
    state: Mutex<State>,
    disk: Option<Arc<NvmeThreads>>,
    objects: Option<Arc<ObjectTier>>,
    changed: Arc<Notify>,
}

struct State {
    directory: Directory,
    outboxes: HashMap<ClientId, Outbox>,
}

/// The destination of a session's answers. A session that does not keep up is closed. The messages are bounded by the blocks that its
/// client may wait for and lease, so this never happens to a client that reads.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) connection: Connection,
    pub(super) messages: mpsc::Sender<FromPool>,
    pub(super) streams: mpsc::Sender<StreamJob>,
    pub(super) rails: Arc<SessionRails>,
}

/// Blocks to send on streams.
#[derive(Debug)]
pub(super) struct StreamJob {
    pub(super) call: CallId,
    pub(super) lease: LeaseId,
    pub(super) blocks: Vec<Found>,
}

impl Store {
    /// A store. The directory must have a disk exactly if `disk` is given, and a bucket exactly if `objects` is.
    pub(super) fn new(
        arena: Arena,
        directory: Directory,
        disk: Option<Arc<NvmeThreads>>,
        objects: Option<Arc<ObjectTier>>,
        devices: DeviceNames,
        changed: Arc<Notify>,
    ) -> Arc<Self> {
        let state = Mutex::new(State { directory, outboxes: HashMap::new() });
        Arc::new_cyclic(|this| Self {
            arena: Arc::new(arena),
            nics: OnceLock::new(),
            devices,
            fenced: AtomicU64::new(0),
            this: Weak::clone(this),
            started: Instant::now(),
            state,
            disk,
            objects,
            changed,
        })
    }

    /// The devices that can access the arena. The first call takes a while, since it registers all of the arena's memory.
    pub(super) fn nics(&self) -> &ArenaNics {
        self.nics.get_or_init(|| ArenaNics::open(&self.devices, &self.arena))
    }

    pub(super) fn disk(&self) -> Option<&NvmeThreads> {
        self.disk.as_deref()
    }

    pub(super) fn objects(&self) -> Option<&Arc<ObjectTier>> {
        self.objects.as_ref()
    }

    /// The current time of the directory.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The clock's time for a time of the directory.
    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.started + at
    }

    /// Applies one operation to the directory at the current time, and carries out its actions.
    pub(super) fn apply<R>(&self, operation: impl FnOnce(&mut Directory, Duration) -> R) -> R {
        let State { directory, outboxes } = &mut *self.state.lock();
        let result = operation(directory, self.now());
        let (mut jobs, mut fetches) = (Vec::new(), Vec::new());
        while let Some(action) = directory.poll_action() {
            match action {
                Action::Store { disk, from, block } => jobs.push(DiskJob::Store { disk, from, block }),
                Action::Load { disk, to, checksum, until } => {
                    // Set as for any writer, so that readers of its earlier content notice.
                    self.arena.set_generation(to.slot, to.generation);
                    jobs.push(DiskJob::Load { disk, to, checksum, until });
                }
                Action::Fetch { block, to, until } => {
                    self.arena.set_generation(to.slot, to.generation);
                    fetches.push(FetchJob { block, to, until });
                }
                Action::Erase { disk } => jobs.push(DiskJob::Erase { disk }),
                Action::Fence { client } => match (outboxes.get(&client), self.this.upgrade()) {
                    (Some(outbox), Some(store)) => Arc::clone(&outbox.rails).fence(store, outbox.messages.clone()),
                    // A session's rails are closed before its outbox is removed.
                    _ => directory.fenced(client, self.now()),
                },
                Action::GiveUpDisk => self.disk.iter().for_each(|disk| disk.give_up()),
                Action::Found { client, call, via, lease, blocks } => {
                    send(outboxes, client, |outbox| match via {
                        Via::Slots => outbox.messages.try_send(FromPool::Found { call, lease, blocks }).is_ok(),
                        Via::Streams => outbox.streams.try_send(StreamJob { call, lease, blocks }).is_ok(),
                    });
                }
                Action::Missed { client, call, indexes } => {
                    send(outboxes, client, |outbox| outbox.messages.try_send(FromPool::Missed { call, indexes }).is_ok());
                }
            }
        }
        if let Some(disk) = &self.disk
            && !jobs.is_empty()
        {
            disk.push(jobs);
        }
        if let Some(objects) = &self.objects
            && !fetches.is_empty()
        {
            objects.push(fetches);
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

    /// The announcement of changes since the last call.
    pub(super) fn announce(&self, announcer: &mut Announcer) -> Announcement {
        announcer.announce(Some(&mut self.state.lock().directory))
    }
}

/// Sends to a client's outbox without waiting, since the lock is held.
fn send(outboxes: &HashMap<ClientId, Outbox>, client: ClientId, what: impl FnOnce(&Outbox) -> bool) {
    let Some(outbox) = outboxes.get(&client) else { return };
    if !what(outbox) {
        tracing::warn!(client = %outbox.connection.peer(), "does not keep up");
        outbox.connection.close("client does not keep up");
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("arena", &self.arena).finish_non_exhaustive()
    }
}
