//! The accepting end of links. A worker's (`tidemill_net::uplink` is the other end): register, then pump both directions. A coordinator's
//! (`tidemill_registry::peers`): messages of the registry.
//!
//! A worker gets its epoch from the registry. A worker that is already in the registry is accepted at once; a new one waits for a majority
//! of the coordinators.

use crate::driver::{Driver, LINK_QUEUE_MAX, WorkerLink};
use std::{sync::Arc, time::Duration};
use tidemill_gateway::metrics;
use tidemill_net::{
    identity::PeerRole,
    link::{CONNECT_MAX, Connection, Endpoint, LinkError, Receiver, Sender},
};
use tidemill_proto::{
    frame::{Preamble, Version},
    ids::{Epoch, Instance},
    message::{Register, ToCoordinator, ToWorker, WorkerEvent},
};
use tidemill_registry::{
    command::{NAME_BYTES_MAX, NewMember},
    peers::{self, PeerMessage},
    registry::{Failed, Registry},
};
use tokio::{sync::mpsc, task::JoinSet, time};

/// The time that a new worker's registration may wait for a majority: less than the worker waits for an answer.
const REGISTERED_MAX: Duration = Duration::from_secs(3);

/// The state that links share.
#[derive(Clone, Debug)]
pub struct Links {
    pub driver: Arc<Driver>,
    pub registry: Registry,
    /// Names of the other coordinators.
    pub peers: Arc<[String]>,
}

/// Serves every worker and coordinator that connects, until the endpoint is closed.
pub async fn accept(endpoint: Endpoint, all: Links) {
    let mut links = JoinSet::new();
    let mut listener = endpoint.listen();
    while let Some(connection) = listener.accept().await {
        links.spawn(serve(connection, all.clone()));
        while links.try_join_next().is_some() {}
    }
    links.join_all().await;
}

async fn serve(connection: Connection, all: Links) {
    let peer = connection.peer();
    let reason = match introduce(&connection).await {
        Ok(Introduction::Worker { instance, register, sender, receiver }) => {
            match admit(instance, (*register, connection.version()), &all).await {
                Ok(admitted) => attend(admitted, sender, receiver, &all.driver).await,
                Err(refused) => refuse(refused, sender).await,
            }
        }
        Ok(Introduction::Coordinator { name, .. }) if !all.peers.contains(&name) => {
            format!("coordinator `{name}` is none of this one's --peers")
        }
        Ok(Introduction::Coordinator { name, receiver }) => {
            tracing::debug!(%peer, name, "link of a coordinator");
            format!("coordinator `{name}`: {}", peers::listen(receiver, &name, &all.registry).await)
        }
        Err(error) => error.to_string(),
    };
    tracing::info!(%peer, reason, "link ended");
    connection.close(&reason);
}

/// The peer that has connected.
enum Introduction {
    Worker { instance: Instance, register: Box<Register>, sender: Sender<ToWorker>, receiver: Receiver<ToCoordinator> },
    Coordinator { name: String, receiver: Receiver<PeerMessage> },
}

async fn introduce(connection: &Connection) -> Result<Introduction, LinkError> {
    let broken = |reason: &str| LinkError::Broken { peer: connection.peer(), reason: reason.into() };
    let introduced = time::timeout(CONNECT_MAX, async {
        let incoming = connection.accept_one_of(&[Preamble::Control, Preamble::Registry]).await?;
        if incoming.kind() == Preamble::Registry {
            let (_, mut receiver) = incoming.streams::<(), PeerMessage>();
            return match receiver.recv().await? {
                Some(PeerMessage::Introduce { name }) => {
                    connection.expect_name(PeerRole::Coordinator, &name)?;
                    Ok(Introduction::Coordinator { name, receiver })
                }
                _ => Err(broken("it did not introduce itself first")),
            };
        }
        let (sender, mut receiver) = incoming.streams();
        match receiver.recv().await? {
            Some(ToCoordinator::Register { instance, register }) => {
                connection.expect_name(register.role.role().into(), &register.name)?;
                Ok(Introduction::Worker { instance, register: Box::new(register), sender, receiver })
            }
            _ => Err(broken("it did not register first")),
        }
    });
    introduced.await.unwrap_or_else(|_| Err(broken("it did not register in time")))
}

