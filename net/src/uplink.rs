//! A worker's link to each coordinator: connect, register, heartbeat, and start over when it breaks.
//!
//! ```text
//!   worker core ──send(link, event)──► bounded queue ─► writer ─┐          (one pair of tasks
//!        ▲                                 heartbeat timer ─────┴─► QUIC    per coordinator)
//!        └──────(link, LinkEvent)◄── bounded queue ◄── reader ◄───── QUIC
//! ```
//!
//! A coordinator that does not drain its queue loses the link; it never stalls the worker.

use crate::{
    identity::PeerRole,
    link::{CONNECT_MAX, Connection, Endpoint, LinkError, Receiver, Sender},
};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tidemill_proto::{
    frame::{Preamble, Version},
    ids::{Epoch, Instance, LinkId},
    message::{Register, Report, ToCoordinator, ToWorker, WorkerEvent},
};
use tokio::{sync::mpsc, time};

/// This release, as coordinators are told.
const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// The default interval of a worker's reports.
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// The time without a heartbeat after which a coordinator considers a worker dead.
pub const HEARTBEAT_DEAD: Duration = Duration::from_secs(5);
/// The pause between two attempts to reach a coordinator.
const RETRY: Duration = Duration::from_millis(500);
/// The pause between two attempts to register after a refusal: only an operator's change helps then.
const RETRY_REFUSED: Duration = Duration::from_secs(5);
/// The maximum number of events queued to one coordinator. A decode step is one event, so this covers minutes of stall.
const OUTGOING_MAX: usize = 4096;
/// The maximum number of unread messages from all coordinators together.
const INCOMING_MAX: usize = 4096;

/// An event on a link.
#[derive(Debug)]
pub enum LinkEvent {
    Up,
    Message(Box<ToWorker>),
    /// The link is down: all work that this coordinator asked for is void.
    Down,
}

/// Sends events to coordinators. When dropped, it sends the queued events and ends all links.
#[derive(Debug)]
pub struct Uplink {
    coordinators: Vec<mpsc::Sender<Outgoing>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// An event in the queue to one coordinator.
#[derive(Debug)]
struct Outgoing {
    /// The session that this event answers; it is void on any other. `None` if it is valid on every link.
    session: Option<u64>,
    event: WorkerEvent,
}

/// Produces the report of a heartbeat.
pub type Reporter = Arc<dyn Fn() -> Report + Send + Sync>;

impl Uplink {
    /// Connects to all `coordinators`, sends a report at each interval, and reconnects as long as the `Uplink` lives.
    pub fn start(
        endpoint: &Endpoint,
        coordinators: &[SocketAddr],
        register: Register,
        (every, report): (Duration, Reporter),
    ) -> (Self, mpsc::Receiver<(LinkId, LinkEvent)>) {
        let (incoming, events) = mpsc::channel(INCOMING_MAX);
        let instance = Instance(rand::random());
        let (mut queues, mut tasks) = (Vec::new(), Vec::new());
        for (coordinator, &addr) in coordinators.iter().enumerate() {
            let (send, outgoing) = mpsc::channel(OUTGOING_MAX);
            let id = LinkId { coordinator, session: 0 };
            let (endpoint, register, report) = (endpoint.clone(), register.clone(), Arc::clone(&report));
            let link = Link { id, addr, endpoint, instance, register, every, report };
            queues.push(send);
            tasks.push(tokio::spawn(link.run(outgoing, incoming.clone())));
        }
        (Self { coordinators: queues, tasks }, events)
    }

    /// Queues an event; it is lost if the link breaks first. Returns `false` if the coordinator's queue is full, in which case a `Down`
    /// follows.
    pub fn send(&self, link: LinkId, event: WorkerEvent) -> bool {
        self.coordinators[link.coordinator].try_send(Outgoing { session: Some(link.session), event }).is_ok()
    }

    /// Sends `event` to every coordinator.
    pub fn broadcast(&self, event: &WorkerEvent) {
        for queue in &self.coordinators {
            let _ = queue.try_send(Outgoing { session: None, event: event.clone() });
        }
    }

