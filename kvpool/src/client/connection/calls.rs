//! The open calls of one connection, and the tasks that carry their messages.

use crate::transport::{
    quic::{self, Received, StreamError},
    rdma::client::Rails,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_net::link::{Connection, Receiver, Sender};
use tidemill_proto::pool::{CallId, Found, FromPool, Reservation, ToPool};
use tokio::{
    sync::mpsc::{self, error::TrySendError},
    task::JoinSet,
};

/// The open calls, to which replies are delivered by call number.
#[derive(Debug)]
pub(super) struct Calls {
    /// The calls; `None` once the connection is gone.
    open: Mutex<Option<Open>>,
    /// The queue for returning leases and slots that arrive after their call has ended. Weak, so that this does not keep the connection
    /// open.
    outgoing: mpsc::WeakSender<ToPool>,
}

#[derive(Debug, Default)]
struct Open {
    calls: HashMap<CallId, Inbox>,
    next: u64,
}

#[derive(Debug)]
struct Inbox {
    replies: mpsc::Sender<FromPool>,
    blocks: mpsc::Sender<StreamedBlock>,
}

/// One call. Dropping it ends it; blocks and slots that arrive for it later are returned. Its channels close with the connection.
#[derive(Debug)]
pub(super) struct Call {
    id: CallId,
    calls: Arc<Calls>,
    pub(super) replies: mpsc::Receiver<FromPool>,
    pub(super) blocks: mpsc::Receiver<StreamedBlock>,
}

/// A block that arrived on a stream, not validated.
#[derive(Debug)]
pub(super) struct StreamedBlock {
    pub(super) found: Found,
    pub(super) received: Received,
    pub(super) took: Duration,
}

/// The most streamed blocks of one call that wait for the call: beyond that, the streams wait, and the node with them.
const STREAMED_MAX: usize = 4;

impl Calls {
    pub(super) fn new(outgoing: mpsc::WeakSender<ToPool>) -> Self {
        Self { open: Mutex::new(Some(Open::default())), outgoing }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.lock().is_some()
    }

    /// A new call that is answered by at most `replies` messages. `None` if the connection is gone.
    pub(super) fn begin(self: &Arc<Self>, replies: usize) -> Option<Call> {
        let mut open = self.open.lock();
        let open = open.as_mut()?;
        let id = CallId(open.next);
        open.next += 1;
        let (replies_in, replies) = mpsc::channel(replies);
        let (blocks_in, blocks) = mpsc::channel(STREAMED_MAX);
        open.calls.insert(id, Inbox { replies: replies_in, blocks: blocks_in });
        Some(Call { id, calls: Arc::clone(self), replies, blocks })
    }

    /// Ends all calls.
    fn close(&self) {
        self.open.lock().take();
    }

    /// Passes a reply on. `Err` if no call can have such a reply.
    fn deliver(&self, reply: FromPool) -> Result<(), &'static str> {
        let call = match &reply {
            FromPool::PutStarted { call, .. }
            | FromPool::PutEnded { call, .. }
            | FromPool::Matched { call, .. }
            | FromPool::Found { call, .. }
            | FromPool::Missed { call, .. }
            | FromPool::RailsOpened { call, .. } => *call,
            FromPool::RailsClosed => return Err("it closes rails that no call asks about"),
            FromPool::Welcome { .. } | FromPool::Refused { .. } => return Err("it welcomes twice"),
        };
        let open = self.open.lock();
        let Some(inbox) = open.as_ref().and_then(|open| open.calls.get(&call)) else {
            self.give_back(reply);
            return Ok(());
        };
        match inbox.replies.try_send(reply) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err("it answers more than was asked"),
            Err(TrySendError::Closed(late)) => {
                self.give_back(late);
                Ok(())
            }
        }
    }

    /// Returns the blocks leased to, or slots reserved for, a call that has ended. If the queue is full, deadlines have the same effect.
    fn give_back(&self, reply: FromPool) {
        let message = match reply {
            FromPool::Found { lease, .. } => ToPool::Release { lease },
            FromPool::PutStarted { answers, .. } => {
                let slot = |answer| if let Reservation::Write(at) = answer { Some(at) } else { None };
                ToPool::PutRevoke { blocks: answers.into_iter().filter_map(slot).collect() }
            }
            FromPool::RailsOpened { rails, .. } => {
                let pairs = rails.into_iter().flatten().map(|rail| ToPool::CloseRail { pair: rail.end.pair });
                if let Some(outgoing) = self.outgoing.upgrade() {
                    pairs.for_each(|close| drop(outgoing.try_send(close)));
                }
                return;
            }
            _ => return,
        };
        if let Some(outgoing) = self.outgoing.upgrade() {
            let _ = outgoing.try_send(message);
        }
    }

    fn blocks_of(&self, call: CallId) -> Option<mpsc::Sender<StreamedBlock>> {
        self.open.lock().as_ref()?.calls.get(&call).map(|inbox| inbox.blocks.clone())
    }
}

