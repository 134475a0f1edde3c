//! The accepting end of the workers' links (`tidemill_net::uplink` is the other): register, then pump both directions.

use crate::driver::{Driver, LINK_QUEUE_MAX};
use std::sync::Arc;
use tidemill_gateway::metrics;
use tidemill_net::link::{CONNECT_MAX, Connection, Endpoint, LinkError, Receiver, Sender};
use tidemill_proto::{
    frame::Preamble,
    ids::Epoch,
    message::{Register, ToCoordinator, ToWorker, WorkerEvent},
};
use tokio::{sync::mpsc, task::JoinSet, time};

/// Serves every worker that connects, until the endpoint is closed.
pub async fn accept(endpoint: Endpoint, driver: Arc<Driver>) {
    let mut links = JoinSet::new();
    let mut listener = endpoint.listen();
    while let Some(connection) = listener.accept().await {
        links.spawn(serve(connection, Arc::clone(&driver)));
        while links.try_join_next().is_some() {}
    }
    links.join_all().await;
}

async fn serve(connection: Connection, driver: Arc<Driver>) {
    let peer = connection.peer();
    let reason = match introduce(&connection).await {
        Ok((register, sender, receiver)) => admit(register, sender, receiver, &driver).await,
        Err(error) => error.to_string(),
    };
    tracing::info!(%peer, reason, "worker link ended");
    connection.close(&reason);
}

type Introduction = (Register, Sender<ToWorker>, Receiver<ToCoordinator>);

async fn introduce(connection: &Connection) -> Result<Introduction, LinkError> {
    let broken = |reason: &str| LinkError::Broken { peer: connection.peer(), reason: reason.into() };
    let introduced = time::timeout(CONNECT_MAX, async {
        let (sender, mut receiver) = connection.accept(Preamble::Control).await?;
        match receiver.recv().await? {
            Some(ToCoordinator::Register(register)) => Ok((register, sender, receiver)),
            _ => Err(broken("it did not register first")),
        }
    });
    introduced.await.unwrap_or_else(|_| Err(broken("it did not register in time")))
}

async fn admit(register: Register, mut sender: Sender<ToWorker>, receiver: Receiver<ToCoordinator>, driver: &Driver) -> String {
    let (name, role) = (register.name.clone(), register.role.role());
    let (link, outgoing) = mpsc::channel(LINK_QUEUE_MAX);
    let epoch = match driver.register(register, link) {
        Ok(epoch) => epoch,
        Err(refusal) => {
            let reason = refusal.to_string();
            if sender.send(&ToWorker::Refused { reason: reason.clone() }).await.is_ok() {
                let _ = time::timeout(CONNECT_MAX, sender.finish()).await;
            }
            return format!("`{name}` refused: {reason}");
        }
    };
    tracing::info!(name, ?role, %epoch, "worker registered");
    let reason = tokio::select! {
        reason = write(sender, epoch, outgoing) => reason,
        reason = read(receiver, epoch, metrics::WorkerLabels { name: name.clone(), role }, driver) => reason,
    };
    driver.worker_down(epoch);
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

async fn read(mut receiver: Receiver<ToCoordinator>, epoch: Epoch, labels: metrics::WorkerLabels, driver: &Driver) -> String {
    loop {
        match receiver.recv().await {
            Ok(Some(ToCoordinator::Event { epoch: theirs, event })) if theirs == epoch => {
                if let WorkerEvent::Heartbeat(report) = &event {
                    metrics::observe_steps(&labels, &report.steps);
                }
                driver.worker_event(epoch, event);
            }
            Ok(Some(ToCoordinator::Event { epoch: theirs, .. })) => return format!("event of epoch {theirs} on the link of epoch {epoch}"),
            Ok(Some(ToCoordinator::Register(_))) => return "registered twice on one link".into(),
            Ok(None) => return "it ended".into(),
            Err(error) => return error.to_string(),
        }
    }
}
