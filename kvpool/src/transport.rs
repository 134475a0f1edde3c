//! How block bytes move. A transport is one file and one row of `TRANSPORTS`; a client picks one when it connects.
//!
//! - `shm`: the client copies to and from the mapped arena of a node on the same host
//! - `quic`: bytes follow headers on one-way streams; works everywhere
//!
//! RDMA would be `rdma.rs`: another implementation of `Slots`, with RDMA WRITE and READ in place of the copies. The node sees
//! only whether a client reaches slots itself or wants streams ([`Via`]).

pub(crate) mod quic;
mod shm;

use crate::{arena::ArenaError, core::validate::Copied};
use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};
use tidemill_net::link::Connection;
use tidemill_proto::pool::{ArenaInfo, Transport, Via};

/// A peer that lets a transfer stand still for this long has broken it off.
pub(crate) const STALL_MAX: Duration = Duration::from_secs(10);

/// Every transport, and how it reaches a node. The first one that does is used.
const TRANSPORTS: [(Transport, Open); Transport::ALL.len()] = [(Transport::Shm, shm::open), (Transport::Quic, quic::open)];

type Open = fn(&Connection, &ArenaInfo) -> Result<Access, ArenaError>;

/// A node's slots, as a client reaches them itself. Sizes and slot numbers are checked by the caller.
pub(crate) trait Slots: fmt::Debug + Send + Sync {
    /// Fills a slot; returns the checksum of what was written.
    fn write(&self, slot: u32, bytes: &[u8]) -> u64;

    /// Copies a slot's block. The copy must be validated.
    fn read(&self, slot: u32, to: &mut [u8]) -> Copied;
}

/// How a client gets at a node's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    Slots(Arc<dyn Slots>),
    Streams(Connection),
}

/// A client's way to a node's bytes.
#[derive(Debug)]
pub(crate) struct DataPath {
    pub(crate) transport: Transport,
    pub(crate) access: Access,
}

impl DataPath {
    /// `near`: transports that work on one host only may be tried.
    pub(crate) fn open(addr: SocketAddr, connection: &Connection, arena: &ArenaInfo, near: bool) -> Option<Self> {
        TRANSPORTS.into_iter().filter(|(transport, _)| near || !transport.same_host()).find_map(|(transport, open)| {
            let access = open(connection, arena);
            let access = access.inspect_err(|error| tracing::info!(%addr, %error, transport = transport.name(), "transport not usable"));
            Some(Self { transport, access: access.ok()? })
        })
    }

    pub(crate) fn via(&self) -> Via {
        match self.access {
            Access::Slots(_) => Via::Slots,
            Access::Streams(_) => Via::Streams,
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

    #[test]
    fn every_transport_has_its_row() {
        assert_eq!(TRANSPORTS.map(|(transport, _)| transport), Transport::ALL);
    }
}