/// A worker that was accepted.
struct Admitted {
    epoch: Epoch,
    link: WorkerLink,
    labels: metrics::WorkerLabels,
    outgoing: mpsc::Receiver<ToWorker>,
}

/// A worker that was refused, and the answer to it.
struct Refused {
    name: String,
    answer: ToWorker,
    reason: String,
}

async fn admit(
    instance: Instance,
    (register, version): (Register, Version),
    Links { driver, registry, .. }: &Links,
) -> Result<Admitted, Refused> {
    let (mut name, role) = (register.name.clone(), register.role.role());
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    let for_good = |reason: String| Refused { name: name.clone(), answer: ToWorker::Refused { reason: reason.clone() }, reason };
    // A worker that would be refused here need not go through the registry.
    driver.check(&register).map_err(|refusal| for_good(refusal.to_string()))?;
    let member = NewMember { instance, name: name.clone(), role };
    let epoch = registry.register(member, REGISTERED_MAX).await.map_err(|error| match error {
        Failed::Refused(refusal) => for_good(refusal.to_string()),
        error => {
            let reason = format!("{error}: {}", registry.view().why_waiting());
            Refused { name: name.clone(), answer: ToWorker::NotYet { reason: reason.clone() }, reason }
        }
    })?;
    let (queue, outgoing) = mpsc::channel(LINK_QUEUE_MAX);
    let link = driver.register(epoch, (register, version), queue).map_err(|refusal| for_good(refusal.to_string()))?;
    tracing::info!(name, ?role, %epoch, "worker registered");
    Ok(Admitted { epoch, link, labels: metrics::WorkerLabels { name, role }, outgoing })
}

async fn refuse(Refused { name, answer, reason }: Refused, mut sender: Sender<ToWorker>) -> String {
    if sender.send(&answer).await.is_ok() {
        let _ = time::timeout(CONNECT_MAX, sender.finish()).await;
    }
    format!("`{name}` refused: {reason}")
}

async fn attend(admitted: Admitted, sender: Sender<ToWorker>, receiver: Receiver<ToCoordinator>, driver: &Driver) -> String {
    let Admitted { epoch, link, labels, outgoing } = admitted;
    let name = labels.name.clone();
    let reason = tokio::select! {
        reason = write(sender, epoch, outgoing) => reason,
        reason = read(receiver, (epoch, link), labels, driver) => reason,
    };
    driver.worker_down(link);
    format!("`{name}`: {reason}")
}

async fn write(mut sender: Sender<ToWorker>, epoch: Epoch, mut outgoing: mpsc::Receiver<ToWorker>) -> String {
    let mut next = Some(ToWorker::Registered { epoch });
    while let Some(message) = next {
        if let Err(error) = sender.send(&message).await {
            return error.to_string();
        }
        next = outgoing.recv().await;
    }
    "dropped by this coordinator".into()
}

async fn read(
    mut receiver: Receiver<ToCoordinator>,
    (epoch, link): (Epoch, WorkerLink),
    labels: metrics::WorkerLabels,
    driver: &Driver,
) -> String {
    loop {
        match receiver.recv().await {
            Ok(Some(ToCoordinator::Event { epoch: theirs, event })) if theirs == epoch => {
                if let WorkerEvent::Heartbeat(report) = &event {
                    metrics::observe_steps(&labels, &report.steps);
                }
                driver.worker_event(link, event);
            }
            Ok(Some(ToCoordinator::Event { epoch: theirs, .. })) => return format!("event of epoch {theirs} on the link of epoch {epoch}"),
            Ok(Some(ToCoordinator::Register { .. })) => return "registered twice on one link".into(),
            Ok(None) => return "it ended".into(),
            Err(error) => return error.to_string(),
        }
    }
}
