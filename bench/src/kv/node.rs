//! A pool node as a process, and the coordinator that it insists on.

use super::clocks::Clocks;
use anyhow::{Context, bail};
use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};
use tidemill_deploy::processes::Process;
use tidemill_kvpool::client::{PoolClient, TransferCounters, TransportChoice};
use tidemill_proto::{
    block::LayoutFingerprint,
    frame::Preamble,
    identity::Identity,
    ids::Epoch,
    link::{Endpoint, LinkError},
    message::{Register, RoleInfo, ToCoordinator, ToWorker},
};
use tokio::{task::JoinHandle, time::timeout};

/// Runs until dropped.
#[derive(Debug)]
pub struct PoolNode {
    process: Process,
    addr: SocketAddr,
    identity: Identity,
    coordinator: JoinHandle<()>,
}

const LAYOUT: LayoutFingerprint = LayoutFingerprint([0; 16]);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl PoolNode {
    pub async fn start(pki: &Path, dram_bytes: usize) -> anyhow::Result<Self> {
        let identity = Identity::load(pki)?;
        let coordinator = Endpoint::bind(LOOPBACK, &identity)?;
        let flags = [
            ("--pki", pki.display().to_string()),
            ("--coordinators", coordinator.local_addr().to_string()),
            ("--dram", dram_bytes.to_string()),
            ("--log", "warn".into()),
        ];
        let flags: Vec<_> = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let process = Process::start("tidemill-kvpool", "bench", &flags)?;
        let registered = timeout(Duration::from_secs(20), register(coordinator)).await;
        let (addr, coordinator) = registered.context("the pool node did not register")??;
        Ok(Self { process, addr, identity, coordinator })
    }

    /// A connection on a socket of its own.
    pub async fn client(&self, block_bytes: usize, choice: TransportChoice, datagram_bytes_max: u16) -> anyhow::Result<PoolClient> {
        let endpoint = Endpoint::bind_client_limited(LOOPBACK, &self.identity, datagram_bytes_max)?;
        Ok(PoolClient::connect(&endpoint, self.addr, LAYOUT, block_bytes, choice, Arc::new(TransferCounters::default())).await?)
    }

    /// Clocks of this process and the node.
    pub fn clocks(&self) -> anyhow::Result<Clocks> {
        Clocks::new(&[self.process.id().context("the pool node has ended")?])
    }
}

impl Drop for PoolNode {
    fn drop(&mut self) {
        self.coordinator.abort();
    }
}

/// Welcomes the node, which says where it listens, and hears what else it has to say.
async fn register(endpoint: Endpoint) -> anyhow::Result<(SocketAddr, JoinHandle<()>)> {
    let connection = endpoint.listen().accept().await.context("the coordinator's socket is closed")?;
    let (mut sender, mut receiver) = connection.accept::<ToWorker, ToCoordinator>(Preamble::Control).await?;
    let Some(ToCoordinator::Register(Register { role: RoleInfo::Kvpool { addr }, .. })) = receiver.recv().await? else {
        bail!("the pool node did not say where it listens");
    };
    sender.send(&ToWorker::Registered { epoch: Epoch(1) }).await?;
    let listening = tokio::spawn(async move {
        let _ends_with_this = (endpoint, connection, sender);
        while let Ok::<_, LinkError>(Some(_)) = receiver.recv().await {}
    });
    Ok((addr, listening))
}
