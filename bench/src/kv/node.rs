//! A pool node as a process, and the coordinator that it requires.

use super::clocks::Clocks;
use anyhow::{Context, bail};
use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tidemill_deploy::processes::Process;
use tidemill_kvpool::client::{DeviceNames, PoolClient, TransferCounters, Ways};
use tidemill_net::{
    identity::Identity,
    link::{Endpoint, LinkError},
};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint},
    frame::Preamble,
    ids::Epoch,
    message::{Disk, PoolEvent, Register, RoleInfo, ToCoordinator, ToWorker, WorkerEvent},
    pool::{BlockFormat, Tier},
};
use tokio::{task::JoinHandle, time::timeout};

/// A running node, which ends when this is dropped.
#[derive(Debug)]
pub struct PoolNode {
    process: Process,
    addr: SocketAddr,
    identity: Identity,
    coordinator: JoinHandle<()>,
    told: Arc<Mutex<Told>>,
}

/// The node's last report on its disk, and its time.
#[derive(Clone, Copy, Debug)]
pub struct DiskTold {
    pub at: Instant,
    pub stored_bytes: u64,
    pub loaded_bytes: u64,
}

#[derive(Debug)]
struct Told {
    disk: DiskTold,
    blocks: HashMap<BlockKey, Tier>,
}

const LAYOUT: LayoutFingerprint = LayoutFingerprint([0; 16]);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl PoolNode {
    /// Starts a node. `nvme`: a directory, and the bytes of disk to use there.
    pub async fn start(
        pki: &Path,
        dram_bytes: usize,
        prefault: bool,
        nvme: Option<(&Path, usize)>,
        rdma_devices: &DeviceNames,
    ) -> anyhow::Result<Self> {
        let identity = Identity::load(pki)?;
        let coordinator = Endpoint::bind(LOOPBACK, &identity)?;
        let mut flags = vec![
            ("--pki", pki.display().to_string()),
            ("--coordinators", coordinator.local_addr().to_string()),
            ("--dram", dram_bytes.to_string()),
            ("--prefault", prefault.to_string()),
            ("--rdma-devices", rdma_devices.to_string()),
            ("--log", "warn".into()),
        ];
        if let Some((dir, bytes)) = nvme {
            flags.extend([("--data", dir.display().to_string()), ("--nvme-capacity", bytes.to_string())]);
        }
        let flags: Vec<_> = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let process = Process::start("tidemill-kvpool", "bench", &flags)?;
        let disk = DiskTold { at: Instant::now(), stored_bytes: 0, loaded_bytes: 0 };
        let told = Arc::new(Mutex::new(Told { disk, blocks: HashMap::new() }));
        let registered = timeout(Duration::from_secs(20), register(coordinator, Arc::clone(&told))).await;
        let (addr, coordinator) = registered.context("the pool node did not register")??;
        Ok(Self { process, addr, identity, coordinator, told })
    }

    /// Connects a client, on a socket of its own.
    pub async fn client(&self, block_bytes: usize, ways: Ways, datagram_bytes_max: u16) -> anyhow::Result<PoolClient> {
        let endpoint = Endpoint::bind_client_limited(LOOPBACK, &self.identity, datagram_bytes_max)?;
        let blocks = BlockFormat::whole(LAYOUT, block_bytes as u64);
        Ok(PoolClient::connect(&endpoint, self.addr, blocks, ways, Arc::new(TransferCounters::default())).await?)
    }

    /// The last report, which is renewed once a second.
    pub fn told(&self) -> DiskTold {
        self.told.lock().expect("nobody panics with it").disk
    }

    /// The blocks that the node has in this tier and in no faster one.
    pub fn keys(&self, tier: Tier) -> Vec<BlockKey> {
        let told = self.told.lock().expect("nobody panics with it");
        let mut keys: Vec<_> = told.blocks.iter().filter(|(_, at)| **at == tier).map(|(key, _)| *key).collect();
        // The keys are sorted in the order in which the bench drew them.
        keys.sort_by_key(|key| u64::from_le_bytes(*key.0.first_chunk().expect("a key has 16 bytes")));
        keys
    }

    /// The clocks of this process and the node.
    pub fn clocks(&self) -> anyhow::Result<Clocks> {
        Clocks::new(&[self.process.id().context("the pool node has ended")?])
    }
}

impl Told {
    fn hear(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::Heartbeat(report) => {
                let Disk { stored, loaded, .. } = report.counters.disk;
                self.disk = DiskTold { at: Instant::now(), stored_bytes: stored.bytes, loaded_bytes: loaded.bytes };
            }
            WorkerEvent::PoolEvents { events, .. } => {
                for event in events {
                    match event {
                        PoolEvent::Stored { key, tier } | PoolEvent::Moved { key, tier } => drop(self.blocks.insert(key, tier)),
                        PoolEvent::Evicted(key) => drop(self.blocks.remove(&key)),
                        PoolEvent::Cleared => self.blocks.clear(),
                    }
                }
            }
            _ => {}
        }
    }
}

impl Drop for PoolNode {
    fn drop(&mut self) {
        self.coordinator.abort();
    }
}

/// Accepts the node, which reports its address, and receives its further reports.
async fn register(endpoint: Endpoint, told: Arc<Mutex<Told>>) -> anyhow::Result<(SocketAddr, JoinHandle<()>)> {
    let connection = endpoint.listen().accept().await.context("the coordinator's socket is closed")?;
    let (mut sender, mut receiver) = connection.accept::<ToWorker, ToCoordinator>(Preamble::Control).await?;
    let Some(ToCoordinator::Register { register: Register { role: RoleInfo::Kvpool { addr }, .. }, .. }) = receiver.recv().await? else {
        bail!("the pool node did not say where it listens");
    };
    sender.send(&ToWorker::Registered { epoch: Epoch(1) }).await?;
    let listening = tokio::spawn(async move {
        let _ends_with_this = (endpoint, connection, sender);
        while let Ok::<_, LinkError>(Some(message)) = receiver.recv().await {
            if let ToCoordinator::Event { event, .. } = message {
                told.lock().expect("nobody panics with it").hear(event);
            }
        }
    });
    Ok((addr, listening))
}
