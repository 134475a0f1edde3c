//! Connections between processes, and what cuts them.
//!
//! A connection is two ordered streams of messages and the blocks that travel beside them, as QUIC has it: a message that is lost on the way
//! is a message that comes later, and all after it do, too. So nothing is dropped, doubled or overtaken on a connection that stands. What
//! happens instead is that it ends, with all that is under way:
//!
//! - a process that ends or crashes closes its connections; the other end learns of it at once where the path is open (production has a TCP
//!   connection beside each for that);
//! - an end that hears nothing for [`IDLE_MAX`] closes: the other end is paused, cut off, or its host is gone.

use super::{Event, Packet, Process};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// One connection. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ConnId(pub(crate) usize);

/// The end that connected,
pub(crate) const CLIENT: usize = 0;
/// and the one that accepted.
pub(crate) const SERVER: usize = 1;

/// As production's: of links,
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(5);
/// and of the time that connecting takes.
pub(crate) const CONNECT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) ends: [End; 2],
}

/// An end, and what is under way to it.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) process: Process,
    pub(crate) incarnation: u32,
    pub(crate) open: bool,
    /// Numbers of the next message that is sent to it, and that it takes.
    pub(crate) sent: u64,
    pub(crate) taken: u64,
    /// Messages that came before those before them, or cannot come yet.
    pub(crate) held: BTreeMap<u64, Packet>,
    /// Blocks that cannot come yet.
    pub(crate) stalled: Vec<Event>,
    /// Since when it hears nothing.
    pub(crate) silent: Option<Duration>,
}

#[derive(Debug, Default)]
pub(crate) struct Network {
    pub(crate) connections: Vec<Connection>,
    /// Nothing comes through from the first to the second.
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

    /// Whether what is sent to this end cannot come through now.
    pub(crate) fn is_cut(&self, conn: ConnId, to: usize) -> bool {
        let ends = &self.connections[conn.0].ends;
        !self.cuts.is_empty() && self.cuts.contains(&(ends[1 - to].process, ends[to].process))
    }

    /// The next message that this end can take.
    pub(crate) fn next(&mut self, conn: ConnId, to: usize) -> Option<Packet> {
        if self.is_cut(conn, to) {
            return None;
        }
        let end = self.end_mut(conn, to);
        let packet = end.held.remove(&end.taken)?;
        end.taken += 1;
        Some(packet)
    }

    /// Ends of connections that a process has open.
    pub(crate) fn open_ends(&self, process: Process) -> Vec<(ConnId, usize)> {
        let ends = self.connections.iter().enumerate().flat_map(|(number, conn)| [(number, CLIENT), (number, SERVER)].map(|at| (at, conn)));
        let open = ends.filter(|((_, end), conn)| conn.ends[*end].open && conn.ends[*end].process == process);
        open.map(|((number, end), _)| (ConnId(number), end)).collect()
    }
}
