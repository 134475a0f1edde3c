//! The node's end of the streams that carry one client's blocks.

use super::store::StreamJob;
use crate::{
    core::directory::ClientId,
    node::store::Store,
    transport::{
        STALL_MAX,
        quic::{self, STREAMS_PER_BATCH, StreamError},
        shares,
    },
};
use quinn::RecvStream;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use tidemill_net::link::Connection;
use tidemill_proto::{
    frame::Preamble,
    pool::{CallId, Found, FromPool, LeaseId, Written},
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::timeout,
};

/// One client's streams.
#[derive(Clone, Debug)]
pub(super) struct Streams {
    pub(super) store: Arc<Store>,
    pub(super) client: ClientId,
    pub(super) connection: Connection,
    pub(super) messages: mpsc::Sender<FromPool>,
}

/// The most streams to one client at once. Below QUIC's limit, so that opening one never waits long.
const SENDING_MAX: usize = 32;

/// The lease of a job's blocks, released when the last share of the job has been copied from its slots.
struct JobLease {
    store: Arc<Store>,
    client: ClientId,
    lease: LeaseId,
}

impl Drop for JobLease {
    fn drop(&mut self) {
        self.store.apply(|directory, _| directory.release(self.client, self.lease));
    }
}

impl Streams {
    /// Sends the blocks of jobs until the queue is closed, or the client breaks the protocol.
    pub(super) async fn send_all(&self, mut jobs: mpsc::Receiver<StreamJob>) -> String {
        let permits = Arc::new(Semaphore::new(SENDING_MAX));
        let mut sending = JoinSet::new();
        while let Some(StreamJob { call, lease, blocks }) = jobs.recv().await {
            let lease = Arc::new(JobLease { store: Arc::clone(&self.store), client: self.client, lease });
            for share in shares(blocks, STREAMS_PER_BATCH) {
                let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
                let (streams, lease) = (self.clone(), Arc::clone(&lease));
                sending.spawn(async move {
                    // A client that gave up or stalls gets no more of this share; its get has a deadline of its own.
                    let _ = streams.send(call, share, lease).await;
                    drop(permit);
                });
            }
            while sending.try_join_next().is_some() {}
        }
        "node ends".into()
    }

    async fn send(&self, call: CallId, blocks: Vec<Found>, lease: Arc<JobLease>) -> Result<(), StreamError> {
        let opened = timeout(STALL_MAX, self.connection.open_uni(Preamble::PoolData)).await;
        let mut stream = opened.map_err(|_| StreamError::Stalled)?.map_err(|_| StreamError::GivenUp)?;
        for block in blocks {
            quic::send_block(&mut stream, call, block, self.store.arena()).await?;
            self.store.traffic.get_bytes.fetch_add(self.store.arena().block_bytes() as u64, Relaxed);
        }
        drop(lease);
        stream.finish().map_err(|_| StreamError::GivenUp)
    }

    /// Serves the streams that the client opens, until the connection ends or the client breaks the protocol.
    pub(super) async fn receive_all(&self) -> String {
        let mut receiving = JoinSet::new();
        loop {
            // QUIC limits the number of open streams.
            match self.connection.accept_uni().await {
                Ok(stream) => {
                    let streams = self.clone();
                    receiving.spawn(async move {
                        if let Err(StreamError::Malformed(error)) = streams.receive(stream).await {
                            streams.connection.close(&error.to_string());
                        }
                    });
                }
                Err(error) => return error.to_string(),
            }
            while receiving.try_join_next().is_some() {}
        }
    }

    /// Receives the blocks of one stream, and answers for all of them at its end.
    async fn receive(&self, mut stream: RecvStream) -> Result<(), StreamError> {
        quic::check_preamble(&self.connection, &mut stream).await?;
        let mut answer = None;
        while let Some(header) = quic::receive_put_header(&mut stream).await? {
            let stored = self.receive_block(&mut stream, header.block).await?;
            let (_, published, refused) = answer.get_or_insert((header.call, 0, 0));
            *(if stored { published } else { refused }) += 1;
        }
        if let Some((call, published, refused)) = answer {
            // This fails only if the session has ended.
            let _ = self.messages.send(FromPool::PutEnded { call, published, refused }).await;
        }
        Ok(())
    }

    /// Receives one block. Returns whether it was published.
    async fn receive_block(&self, stream: &mut RecvStream, block: Written) -> Result<bool, StreamError> {
        let (arena, at) = (self.store.arena(), block.at);
        let Some(until) = self.store.apply(|directory, now| directory.receive_start(self.client, at, now)) else {
            quic::skip_block(stream, arena.block_bytes()).await?;
            return Ok(false);
        };
        let received = quic::receive_into(stream, arena, at.slot, self.store.instant(until)).await;
        if !matches!(received, Ok(checksum) if checksum == block.checksum) {
            self.store.apply(|directory, now| directory.receive_failed(self.client, at, now));
        }
        if received? != block.checksum {
            tracing::warn!(client = %self.connection.peer(), "sent a block that does not match its checksum");
            return Ok(false);
        }
        self.store.traffic.put_bytes.fetch_add(arena.block_bytes() as u64, Relaxed);
        Ok(self.store.apply(|directory, now| directory.put_end(self.client, &[block], now)) == 1)
    }
}