    /// Sends the queued events and ends the links, within a bound.
    pub async fn close(self) {
        drop(self.coordinators);
        for task in self.tasks {
            let abort = task.abort_handle();
            if time::timeout(Duration::from_secs(2), task).await.is_err() {
                abort.abort();
            }
        }
    }
}

struct Link {
    id: LinkId,
    addr: SocketAddr,
    endpoint: Endpoint,
    /// The same at all coordinators, for as long as this process lives.
    instance: Instance,
    register: Register,
    /// The interval of reports.
    every: Duration,
    report: Reporter,
}

type Streams = (Connection, Sender<ToCoordinator>, Receiver<ToWorker>);

impl Link {
    async fn run(mut self, mut outgoing: mpsc::Receiver<Outgoing>, incoming: mpsc::Sender<(LinkId, LinkEvent)>) {
        while !outgoing.is_closed() {
            let wait = match self.connect().await {
                Ok((streams, epoch)) => {
                    // Events queued while the link was down belong to an old epoch.
                    while outgoing.try_recv().is_ok() {}
                    tracing::info!(coordinator = %self.addr, %epoch, "registered");
                    if incoming.send((self.id, LinkEvent::Up)).await.is_err() {
                        return;
                    }
                    match self.serve(streams, epoch, &mut outgoing, &incoming).await {
                        Ok(reason) => tracing::info!(coordinator = %self.addr, reason, "link ended"),
                        Err(error) => tracing::warn!(coordinator = %self.addr, %error, "link lost"),
                    }
                    if incoming.send((self.id, LinkEvent::Down)).await.is_err() {
                        return;
                    }
                    self.id.session += 1;
                    RETRY
                }
                Err(Failure::Refused(reason)) => {
                    tracing::error!(coordinator = %self.addr, reason, "registration refused");
                    RETRY_REFUSED
                }
                Err(Failure::NotYet(reason)) => {
                    tracing::warn!(coordinator = %self.addr, reason, "not registered yet");
                    RETRY
                }
                Err(Failure::Link(error)) => {
                    tracing::debug!(coordinator = %self.addr, %error, "cannot register yet");
                    RETRY
                }
            };
            // Events queued meanwhile belong to a dead link; a closed queue ends the wait.
            let drained = time::timeout(wait, async { while outgoing.recv().await.is_some() {} });
            let _ = drained.await;
        }
    }

    async fn connect(&self) -> Result<(Streams, Epoch), Failure> {
        let connection = self.endpoint.connect(self.addr).await?;
        connection.expect(&[PeerRole::Coordinator])?;
        let (mut sender, mut receiver) = connection.open(Preamble::Control).await?;
        sender.send(&ToCoordinator::Register { instance: self.instance, register: self.register.clone() }).await?;
        let answer = time::timeout(CONNECT_MAX, receiver.recv()).await;
        let silent = || Failure::Link(LinkError::Broken { peer: self.addr, reason: "no answer to registration".into() });
        match answer.map_err(|_| silent())?? {
            Some(ToWorker::Registered { epoch }) => Ok(((connection, sender, receiver), epoch)),
            Some(ToWorker::Refused { reason }) => Err(Failure::Refused(reason)),
            Some(ToWorker::NotYet { reason }) => Err(Failure::NotYet(reason)),
            _ => Err(silent()),
        }
    }

    /// Pumps both directions until one breaks, or until an orderly end, and returns which one it was.
    async fn serve(
        &self,
        (connection, sender, receiver): Streams,
        epoch: Epoch,
        outgoing: &mut mpsc::Receiver<Outgoing>,
        incoming: &mpsc::Sender<(LinkId, LinkEvent)>,
    ) -> Result<&'static str, LinkError> {
        let ended = tokio::select! {
            ended = self.write(sender, (epoch, connection.version()), outgoing) => ended,
            ended = self.read(receiver, incoming) => ended,
        };
        connection.close(ended.as_ref().copied().unwrap_or("broken"));
        ended
    }

    async fn write(
        &self,
        mut sender: Sender<ToCoordinator>,
        (epoch, version): (Epoch, Version),
        outgoing: &mut mpsc::Receiver<Outgoing>,
    ) -> Result<&'static str, LinkError> {
        let mut heartbeat = time::interval(self.every);
        if version.has_release() {
            sender.send(&ToCoordinator::Event { epoch, event: WorkerEvent::Release(RELEASE.into()) }).await?;
        }
        loop {
            let event = tokio::select! {
                event = outgoing.recv() => match event {
                    Some(Outgoing { session, .. }) if session.is_some_and(|session| session != self.id.session) => continue,
                    Some(Outgoing { event, .. }) => event,
                    None => {
                        sender.finish().await;
                        return Ok("worker ends");
                    }
                },
                _ = heartbeat.tick() => WorkerEvent::Heartbeat(Box::new((self.report)())),
            };
            sender.send(&ToCoordinator::Event { epoch, event }).await?;
            if outgoing.len() >= OUTGOING_MAX - 1 {
                return Err(LinkError::Broken { peer: self.addr, reason: "coordinator does not keep up".into() });
            }
        }
    }

    async fn read(
        &self,
        mut receiver: Receiver<ToWorker>,
        incoming: &mpsc::Sender<(LinkId, LinkEvent)>,
    ) -> Result<&'static str, LinkError> {
        while let Some(message) = receiver.recv().await? {
            if let ToWorker::Denied { log, version, serials } = message {
                self.endpoint.deny(log, version, serials);
                continue;
            }
            if incoming.send((self.id, LinkEvent::Message(Box::new(message)))).await.is_err() {
                return Ok("worker ends");
            }
        }
        Ok("coordinator ends")
    }
}

enum Failure {
    Link(LinkError),
    Refused(String),
    NotYet(String),
}

impl From<LinkError> for Failure {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Version { .. } => Failure::Refused(error.to_string()),
            error => Failure::Link(error),
        }
    }
}
