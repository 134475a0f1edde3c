//! A process's links to the coordinators, a model of `tidemill_net::uplink`: connects, registers, and starts over when a link breaks.

use super::{
    CoordinatorIndex, Process, Timer,
    io::{Io, Packet},
    network::{CLIENT, ConnId, SERVER},
};
use crate::faults::mutation::Mutation;
use std::time::Duration;
use tidemill_proto::{
    ids::{Epoch, Instance, LinkId},
    message::{Register, Report, ToCoordinator, ToWorker, WorkerEvent},
};

pub(crate) struct Uplink {
    process: Process,
    register: Register,
    links: Vec<Link>,
    /// The reason for which a coordinator refused this process.
    pub(crate) refused: Option<String>,
    /// Whether the process is ending, so that broken links stay down.
    leaving: bool,
}

struct Link {
    id: LinkId,
    state: State,
    /// The last events sent, for a confused process that repeats them on its next link.
    last: Vec<(Epoch, WorkerEvent)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Down,
    Connecting(ConnId),
    Registering(ConnId),
    Up(ConnId, Epoch),
}

/// An event of the links for the process behind them.
pub(crate) enum Heard {
    Up(LinkId),
    Message(LinkId, Box<ToWorker>),
}

/// The wait before another attempt to connect, as in production.
const RETRY: Duration = Duration::from_millis(500);
/// The wait after a refusal, as in production.
const RETRY_REFUSED: Duration = Duration::from_secs(5);
/// The number of events that are remembered for each link.
const LAST_MAX: usize = 8;

impl Uplink {
    pub(crate) fn new(process: Process, register: Register, coordinators: usize) -> Self {
        let link = |coordinator| Link { id: LinkId { coordinator, session: 0 }, state: State::Down, last: Vec::new() };
        Self { process, register, links: (0..coordinators).map(link).collect(), refused: None, leaving: false }
    }

    pub(crate) fn start(&mut self, io: &mut Io) {
        (0..self.links.len()).for_each(|coordinator| self.connect(io, coordinator));
    }

    /// Connects to a coordinator, unless the link is up or being established.
    pub(crate) fn connect(&mut self, io: &mut Io, coordinator: usize) {
        let link = &mut self.links[coordinator];
        if link.state == State::Down && !self.leaving {
            link.state = State::Connecting(io.connect(self.process, Process::Coordinator(CoordinatorIndex(coordinator))));
        }
    }

    /// Whether a connection is one of these links.
    pub(crate) fn owns(&self, conn: ConnId) -> bool {
        self.find(conn).is_some()
    }

    pub(crate) fn connected(&mut self, io: &mut Io, conn: ConnId, established: bool) {
        let Some(coordinator) = self.find(conn) else { return };
        if !established {
            return self.down(io, coordinator, RETRY);
        }
        self.links[coordinator].state = State::Registering(conn);
        io.tell_coordinator(conn, ToCoordinator::Register { instance: Instance(conn.0 as u64), register: self.register.clone() });
    }

    pub(crate) fn heard(&mut self, io: &mut Io, conn: ConnId, message: Box<ToWorker>, report: impl FnOnce() -> Report) -> Option<Heard> {
        let coordinator = self.find(conn)?;
        let link = &mut self.links[coordinator];
        match (link.state, *message) {
            (State::Registering(_), ToWorker::Registered { epoch }) => {
                link.state = State::Up(conn, epoch);
                let id = link.id;
                io.note(|| format!("{} is registered with coordinator-{coordinator} as {epoch}", self.process));
                if io.faulty.is_some() {
                    self.send(io, id, WorkerEvent::Heartbeat(Box::new(report())));
                }
                Some(Heard::Up(id))
            }
            (State::Registering(_), ToWorker::Refused { reason }) => {
                self.refused = Some(reason);
                io.close(conn, CLIENT, false);
                self.down(io, coordinator, RETRY_REFUSED);
                None
            }
            (State::Up(..), message) => Some(Heard::Message(link.id, Box::new(message))),
            _ => None,
        }
    }

    /// Handles the end of a connection. Returns its link if that was up.
    pub(crate) fn ended(&mut self, io: &mut Io, conn: ConnId) -> Option<LinkId> {
        let coordinator = self.find(conn)?;
        let (id, was_up) = (self.links[coordinator].id, matches!(self.links[coordinator].state, State::Up(..)));
        self.down(io, coordinator, RETRY);
        if was_up {
            self.links[coordinator].id.session += 1;
        }
        was_up.then_some(id)
    }

    /// Sends an event, which is lost if that link is no longer up.
    pub(crate) fn send(&mut self, io: &mut Io, to: LinkId, event: WorkerEvent) {
        let Some(link) = self.links.get_mut(to.coordinator).filter(|link| link.id == to) else { return };
        let State::Up(conn, epoch) = link.state else { return };
        if io.faulty.is_some() && matches!(event, WorkerEvent::Tokens(_) | WorkerEvent::Finished { .. }) {
            link.last.push((epoch, event.clone()));
            let forgotten = link.last.len().saturating_sub(LAST_MAX);
            link.last.drain(..forgotten);
        }
        io.tell_coordinator(conn, ToCoordinator::Event { epoch, event });
    }

    pub(crate) fn broadcast(&mut self, io: &mut Io, event: &WorkerEvent) {
        for id in self.up().collect::<Vec<_>>() {
            self.send(io, id, event.clone());
        }
    }

    pub(crate) fn up(&self) -> impl Iterator<Item = LinkId> {
        self.links.iter().filter(|link| matches!(link.state, State::Up(..))).map(|link| link.id)
    }

    /// Closes all links cleanly, after the messages already sent.
    pub(crate) fn leave(&mut self, io: &mut Io) {
        self.leaving = true;
        for link in &self.links {
            if let State::Up(conn, _) = link.state {
                io.send(conn, SERVER, Packet::End);
            }
        }
    }

    /// Repeats an event of an earlier link on the current one, as a confused process would. Returns whether there was one.
    pub(crate) fn repeat_stale(&mut self, io: &mut Io) -> bool {
        for link in &self.links {
            let State::Up(conn, current) = link.state else { continue };
            if let Some((epoch, event)) = link.last.iter().rev().find(|(epoch, _)| *epoch != current) {
                io.tell_coordinator(conn, ToCoordinator::Event { epoch: *epoch, event: event.clone() });
                return true;
            }
        }
        false
    }

    fn find(&self, conn: ConnId) -> Option<usize> {
        self.links.iter().position(|link| match link.state {
            State::Connecting(at) | State::Registering(at) | State::Up(at, _) => at == conn,
            State::Down => false,
        })
    }

    fn down(&mut self, io: &mut Io, coordinator: usize, wait: Duration) {
        self.links[coordinator].state = State::Down;
        io.timer(self.process, wait, Timer::Connect(coordinator));
    }
}

/// Whether a worker is notified that its link is down: not if a planted bug prevents it.
pub(crate) fn tells_down(io: &Io) -> bool {
    !io.has(Mutation::ForgetLinkDown)
}
