//! One layout of a node: its arena and directory, and the routing of the directory's answers.

use super::{
    nvme::{DiskJob, NvmeThreads},
    objects::{FetchJob, ObjectTier},
    rails::SessionRails,
    shared::{Shared, State},
};
use crate::{
    arena::Arena,
    core::{
        announce::{Announcement, Announcer},
        directory::{Action, ClientId, Directory},
        division::{LayoutNumber, Share},
    },
    transport::rdma::node::ArenaNics,
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Weak, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tidemill_net::link::Connection;
use tidemill_proto::{
    block::LayoutFingerprint,
    pool::{CallId, Found, FromPool, LeaseId, Via},
};
use tokio::sync::{Notify, mpsc};

pub(super) struct Store {
    shared: Arc<Shared>,
    number: LayoutNumber,
    layout: LayoutFingerprint,
    arena: Arc<Arena>,
    pub(super) traffic: Traffic,
    /// The number of times that a client's rails were closed because it was late.
    pub(super) fenced: AtomicU64,
    /// A reference to this store, for threads that outlive a call.
    this: Weak<Store>,
    disk: Option<Arc<NvmeThreads>>,
    objects: Option<Arc<ObjectTier>>,
    changed: Arc<Notify>,
}

/// Bytes that the node itself moved, which happens only over QUIC.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) put_bytes: AtomicU64,
    pub(super) get_bytes: AtomicU64,
}

/// The tiers behind memory.
#[derive(Default)]
pub(super) struct Tiers {
    pub(super) disk: Option<Arc<NvmeThreads>>,
    pub(super) objects: Option<Arc<ObjectTier>>,
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
    /// A store for one more layout of the node. `None` if the node has had too many. The directory must have a disk exactly if one of the
    /// tiers is a disk, and a bucket exactly if one is a bucket.
    pub(super) fn new(
        shared: &Arc<Shared>,
        (layout, share): (LayoutFingerprint, Share),
        arena: Arena,
        directory: Directory,
        tiers: Tiers,
        changed: Arc<Notify>,
    ) -> Option<Arc<Self>> {
        let (arena, Tiers { disk, objects }) = (Arc::new(arena), tiers);
        let number = shared.add(Arc::clone(&arena), directory, share, Arc::clone(&changed))?;
        Some(Arc::new_cyclic(|this| Self {
            shared: Arc::clone(shared),
            number,
            layout,
            arena,
            traffic: Traffic::default(),
            fenced: AtomicU64::new(0),
            this: Weak::clone(this),
            disk,
            objects,
            changed,
        }))
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(super) fn number(&self) -> LayoutNumber {
        self.number
    }

    pub(super) fn layout(&self) -> LayoutFingerprint {
        self.layout
    }

    pub(super) fn nics(&self) -> &ArenaNics {
        self.shared.nics()
    }

    pub(super) fn disk(&self) -> Option<&NvmeThreads> {
        self.disk.as_deref()
    }

    pub(super) fn objects(&self) -> Option<&Arc<ObjectTier>> {
        self.objects.as_ref()
    }

    /// The current time of the directory.
    pub(super) fn now(&self) -> Duration {
        self.shared.now()
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The clock's time for a time of the directory.
    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.shared.instant(at)
    }

    /// Applies one operation to the directory at the current time, and carries out its actions.
    pub(super) fn apply<R>(&self, operation: impl FnOnce(&mut Directory, Duration) -> R) -> R {
        self.apply_with_room(|_| 0, operation)
    }

    /// Takes memory from other layouts for as many blocks as `wanted` says, as far as this layout may, and applies the operation.
    pub(super) fn apply_with_room<R>(
        &self,
        wanted: impl FnOnce(&Directory) -> usize,
        operation: impl FnOnce(&mut Directory, Duration) -> R,
    ) -> R {
        let state = &mut *self.shared.state.lock();
        if state.layouts.has_more() {
            let wanted = wanted(state.layouts.directory(self.number));
            state.make_room(self.number, wanted, self.now());
        }
        let State { layouts, outboxes, .. } = state;
        let directory = layouts.directory(self.number);
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
        let state = &mut *self.shared.state.lock();
        state.outboxes.insert(client, outbox);
        state.count_client(self.number, true, self.now());
    }

    /// Ends a client that has joined.
    pub(super) fn leave(&self, client: ClientId) {
        self.shared.state.lock().outboxes.remove(&client);
        self.apply(|directory, now| directory.client_gone(client, now));
        self.shared.state.lock().count_client(self.number, false, self.now());
    }

    /// Ends what is due, and takes the layout's floor from others if they have it.
    pub(super) fn tick(&self) {
        self.apply(|directory, now| directory.tick(now));
    }

    /// Stops the threads of all tiers: the store is not used any more.
    pub(super) fn close(&self) {
        self.disk().into_iter().for_each(NvmeThreads::close);
        self.objects().into_iter().for_each(|objects| objects.close());
    }

    /// Makes an announcer of another store's blocks one of this store's.
    pub(super) fn turn_here(&self, announcer: &mut Announcer) {
        announcer.turn_to(self.shared.state.lock().layouts.directory(self.number));
    }

    /// The announcement of changes since the last call.
    pub(super) fn announce(&self, announcer: &mut Announcer) -> Announcement {
        announcer.announce(Some(self.shared.state.lock().layouts.directory(self.number)))
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

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.gone(self.number);
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("arena", &self.arena).finish_non_exhaustive()
    }
}
