//! The ways in which block bytes move. A transport is one file and one row of `TRANSPORTS`; a client opens those that it may use when it
//! connects, and uses the cheapest one that works whenever it moves a block.
//!
//! - `shm`: the client copies to and from the mapped arena of a node on the same host
//! - [`rdma`]: the client's devices read and write the arena of a node on the same fabric
//! - `quic`: bytes follow headers on one-way streams; works everywhere
//!
//! The node only distinguishes clients that reach slots themselves from those that want streams ([`Via`]).

pub(crate) mod quic;
pub mod rdma;
mod shm;

use crate::{
    arena::{Arena, ArenaError, pin::Pin},
    client::TransferCounters,
    core::validate::Copied,
};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use rdma::{Nics, client::Rails};
use std::{fmt, future::ready, net::SocketAddr, sync::Arc, time::Duration};
use tidemill_proto::pool::{ArenaInfo, ToPool, Transport, Via};
use tokio::sync::mpsc;

/// The longest time for which a transfer may stand still; then it counts as broken off by the peer.
pub(crate) const STALL_MAX: Duration = Duration::from_secs(10);

/// All transports, each with the function that opens it; the cheapest first.
const TRANSPORTS: [(Transport, Open); Transport::ALL.len()] =
    [(Transport::Shm, shm::open), (Transport::Rdma, rdma::client::open), (Transport::Quic, quic::open)];

type Open = fn(&Offer<'_>) -> Result<Access, ArenaError>;

/// The arguments with which a client opens a transport.
pub(crate) struct Offer<'a> {
    pub(crate) arena: &'a ArenaInfo,
    pub(crate) nics: Option<&'a Arc<Nics>>,
    /// The device that copies from mapped slots by itself, if any.
    pub(crate) device: Option<&'a Arc<dyn Pin>>,
    /// The control stream, for a transport that has messages to send.
    pub(crate) control: mpsc::WeakSender<ToPool>,
    pub(crate) counters: &'a Arc<TransferCounters>,
}

/// The error of a transfer whose transport is gone. Some of the bytes may have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Broken;

/// A node's slots, accessed by a client directly. The caller checks sizes and slot numbers.
pub(crate) trait Slots: fmt::Debug + Send + Sync {
    fn transport(&self) -> Transport;

    /// Whether slots can be reached now.
    fn usable(&self) -> bool {
        true
    }

    /// The rails that must be opened by negotiation with the node, if this transport has any.
    fn rails(&self) -> Option<&Arc<Rails>> {
        None
    }

    /// Resolves when a write is not likely to wait.
    fn room(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }

    /// The slots in this process's memory, if they are mapped.
    fn mapped(&self) -> Option<&Arena> {
        None
    }

    /// Fills a slot, or begins to. `bytes` can be reused when this returns.
    fn write(&self, slot: u32, bytes: &[u8]) -> Result<Filled, Broken>;

    /// Submits the writes that have been queued.
    fn flush(&self) {}

    /// Copies a slot's block. The copy must be validated.
    fn read(&self, slot: u32, to: &mut [u8]) -> Result<Copied, Broken>;
}

/// A slot that is filled or being filled.
#[derive(Debug)]
pub(crate) struct Filled {
    /// The checksum of the block.
    pub(crate) checksum: u64,
    /// The completion of the write; `None` if the bytes are in place.
    pub(crate) landing: Option<Landing>,
}

/// The completion of a block's write, after [`Slots::flush`]. Its error returns the bytes: they cannot be written this way, and nothing
/// writes the slot any more.
pub(crate) struct Landing(pub(crate) BoxFuture<'static, Result<(), Bytes>>);

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Landing")
    }
}

/// A client's access to a node's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    Slots(Arc<dyn Slots>),
    Streams,
}

impl Access {
    fn usable(&self) -> bool {
        match self {
            Access::Slots(slots) => slots.usable(),
            Access::Streams => true,
        }
    }

    pub(crate) fn transport(&self) -> Transport {
        match self {
            Access::Slots(slots) => slots.transport(),
            Access::Streams => Transport::Quic,
        }
    }

    pub(crate) fn via(&self) -> Via {
        match self {
            Access::Slots(_) => Via::Slots,
            Access::Streams => Via::Streams,
        }
    }
}

/// A client's transports to a node's bytes.
#[derive(Debug)]
pub(crate) struct DataPath {
    /// The open transports, the cheapest first. The last one is always usable.
    ways: Vec<Access>,
}

impl DataPath {
    /// Opens transports that may be used, up to the first that is usable now. `None` if no transport is usable.
    pub(crate) fn open(addr: SocketAddr, offer: &Offer<'_>, allowed: impl Fn(Transport) -> bool) -> Option<Self> {
        let mut ways: Vec<Access> = Vec::new();
        for (transport, open) in TRANSPORTS.into_iter().filter(|(transport, _)| allowed(*transport)) {
            match open(offer) {
                Ok(way) => ways.push(way),
                Err(error) => tracing::info!(%addr, %error, transport = transport.name(), "transport not usable"),
            }
            if ways.last().is_some_and(Access::usable) {
                return Some(Self { ways });
            }
        }
        None
    }

    /// The cheapest transport that is usable now.
    pub(crate) fn now(&self) -> &Access {
        let (last, others) = self.ways.split_last().expect("there is a way");
        others.iter().find(|way| way.usable()).unwrap_or(last)
    }

    pub(crate) fn rails(&self) -> Option<&Arc<Rails>> {
        self.ways.iter().find_map(|way| if let Access::Slots(slots) = way { slots.rails() } else { None })
    }
}

/// Splits a batch into at most `parts` consecutive parts of about equal size.
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

    #[test]
    fn every_transport_has_its_row() {
        assert_eq!(TRANSPORTS.map(|(transport, _)| transport), Transport::ALL);
    }
}
