//! Events, and the process that each needs.

use super::{
    WorkerIndex,
    bytes::Bytes,
    disk::DiskJob,
    io::{Io, Packet, Received},
    network::{CLIENT, ConnId, SERVER},
    process::Process,
};
use crate::{flows::Deadline, random::mix};
use std::time::Duration;
use tidemill_proto::pool::{CallId, Found, LeaseId, Via, Written};

/// An event at one moment.
#[derive(Debug)]
pub(crate) enum Event {
    /// A client sends its request.
    Arrive(usize),
    /// A client leaves.
    Leave(usize),
    /// A client reads the data that arrived.
    Read(usize),
    /// A message arrives at an end of a connection.
    Packet {
        conn: ConnId,
        to: usize,
        number: u64,
        packet: Packet,
    },
    /// Streams of a put begin to arrive.
    Header {
        conn: ConnId,
        put: Transfer,
    },
    /// Blocks of a get have arrived on streams.
    Blocks {
        conn: ConnId,
        call: CallId,
        blocks: Vec<Received>,
        started: Duration,
    },
    Handshake {
        conn: ConnId,
        until: Duration,
    },
    Connected {
        conn: ConnId,
        established: bool,
    },
    /// An end learns that the other one is gone.
    Ended {
        conn: ConnId,
        at: usize,
    },
    /// An end has heard nothing for so long that the connection counts as lost, unless a message arrives in between.
    Silence {
        conn: ConnId,
        at: usize,
        since: Duration,
    },
    /// Messages that were held up can be delivered again.
    Resumed {
        conn: ConnId,
        to: usize,
    },
    TransferDue(Deadline),
    Transferred(Transfer),
    Timer {
        process: Process,
        incarnation: u32,
        timer: Timer,
    },
    Sample,
    /// A worker that was started by autoscaling runs.
    Started(WorkerIndex),
    /// A supervisor starts a head whose group has ended, unless it runs.
    Supervised(WorkerIndex),
    /// A fault of the plan happens, or is repaired.
    Trouble(usize),
}

/// The reason for which a process has waited.
#[derive(Debug)]
pub(crate) enum Timer {
    /// A device's step is done.
    Step,
    Heartbeat,
    /// A periodic tick in a coordinator or pool node.
    Tick,
    /// Another attempt to connect to a coordinator.
    Connect(usize),
    /// Another attempt to connect to a stage.
    Meet(usize),
    /// A stage's step for the head at this connection is done.
    Stage(ConnId),
    /// A call's deadline.
    CallDue(CallId),
    Disk(DiskJob),
    /// The turn of another model's clients in a pool node.
    OtherLayout,
    /// The end of a process that has handed its work over.
    Exit,
}

/// Blocks on their way between a worker and a pool node.
#[derive(Debug)]
pub(crate) enum Transfer {
    /// A get, with the bytes that were in the slots when the copy began.
    Get {
        conn: ConnId,
        arena: usize,
        call: CallId,
        lease: LeaseId,
        blocks: Vec<(Found, Bytes)>,
        via: Via,
        started: Duration,
    },
    Put {
        conn: ConnId,
        arena: usize,
        call: CallId,
        blocks: Vec<(Written, Bytes)>,
        via: Via,
    },
}

impl Transfer {
    pub(crate) fn connection(&self) -> ConnId {
        match *self {
            Transfer::Get { conn, .. } | Transfer::Put { conn, .. } => conn,
        }
    }

    /// The end that acts when the transfer is over: the one that copies by itself, or the one that has the slots.
    pub(crate) fn end(&self) -> usize {
        match self {
            Transfer::Get { via: Via::Slots, .. } | Transfer::Put { via: Via::Slots, .. } => CLIENT,
            Transfer::Get { via: Via::Streams, .. } | Transfer::Put { via: Via::Streams, .. } => SERVER,
        }
    }
}

impl Event {
    /// The process that must be alive for the event, and its incarnation. `None` if the world itself handles it.
    pub(crate) fn process(&self, io: &Io) -> Option<(Process, u32)> {
        let at = |conn: ConnId, end: usize| {
            let end = io.network.end(conn, end);
            Some((end.process, end.incarnation))
        };
        match self {
            Event::Packet { conn, to, .. } | Event::Resumed { conn, to } => at(*conn, *to),
            Event::Ended { conn, at: end } | Event::Silence { conn, at: end, .. } => at(*conn, *end),
            Event::Header { conn, .. } => at(*conn, SERVER),
            Event::Blocks { conn, .. } | Event::Connected { conn, .. } => at(*conn, CLIENT),
            Event::Transferred(transfer) => at(transfer.connection(), transfer.end()),
            Event::Timer { process, incarnation, .. } => Some((*process, *incarnation)),
            Event::Arrive(_)
            | Event::Leave(_)
            | Event::Read(_)
            | Event::Handshake { .. }
            | Event::TransferDue(_)
            | Event::Sample
            | Event::Started(_)
            | Event::Supervised(_)
            | Event::Trouble(_) => None,
        }
    }

    /// A hash of enough of the event to distinguish two runs.
    pub(crate) fn fingerprint(&self) -> u64 {
        let of = |kind: u64, a: usize, b: u64| mix(kind ^ (a as u64) << 8 ^ b << 32);
        match self {
            Event::Arrive(number) => of(1, *number, 0),
            Event::Leave(number) => of(2, *number, 0),
            Event::Read(number) => of(3, *number, 0),
            Event::Packet { conn, number, packet, .. } => of(4, conn.0, mix(*number) ^ packet.fingerprint()),
            Event::Header { conn, .. } => of(5, conn.0, 0),
            Event::Blocks { conn, .. } => of(6, conn.0, 0),
            Event::Handshake { conn, .. } => of(7, conn.0, 0),
            Event::Connected { conn, established } => of(8, conn.0, u64::from(*established)),
            Event::Ended { conn, at } => of(9, conn.0, *at as u64),
            Event::TransferDue(deadline) => of(10, 0, u64::from(deadline.version)),
            Event::Silence { conn, at, .. } => of(11, conn.0, *at as u64),
            Event::Resumed { conn, to } => of(12, conn.0, *to as u64),
            Event::Transferred(transfer) => of(13, transfer.connection().0, 0),
            Event::Timer { incarnation, .. } => of(14, *incarnation as usize, 0),
            Event::Sample => 16,
            Event::Started(worker) => of(18, worker.0, 0),
            Event::Supervised(worker) => of(19, worker.0, 0),
            Event::Trouble(number) => of(17, *number, 0),
        }
    }
}
