//! How block bytes move. A transport is one file; which one a client uses is decided once, when it connects.
//!
//! - `shm`: the client copies to and from the mapped arena of a node on the same host
//! - `quic`: bytes follow headers on one-way streams; works everywhere
//!
//! RDMA would be `rdma.rs`: like `shm` it works on slots ([`Via::Slots`]), with RDMA WRITE and READ in place of the copies,
//! and is one more variant of `DataPath`. The node sees only how a client wants its bytes ([`Via`]).

pub(crate) mod quic;
pub(crate) mod shm;

use bytes::Bytes;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_net::link::{Connection, LinkError};
use tidemill_proto::pool::{CallId, SlotRef, Via, Written};

/// A peer that lets a transfer stand still for this long has broken it off.
pub(crate) const STALL_MAX: Duration = Duration::from_secs(10);

/// What carried a block's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    Shm,
    Quic,
}

/// A client's way to a node's bytes.
#[derive(Debug)]
pub(crate) enum DataPath {
    Shm(Arc<shm::SharedArena>),
    Quic,
}

/// What a path did with the blocks of a put.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// They are in their slots: the node must be told.
    InSlots(Vec<Written>),
    /// They were sent on streams: the node answers each stream.
    Sent,
}

impl DataPath {
    pub(crate) fn transport(&self) -> Transport {
        match self {
            DataPath::Shm(_) => Transport::Shm,
            DataPath::Quic => Transport::Quic,
        }
    }

    pub(crate) fn via(&self) -> Via {
        match self {
            DataPath::Shm(_) => Via::Slots,
            DataPath::Quic => Via::Streams,
        }
    }

    /// Moves blocks into slots reserved for `call`. Touches no slot after `until`, when it may be another's; nor after the last
    /// clone of `reserved` is dropped, also when this is cancelled.
    pub(crate) async fn write(
        &self,
        connection: &Connection,
        call: CallId,
        blocks: Vec<(SlotRef, Bytes)>,
        until: Instant,
        reserved: impl Clone + Send + 'static,
    ) -> Result<Delivery, LinkError> {
        match self {
            DataPath::Shm(arena) => Ok(Delivery::InSlots(arena.write(blocks, until, reserved).await)),
            DataPath::Quic => quic::send_put(connection, call, blocks, until).await.map(|()| Delivery::Sent),
        }
    }
}

/// Splits a batch into neighbouring parts of about equal size, at most so many.
pub(crate) fn shares<T>(batch: Vec<T>, parts: usize) -> Vec<Vec<T>> {
    let share = batch.len().div_ceil(parts);
    let mut batch = batch.into_iter();
    std::iter::from_fn(|| Some(batch.by_ref().take(share).collect::<Vec<_>>()).filter(|share| !share.is_empty())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_batch_in_order() {
        for (n, parts) in (0..20).flat_map(|n| [(n, 1), (n, 4)]) {
            let shares = shares((0..n).collect::<Vec<_>>(), parts);
            assert!(shares.len() <= parts && shares.iter().all(|share| !share.is_empty()));
            assert_eq!(shares.concat(), (0..n).collect::<Vec<_>>());
        }
    }
}
