//! Connections between processes, and their failures.
//!
//! A connection is two ordered streams of messages, and the blocks that are sent beside them, as in QUIC: a message that is lost in transit
//! arrives later, and so do all messages after it. So an open connection never drops, duplicates or reorders messages. Instead, it can end,
//! with everything in transit:
//!
//! - a process that ends or crashes closes its connections; the other end notices at once if the path is open (production has a TCP
//!   connection beside each for that);
//! - an end that receives nothing for [`IDLE_MAX`] closes: the other end is paused or cut off, or its host is gone.

use super::{Event, Packet, Process};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// The number of a connection. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ConnId(pub(crate) usize);

/// The end that connected.
pub(crate) const CLIENT: usize = 0;
/// The end that accepted.
pub(crate) const SERVER: usize = 1;

/// The longest silence on a connection, as in production.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(5);
/// The longest time that connecting may take, as in production.
pub(crate) const CONNECT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) ends: [End; 2],
}

/// An end of a connection, and the messages in transit to it.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) process: Process,
    pub(crate) incarnation: u32,
    pub(crate) open: bool,
    /// The number of the next message sent to this end.
    pub(crate) sent: u64,
    /// The number of the next message delivered to this end.
    pub(crate) taken: u64,
    /// Messages that have arrived out of order, or that cannot be delivered yet.
    pub(crate) held: BTreeMap<u64, Packet>,
    /// Blocks that cannot be delivered yet.
    pub(crate) stalled: Vec<Event>,
    /// The time since which this end has received nothing.
    pub(crate) silent: Option<Duration>,
}

#[derive(Debug, Default)]
pub(crate) struct Network {
    pub(crate) connections: Vec<Connection>,
    /// The broken paths: nothing gets through from the first process to the second.
    pub(crate) cuts: BTreeSet<(Process, Process)>,
}

impl Network {
    pub(crate) fn connect(&mut self, client: (Process, u32), server: Process) -> ConnId {
        let end = |(process, incarnation), open| End {
            process,
            incarnation,
            open,
            sent: 0,
            taken: 0,
            held: BTreeMap::new(),
            stalled: Vec::new(),
            silent: None,
        };
        self.connections.push(Connection { ends: [end(client, true), end((server, u32::MAX), false)] });
        ConnId(self.connections.len() - 1)
    }

    pub(crate) fn end(&self, conn: ConnId, end: usize) -> &End {
        &self.connections[conn.0].ends[end]
    }

    pub(crate) fn end_mut(&mut self, conn: ConnId, end: usize) -> &mut End {
        &mut self.connections[conn.0].ends[end]
    }

    /// Whether the path to this end is broken.
    pub(crate) fn is_cut(&self, conn: ConnId, to: usize) -> bool {
        let ends = &self.connections[conn.0].ends;
        !self.cuts.is_empty() && self.cuts.contains(&(ends[1 - to].process, ends[to].process))
    }

    /// Takes the next message that can be delivered to this end.
    pub(crate) fn next(&mut self, conn: ConnId, to: usize) -> Option<Packet> {
        if self.is_cut(conn, to) {
            return None;
        }
        let end = self.end_mut(conn, to);
        let packet = end.held.remove(&end.taken)?;
        end.taken += 1;
        Some(packet)
    }

    /// The open ends of a process's connections.
    pub(crate) fn open_ends(&self, process: Process) -> Vec<(ConnId, usize)> {
        let ends = self.connections.iter().enumerate().flat_map(|(number, conn)| [(number, CLIENT), (number, SERVER)].map(|at| (at, conn)));
        let open = ends.filter(|((_, end), conn)| conn.ends[*end].open && conn.ends[*end].process == process);
        open.map(|((number, end), _)| (ConnId(number), end)).collect()
    }
}
