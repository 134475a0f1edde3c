//! Counters of the blocks that a process moved to and from the pool, and of those it missed.

use crate::client::Miss;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tidemill_proto::{
    message::{Fetched, Misses, Moved, Rails, Transfer},
    pool::{Direction, Transport},
};

/// Counters shared by all pool connections of a process; read once per heartbeat.
#[derive(Debug, Default)]
pub struct TransferCounters {
    lanes: [[Lane; Direction::ALL.len()]; Transport::ALL.len()],
    absent: AtomicU64,
    stale: AtomicU64,
    corrupt: AtomicU64,
    unreachable: AtomicU64,
    rails_opened: AtomicU64,
    rails_lost: AtomicU64,
    fetched_by_device: AtomicU64,
    fetched_by_host: AtomicU64,
}

/// The agent that copied a block's bytes to the memory where they are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Copier {
    /// A device, straight from the node's slot.
    Device,
    Host,
}

/// The counters of one direction of one transport, or of a disk.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    bytes: AtomicU64,
    transfers: AtomicU64,
    nanoseconds: AtomicU64,
    times: [AtomicU64; Moved::BOUNDS_S.len()],
}

impl Lane {
    pub(crate) fn moved(&self, bytes: usize, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(count) = self.times.get(Moved::BOUNDS_S.partition_point(|bound| *bound < seconds)) {
            count.fetch_add(1, Relaxed);
        }
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.transfers.fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Moved {
        Moved {
            times: self.times.each_ref().map(|count| count.load(Relaxed)),
            bytes: self.bytes.load(Relaxed),
            transfers: self.transfers.load(Relaxed),
            seconds: Duration::from_nanos(self.nanoseconds.load(Relaxed)).as_secs_f64(),
        }
    }
}

impl TransferCounters {
    pub(crate) fn moved(&self, transport: Transport, direction: Direction, bytes: usize, took: Duration) {
        self.lanes[transport as usize][direction as usize].moved(bytes, took);
    }

    pub(crate) fn miss(&self, miss: Miss, blocks: u64) {
        let counter = match miss {
            Miss::Absent => &self.absent,
            Miss::Stale => &self.stale,
            Miss::Corrupt => &self.corrupt,
            Miss::Unreachable => &self.unreachable,
        };
        counter.fetch_add(blocks, Relaxed);
    }

    pub(crate) fn fetched(&self, by: Copier, bytes: usize) {
        let counter = match by {
            Copier::Device => &self.fetched_by_device,
            Copier::Host => &self.fetched_by_host,
        };
        counter.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn rail_opened(&self) {
        self.rails_opened.fetch_add(1, Relaxed);
    }

    pub(crate) fn rail_lost(&self) {
        self.rails_lost.fetch_add(1, Relaxed);
    }

    /// Bytes of valid blocks so far, by copier.
    pub fn fetched_bytes(&self) -> Fetched {
        Fetched { by_device: self.fetched_by_device.load(Relaxed), by_host: self.fetched_by_host.load(Relaxed) }
    }

    /// RDMA rails opened and lost so far.
    pub fn rails(&self) -> Rails {
        Rails { opened: self.rails_opened.load(Relaxed), lost: self.rails_lost.load(Relaxed), fenced: 0 }
    }

    /// The counts so far, in the form of a report.
    pub fn snapshot(&self) -> (Transfer, Misses) {
        let transfer = Transfer(self.lanes.each_ref().map(|lanes| lanes.each_ref().map(Lane::snapshot)));
        let misses = Misses {
            absent: self.absent.load(Relaxed),
            stale: self.stale.load(Relaxed),
            corrupt: self.corrupt.load(Relaxed),
            unreachable: self.unreachable.load(Relaxed),
        };
        (transfer, misses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_counted_by_the_time_they_take() {
        let lane = Lane::default();
        for (bytes, us) in [(1, 0), (2, 10), (4, 11), (8, 25), (16, 60_000_000)] {
            lane.moved(bytes, Duration::from_micros(us));
        }
        let Moved { bytes, transfers, seconds, times } = lane.snapshot();
        assert_eq!((bytes, transfers), (31, 5));
        assert!((60.0..60.001).contains(&seconds), "{seconds}");
        assert_eq!((times[..2].to_vec(), times.iter().sum()), (vec![2, 2], 4), "the last one took longer than any bound");
    }
}
