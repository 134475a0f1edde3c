//! One client of the node, from its hello to its end.

use super::{
    Node,
    rails::SessionRails,
    store::{Outbox, Store},
    streams::Streams,
};
use crate::core::directory::{ClientId, Directory};
use std::{sync::Arc, time::Duration};
use tidemill_net::link::{CONNECT_MAX, Connection, LinkError, Receiver, Sender};
use tidemill_proto::{
    block::{BlockKey, Shard},
    frame::Preamble,
    pool::{CallId, FromPool, KEYS_MAX, RAILS_MAX, RailEnd, Reservation, Room, SlotRef, ToPool},
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::spawn_blocking,
    time::{sleep, timeout},
};

pub(super) struct Session {
    node: Arc<Node>,
    connection: Connection,
    client: ClientId,
    rails: Arc<SessionRails>,
    /// A permit to open rails, held by one task at a time.
    opening: Arc<Semaphore>,
}

/// The most messages, and blocks to stream, that wait to be sent to a client. For a client that reads, there are never this many.
const QUEUE: usize = 1 << 16;
/// The most answers that may wait for a client before no more of its messages are read: answers can be large.
const BACKLOG: usize = 64;
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);

impl Session {
    pub(super) fn new(node: Arc<Node>, connection: Connection, number: u64) -> Self {
        let client = ClientId(number);
        Self { node, connection, client, rails: SessionRails::new(client), opening: Arc::new(Semaphore::new(1)) }
    }

    /// Serves the client until its connection ends. Breaking the protocol ends only this connection.
    pub(super) async fn run(self) {
        let peer = self.connection.peer();
        let reason = match timeout(CONNECT_MAX, self.hello()).await {
            Ok(Ok((store, shard, sender, receiver))) => {
                tracing::info!(%peer, client = self.client.0, "client connected");
                self.serve(store, shard, sender, receiver).await
            }
            Ok(Err(reason)) => reason,
            Err(_) => "no hello within the deadline".into(),
        };
        tracing::info!(%peer, client = self.client.0, reason, "client ended");
        self.connection.close(&reason);
    }

    async fn hello(&self) -> Result<(Arc<Store>, Shard, Sender<FromPool>, Receiver<ToPool>), String> {
        let broken = |error: LinkError| error.to_string();
        let (mut sender, mut receiver) = self.connection.accept::<FromPool, ToPool>(Preamble::Pool).await.map_err(broken)?;
        let Some(ToPool::Hello(hello)) = receiver.recv().await.map_err(broken)? else {
            return Err("the first message was not a hello".into());
        };
        let blocks = hello.blocks;
        match self.node.store_for(&hello) {
            Ok(store) => {
                tracing::debug!(client = self.client.0, layout = %blocks.layout, shard = ?blocks.shard, model = hello.model, "hello");
                sender.send(&FromPool::Welcome { arena: store.arena().info() }).await.map_err(broken)?;
                Ok((store, blocks.shard, sender, receiver))
            }
            Err(refusal) => {
                let reason = refusal.to_string();
                sender.send(&FromPool::Refused { reason: reason.clone() }).await.map_err(broken)?;
                sender.finish().await;
                Err(reason)
            }
        }
    }

    async fn serve(&self, store: Arc<Store>, shard: Shard, sender: Sender<FromPool>, receiver: Receiver<ToPool>) -> String {
        let (messages, queue) = mpsc::channel(QUEUE);
        let (jobs_in, jobs) = mpsc::channel(QUEUE);
        let outbox =
            Outbox { connection: self.connection.clone(), messages: messages.clone(), streams: jobs_in, rails: Arc::clone(&self.rails) };
        store.join(self.client, outbox);
        let _joined = Guard { store: Arc::clone(&store), client: self.client, rails: Arc::clone(&self.rails) };
        let streams =
            Streams { store: Arc::clone(&store), client: self.client, connection: self.connection.clone(), messages: messages.clone() };
        tokio::select! {
            reason = write(sender, queue) => reason,
            reason = self.read(&store, shard, receiver, messages) => reason,
            reason = streams.receive_all() => reason,
            reason = streams.send_all(jobs) => reason,
        }
    }

    async fn read(&self, store: &Arc<Store>, shard: Shard, mut receiver: Receiver<ToPool>, messages: mpsc::Sender<FromPool>) -> String {
        loop {
            // Waiting for a place in the queue would take it from senders that must not wait.
            while QUEUE - messages.capacity() > BACKLOG {
                sleep(BACKLOG_PAUSE).await;
            }
            let message = match receiver.recv().await {
                Ok(Some(message)) => message,
                Ok(None) => return "client ends".into(),
                Err(error) => return error.to_string(),
            };
            match message {
                ToPool::OpenRails { call, ends } => {
                    if let Err(reason) = self.open_rails(store, call, ends, &messages) {
                        return reason.into();
                    }
                    continue;
                }
                // Done in order: later messages may rely on the rail being closed.
                ToPool::CloseRail { pair } => {
                    let rails = Arc::clone(&self.rails);
                    spawn_blocking(move || rails.close(pair)).await.expect("closing does not panic and is not aborted");
                    continue;
                }
                _ => {}
            }
            match self.handle(store, of_shard(message, shard)) {
                Ok(None) => {}
                Ok(Some(answer)) => {
                    if messages.send(answer).await.is_err() {
                        return "node ends".into();
                    }
                }
                Err(reason) => return reason.into(),
            }
        }
    }

