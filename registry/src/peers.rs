//! Links to the other coordinators. Each coordinator opens one to every other, for its own messages.

use crate::registry::Registry;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::SocketAddr, time::Duration};
use tidemill_net::{
    identity::PeerRole,
    link::{Endpoint, LinkError, Receiver},
};
use tidemill_proto::frame::Preamble;
use tokio::sync::mpsc;

/// The maximum number of messages on their way to one coordinator. Further ones are lost, which raft expects.
const QUEUE_MAX: usize = 256;
/// The pause between two attempts to reach a coordinator.
const RETRY: Duration = Duration::from_millis(200);

/// A message on the link from one coordinator to another.
#[derive(Debug, Serialize, Deserialize)]
pub enum PeerMessage {
    /// The first message: the sender's name.
    Introduce {
        name: String,
    },
    Registry(Vec<u8>),
}

/// Links to all other coordinators. Dropping it ends them.
#[derive(Debug, Default)]
pub struct Peers {
    queues: BTreeMap<String, mpsc::Sender<Vec<u8>>>,
}

impl Peers {
    /// Starts the links. `name` is this coordinator's. Must be called inside a tokio runtime.
    pub fn start(endpoint: &Endpoint, name: &str, peers: &BTreeMap<String, SocketAddr>) -> Self {
        let link = |(peer, addr): (&String, &SocketAddr)| {
            let (queue, queued) = mpsc::channel(QUEUE_MAX);
            tokio::spawn(run(endpoint.clone(), name.to_owned(), peer.clone(), *addr, queued));
            (peer.clone(), queue)
        };
        Self { queues: peers.iter().map(link).collect() }
    }

    pub(crate) fn send(&self, to: &str, bytes: Vec<u8>) {
        if let Some(queue) = self.queues.get(to) {
            let _ = queue.try_send(bytes);
        }
    }
}

async fn run(endpoint: Endpoint, name: String, peer: String, addr: SocketAddr, mut queued: mpsc::Receiver<Vec<u8>>) {
    while !queued.is_closed() {
        match speak(&endpoint, &name, &peer, addr, &mut queued).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(peer, %error, "no link to this coordinator"),
        }
        // Messages that waited are out of date by now.
        let _ = tokio::time::timeout(RETRY, async { while queued.recv().await.is_some() {} }).await;
    }
}

async fn speak(
    endpoint: &Endpoint,
    name: &str,
    peer: &str,
    addr: SocketAddr,
    queued: &mut mpsc::Receiver<Vec<u8>>,
) -> Result<(), LinkError> {
    let connection = endpoint.connect(addr).await?;
    connection.expect_name(PeerRole::Coordinator, peer)?;
    let (mut sender, _receiver) = connection.open::<PeerMessage, ()>(Preamble::Registry).await?;
    sender.send(&PeerMessage::Introduce { name: name.to_owned() }).await?;
    loop {
        tokio::select! {
            message = queued.recv() => match message {
                Some(bytes) => sender.send(&PeerMessage::Registry(bytes)).await?,
                None => {
                    sender.finish().await;
                    return Ok(());
                }
            },
            reason = connection.closed() => return Err(LinkError::Broken { peer: addr, reason }),
        }
    }
}

/// Handles the messages of a peer until its link ends, and returns the reason of the end. `from` is the peer's name by its introduction.
pub async fn listen(mut receiver: Receiver<PeerMessage>, from: &str, registry: &Registry) -> String {
    loop {
        match receiver.recv().await {
            Ok(Some(PeerMessage::Registry(bytes))) => registry.message(from, bytes),
            Ok(Some(PeerMessage::Introduce { .. })) => return "it introduced itself twice".into(),
            Ok(None) => return "it ended".into(),
            Err(error) => return error.to_string(),
        }
    }
}