impl Call {
    pub(super) fn id(&self) -> CallId {
        self.id
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(open) = &mut *self.calls.open.lock() {
            open.calls.remove(&self.id);
        }
        while let Ok(late) = self.replies.try_recv() {
            self.calls.give_back(late);
        }
    }
}

/// Carries messages both ways until the client is dropped or the connection breaks; then ends all calls.
pub(super) async fn pump(
    connection: Connection,
    sender: Sender<ToPool>,
    receiver: Receiver<FromPool>,
    outgoing: mpsc::Receiver<ToPool>,
    calls: Arc<Calls>,
    rails: Option<Arc<Rails>>,
    block_bytes: usize,
) {
    let reason = tokio::select! {
        reason = write(sender, outgoing) => reason,
        reason = read(receiver, &calls, rails.as_deref()) => reason,
        reason = take_streams(&connection, &calls, block_bytes) => reason,
    };
    tracing::debug!(node = %connection.peer(), reason, "pool connection ended");
    calls.close();
    connection.close(&reason);
    if let Some(rails) = rails {
        rails.close("the connection ended");
    }
}

async fn write(mut sender: Sender<ToPool>, mut outgoing: mpsc::Receiver<ToPool>) -> String {
    while let Some(message) = outgoing.recv().await {
        if let Err(error) = sender.send(&message).await {
            return error.to_string();
        }
    }
    "client ends".into()
}

async fn read(mut receiver: Receiver<FromPool>, calls: &Calls, rails: Option<&Rails>) -> String {
    loop {
        match receiver.recv().await {
            Ok(Some(FromPool::RailsClosed)) => {
                if let Some(rails) = rails {
                    rails.close("the node has closed it");
                }
            }
            Ok(Some(reply)) => {
                if let Err(reason) = calls.deliver(reply) {
                    return reason.into();
                }
            }
            Ok(None) => return "node ends".into(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Serves the streams that the node opens; QUIC's own limit bounds their number.
async fn take_streams(connection: &Connection, calls: &Arc<Calls>, block_bytes: usize) -> String {
    let mut streams = JoinSet::new();
    loop {
        match connection.accept_uni().await {
            Ok(stream) => drop(streams.spawn(take_blocks(stream, connection.clone(), Arc::clone(calls), block_bytes))),
            Err(error) => return error.to_string(),
        }
        while streams.try_join_next().is_some() {}
    }
}

async fn take_blocks(mut stream: quinn::RecvStream, connection: Connection, calls: Arc<Calls>, block_bytes: usize) {
    match pass_on_blocks(&mut stream, &connection, &calls, block_bytes).await {
        // The call notices missing blocks by itself.
        Ok(()) | Err(StreamError::GivenUp | StreamError::Stalled) => {}
        Err(StreamError::Malformed(error)) => connection.close(&error.to_string()),
    }
}

async fn pass_on_blocks(
    stream: &mut quinn::RecvStream,
    connection: &Connection,
    calls: &Calls,
    block_bytes: usize,
) -> Result<(), StreamError> {
    quic::check_preamble(connection, stream).await?;
    loop {
        let started = Instant::now();
        let Some((header, received)) = quic::receive_get(stream, block_bytes).await? else { return Ok(()) };
        let block = StreamedBlock { found: header.block, received, took: started.elapsed() };
        let delivered = match calls.blocks_of(header.call) {
            Some(blocks) => blocks.send(block).await.is_ok(),
            None => false,
        };
        if !delivered {
            // The call was cancelled: the node need not send the rest. This fails only on a stream that has ended.
            let _ = stream.stop(0u32.into());
            return Ok(());
        }
    }
}
