//! What a process moved to and from the pool, and what it missed.

use crate::{client::Miss, transport::Transport};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tidemill_proto::message::{Misses, Transfer};

/// Shared by all pool connections of a process; read once per heartbeat.
#[derive(Debug, Default)]
pub struct TransferCounters {
    shm_put_bytes: AtomicU64,
    shm_get_bytes: AtomicU64,
    quic_put_bytes: AtomicU64,
    quic_get_bytes: AtomicU64,
    nanoseconds: AtomicU64,
    absent: AtomicU64,
    stale: AtomicU64,
    corrupt: AtomicU64,
    unreachable: AtomicU64,
}

impl TransferCounters {
    pub(crate) fn put(&self, transport: Transport, bytes: usize, took: Duration) {
        let counter = match transport {
            Transport::Shm => &self.shm_put_bytes,
            Transport::Quic => &self.quic_put_bytes,
        };
        self.moved(counter, bytes, took);
    }

    pub(crate) fn got(&self, transport: Transport, bytes: usize, took: Duration) {
        let counter = match transport {
            Transport::Shm => &self.shm_get_bytes,
            Transport::Quic => &self.quic_get_bytes,
        };
        self.moved(counter, bytes, took);
    }

    fn moved(&self, counter: &AtomicU64, bytes: usize, took: Duration) {
        counter.fetch_add(bytes as u64, Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Relaxed);
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
            shm_put_bytes: self.shm_put_bytes.load(Relaxed),
            shm_get_bytes: self.shm_get_bytes.load(Relaxed),
            quic_put_bytes: self.quic_put_bytes.load(Relaxed),
            quic_get_bytes: self.quic_get_bytes.load(Relaxed),
            seconds: Duration::from_nanos(self.nanoseconds.load(Relaxed)).as_secs_f64(),
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
