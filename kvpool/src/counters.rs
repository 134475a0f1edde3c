//! What a process moved to and from the pool, and what it missed.

use crate::{client::Miss, transport::Transport};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tidemill_proto::message::{Misses, Moved, Transfer};

/// Shared by all pool connections of a process; read once per heartbeat.
#[derive(Debug, Default)]
pub struct TransferCounters {
    shm_put: Lane,
    shm_get: Lane,
    quic_put: Lane,
    quic_get: Lane,
    absent: AtomicU64,
    stale: AtomicU64,
    corrupt: AtomicU64,
    unreachable: AtomicU64,
}

/// One direction of one transport.
#[derive(Debug, Default)]
struct Lane {
    bytes: AtomicU64,
    transfers: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Lane {
    fn moved(&self, bytes: usize, took: Duration) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.transfers.fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Relaxed);
    }

    fn snapshot(&self) -> Moved {
        Moved {
            bytes: self.bytes.load(Relaxed),
            transfers: self.transfers.load(Relaxed),
            seconds: Duration::from_nanos(self.nanoseconds.load(Relaxed)).as_secs_f64(),
        }
    }
}

impl TransferCounters {
    pub(crate) fn put(&self, transport: Transport, bytes: usize, took: Duration) {
        match transport {
            Transport::Shm => self.shm_put.moved(bytes, took),
            Transport::Quic => self.quic_put.moved(bytes, took),
        }
    }

    pub(crate) fn got(&self, transport: Transport, bytes: usize, took: Duration) {
        match transport {
            Transport::Shm => self.shm_get.moved(bytes, took),
            Transport::Quic => self.quic_get.moved(bytes, took),
        }
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

    /// The counts so far, as reports carry them.
    pub fn snapshot(&self) -> (Transfer, Misses) {
        let transfer = Transfer {
            shm_put: self.shm_put.snapshot(),
            shm_get: self.shm_get.snapshot(),
            quic_put: self.quic_put.snapshot(),
            quic_get: self.quic_get.snapshot(),
        };
        let misses = Misses {
            absent: self.absent.load(Relaxed),
            stale: self.stale.load(Relaxed),
            corrupt: self.corrupt.load(Relaxed),
            unreachable: self.unreachable.load(Relaxed),
        };
        (transfer, misses)
    }
}
