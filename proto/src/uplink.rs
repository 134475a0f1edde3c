//! A worker's link to each coordinator: connect, register, heartbeat, and start over when it breaks.
//!
//! ```text
//!   worker core ──send(link, event)──► bounded queue ─► writer ─┐          (one pair of tasks
//!        ▲                                 heartbeat timer ─────┴─► QUIC    per coordinator)
//!        └──────(link, LinkEvent)◄── bounded queue ◄── reader ◄───── QUIC
//! ```
//!
//! A coordinator that does not drain its queue loses the link instead of stalling the worker.

use crate::{
    frame::Preamble,
    ids::{Epoch, LinkId},
    link::{CONNECT_MAX, Connection, Endpoint, LinkError, Receiver, Sender},
    message::{Register, Report, ToCoordinator, ToWorker, WorkerEvent},
};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{sync::mpsc, time};

/// How often a worker reports.
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// A worker that said nothing for this long is dead to its coordinator.
pub const HEARTBEAT_DEAD: Duration = Duration::from_secs(5);
/// Between two attempts to reach a coordinator.
const RETRY: Duration = Duration::from_millis(500);
/// Between two attempts to register with a coordinator that refuses: only an operator's change helps.
const RETRY_REFUSED: Duration = Duration::from_secs(5);
/// Events on their way to one coordinator. A decode step is one event, so this is minutes of stall.
const OUTGOING_MAX: usize = 4096;
/// Messages from all coordinators that the worker has not looked at.
const INCOMING_MAX: usize = 4096;

/// What happens on a link.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly every event is a message, and the queue of them is short")]
pub enum LinkEvent {
    Up,
    Message(ToWorker),
    /// Everything this coordinator asked for is void.
    Down,
}

/// Sends events to coordinators. Dropping it ends all links after what is queued has been sent.
#[derive(Debug)]
pub struct Uplink {
    links: Vec<mpsc::Sender<WorkerEvent>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// Produces the report of a heartbeat.
pub type Reporter = Arc<dyn Fn() -> Report + Send + Sync>;

impl Uplink {
    /// Starts to connect to all `coordinators`, for as long as the `Uplink` lives.
    pub fn start(
        endpoint: &Endpoint,
        coordinators: &[SocketAddr],
        register: Register,
        report: Reporter,
    ) -> (Self, mpsc::Receiver<(LinkId, LinkEvent)>) {
        let (incoming, events) = mpsc::channel(INCOMING_MAX);
        let (mut links, mut tasks) = (Vec::new(), Vec::new());
        for (index, &addr) in coordinators.iter().enumerate() {
            let (send, outgoing) = mpsc::channel(OUTGOING_MAX);
            let link =
                Link { id: LinkId(index), addr, endpoint: endpoint.clone(), register: register.clone(), report: Arc::clone(&report) };
            links.push(send);
            tasks.push(tokio::spawn(link.run(outgoing, incoming.clone())));
        }
        (Self { links, tasks }, events)
    }

    /// Queues an event. `false`: the coordinator's queue is full or its link has ended, and the event is lost; a
    /// `Down` follows.
    pub fn send(&self, link: LinkId, event: WorkerEvent) -> bool {
        self.links[link.0].try_send(event).is_ok()
    }

    /// Tells every coordinator.
    pub fn broadcast(&self, event: &WorkerEvent) {
        for link in &self.links {
            let _ = link.try_send(event.clone());
        }
    }

    /// Sends what is queued and ends the links (bounded).
    pub async fn close(self) {
        drop(self.links);
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
    register: Register,
    report: Reporter,
}

type Streams = (Connection, Sender<ToCoordinator>, Receiver<ToWorker>);

impl Link {
    async fn run(self, mut outgoing: mpsc::Receiver<WorkerEvent>, incoming: mpsc::Sender<(LinkId, LinkEvent)>) {
        while !outgoing.is_closed() {
            let wait = match self.connect().await {
                Ok((streams, epoch)) => {
                    // Events queued while the link was down belong to an epoch that is over.
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
                    RETRY
                }
                Err(Failure::Refused(reason)) => {
                    tracing::error!(coordinator = %self.addr, reason, "registration refused");
                    RETRY_REFUSED
                }
                Err(Failure::Link(error)) => {
                    tracing::debug!(coordinator = %self.addr, %error, "cannot register yet");
                    RETRY
                }
            };
            // Anything queued meanwhile is for a link that is down; a closed queue ends the wait.
            let drained = time::timeout(wait, async { while outgoing.recv().await.is_some() {} });
            let _ = drained.await;
        }
    }

    async fn connect(&self) -> Result<(Streams, Epoch), Failure> {
        let connection = self.endpoint.connect(self.addr).await?;
        let (mut sender, mut receiver) = connection.open(Preamble::Control).await?;
        sender.send(&ToCoordinator::Register(self.register.clone())).await?;
        let answer = time::timeout(CONNECT_MAX, receiver.recv()).await;
        let silent = || Failure::Link(LinkError::Broken { peer: self.addr, reason: "no answer to registration".into() });
        match answer.map_err(|_| silent())?? {
            Some(ToWorker::Registered { epoch }) => Ok(((connection, sender, receiver), epoch)),
            Some(ToWorker::Refused { reason }) => Err(Failure::Refused(reason)),
            _ => Err(silent()),
        }
    }

    /// Pumps both directions until one ends in good order, and says which, or breaks.
    async fn serve(
        &self,
        (connection, sender, receiver): Streams,
        epoch: Epoch,
        outgoing: &mut mpsc::Receiver<WorkerEvent>,
        incoming: &mpsc::Sender<(LinkId, LinkEvent)>,
    ) -> Result<&'static str, LinkError> {
        let ended = tokio::select! {
            ended = self.write(sender, epoch, outgoing) => ended,
            ended = self.read(receiver, incoming) => ended,
        };
        connection.close(ended.as_ref().copied().unwrap_or("broken"));
        ended
    }

    async fn write(
        &self,
        mut sender: Sender<ToCoordinator>,
        epoch: Epoch,
        outgoing: &mut mpsc::Receiver<WorkerEvent>,
    ) -> Result<&'static str, LinkError> {
        let mut heartbeat = time::interval(HEARTBEAT);
        loop {
            let event = tokio::select! {
                event = outgoing.recv() => match event {
                    Some(event) => event,
                    None => {
                        sender.finish().await;
                        return Ok("worker ends");
                    }
                },
                _ = heartbeat.tick() => WorkerEvent::Heartbeat((self.report)()),
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
            if incoming.send((self.id, LinkEvent::Message(message))).await.is_err() {
                return Ok("worker ends");
            }
        }
        Ok("coordinator ends")
    }
}

enum Failure {
    Link(LinkError),
    Refused(String),
}

impl From<LinkError> for Failure {
    fn from(error: LinkError) -> Self {
        Failure::Link(error)
    }
}