    /// Opens rails on a thread that may block, which then answers. `Err` if the client broke the protocol.
    fn open_rails(
        &self,
        store: &Arc<Store>,
        call: CallId,
        ends: Vec<RailEnd>,
        messages: &mpsc::Sender<FromPool>,
    ) -> Result<(), &'static str> {
        if ends.len() > RAILS_MAX {
            return Err("too many rails in one message");
        }
        let permit = Arc::clone(&self.opening).try_acquire_owned().map_err(|_| "it opens rails while it opens rails")?;
        let (store, rails, messages) = (Arc::clone(store), Arc::clone(&self.rails), messages.clone());
        spawn_blocking(move || {
            let opened = rails.open(&store, &ends);
            drop(permit);
            // This fails only if the session has ended.
            let _ = messages.blocking_send(FromPool::RailsOpened { call, rails: opened });
        });
        Ok(())
    }

    /// Carries out a message. `Err` if the client broke the protocol.
    fn handle(&self, store: &Store, message: ToPool) -> Result<Option<FromPool>, &'static str> {
        let client = self.client;
        match message {
            ToPool::Hello(_) => return Err("a second hello"),
            ToPool::PutStart { call, lineage, room, keys } => {
                check_keys(&keys)?;
                let wanted = |directory: &Directory| if room == Room::Made { directory.to_write(&keys) } else { 0 };
                let answers = store.apply_with_room(wanted, |directory, now| directory.put_start(client, lineage, room, &keys, now));
                for answer in &answers {
                    if let Reservation::Write(at) = answer {
                        // Set before the writer learns of its slot, so that readers of its earlier content notice.
                        store.arena().set_generation(at.slot, at.generation);
                    }
                }
                let deadline_ms = self.node.limits.put_deadline.as_millis() as u64;
                return Ok(Some(FromPool::PutStarted { call, deadline_ms, answers }));
            }
            ToPool::PutEnd { call, blocks } => {
                let published = store.apply(|directory, now| directory.put_end(client, &blocks, now)) as u32;
                return Ok(Some(FromPool::PutEnded { call, published, refused: blocks.len() as u32 - published }));
            }
            ToPool::PutRevoke { blocks } => store.apply(|directory, now| directory.put_revoke(client, &blocks, now)),
            ToPool::Match { call, keys } => {
                check_keys(&keys)?;
                let blocks = store.apply(|directory, now| directory.match_prefix(client, &keys, now)) as u32;
                return Ok(Some(FromPool::Matched { call, blocks }));
            }
            ToPool::Get { call, keys, wait_ms, via } => {
                check_keys(&keys)?;
                let wait = Duration::from_millis(wait_ms).min(WAIT_MAX);
                let wanted = |directory: &Directory| directory.to_load(&keys);
                store.apply_with_room(wanted, |directory, now| directory.get(client, call, &keys, wait, via, now));
            }
            ToPool::CancelGet { call } => store.apply(|directory, _| directory.cancel_get(client, call)),
            ToPool::Release { lease } => store.apply(|directory, _| directory.release(client, lease)),
            ToPool::Suspect { block } => examine(store, block),
            ToPool::OpenRails { .. } | ToPool::CloseRail { .. } => unreachable!("read() takes these"),
        }
        Ok(None)
    }
}

/// The longest wait, whatever a client asks for.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// The message with the names under which the node keeps this shard's blocks.
fn of_shard(mut message: ToPool, shard: Shard) -> ToPool {
    if let ToPool::PutStart { lineage, .. } = &mut message {
        lineage.parent = lineage.parent.map(|parent| parent.of_shard(shard));
    }
    if let ToPool::PutStart { keys, .. } | ToPool::Match { keys, .. } | ToPool::Get { keys, .. } = &mut message {
        keys.iter_mut().for_each(|key| *key = key.of_shard(shard));
    }
    message
}

fn check_keys(keys: &[BlockKey]) -> Result<(), &'static str> {
    if keys.len() > KEYS_MAX { Err("too many keys in one message") } else { Ok(()) }
}

/// Checks a block in which a reader found wrong bytes, and forgets it only if they are wrong here too.
fn examine(store: &Store, block: SlotRef) {
    let Some(expected) = store.apply(|directory, _| directory.checksum(block)) else { return };
    let (_, copied) = store.arena().read_block(block.slot);
    if copied.generation_after == block.generation && copied.checksum != expected {
        tracing::error!(slot = block.slot, "a block's bytes have changed since it was published: forgotten");
        store.apply(|directory, now| directory.forget(block, now));
    }
}

async fn write(mut sender: Sender<FromPool>, mut queue: mpsc::Receiver<FromPool>) -> String {
    while let Some(message) = queue.recv().await {
        if let Err(error) = sender.send(&message).await {
            return error.to_string();
        }
    }
    "node ends".into()
}

/// Releases everything the client held, however the session ends.
struct Guard {
    store: Arc<Store>,
    client: ClientId,
    rails: Arc<SessionRails>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Rails are closed first, so that the slots that the client had reserved are free soon after.
        self.rails.end();
        self.store.leave(self.client);
    }
}
