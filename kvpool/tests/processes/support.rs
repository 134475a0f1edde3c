//! A pool node as a real process, and a coordinator that only listens.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tidemill_kvpool::client::{Block, Miss, PoolClient, PoolError, TransferCounters, TransportChoice};
use tidemill_net::{
    identity::{self, Identity},
    link::Endpoint,
};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint, Shard, Tenant},
    frame::Preamble,
    ids::{Epoch, RequestId},
    message::{PoolEvent, Register, Report, RoleInfo, ToCoordinator, ToWorker, WorkerEvent},
    pool::{BlockFormat, Lineage},
};
use tokio::sync::mpsc;

pub(crate) const LAYOUT: LayoutFingerprint = LayoutFingerprint([5; 16]);
/// The size of a block, not a multiple of anything convenient.
pub(crate) const BLOCK_BYTES: usize = 100_008;
pub(crate) const FORMAT: BlockFormat = BlockFormat { layout: LAYOUT, shard: Shard::WHOLE, block_bytes: BLOCK_BYTES as u64 };
pub(crate) const ORIGIN: RequestId = RequestId(77);
pub(crate) const LINEAGE: Lineage = Lineage { origin: ORIGIN, tenant: Tenant(1), parent: None, position: 0 };
pub(crate) const BOTH: [TransportChoice; 2] = [TransportChoice::Auto, TransportChoice::Quic];

pub(crate) struct Node {
    pub(crate) child: Child,
    pub(crate) addr: SocketAddr,
    pub(crate) endpoint: Endpoint,
    pub(crate) told: Arc<Mutex<Told>>,
    pki: tempfile::TempDir,
}

/// The reports and events that the coordinator received over its present link.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) links: usize,
    /// Whether the test wants the link to break.
    pub(crate) hang_up: bool,
    pub(crate) keys: BTreeSet<BlockKey>,
    pub(crate) report: Option<Report>,
    pub(crate) leaving: bool,
    next: u64,
}

impl Node {
    /// A node with memory for `slots` blocks.
    pub(crate) async fn start(slots: usize, flags: &[&str]) -> Self {
        let pki = tempfile::tempdir().unwrap();
        identity::create(pki.path()).unwrap();
        let identity = Identity::load(pki.path()).unwrap();
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let coordinator = Endpoint::bind(loopback, &identity).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_tidemill-kvpool"))
            .args(["--pki", pki.path().to_str().unwrap(), "--log", "warn"])
            .args(["--coordinators", &coordinator.local_addr().to_string()])
            .args(["--dram", &(slots * BLOCK_BYTES.next_multiple_of(64)).to_string()])
            .args(flags)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let told = Arc::new(Mutex::new(Told::default()));
        let (registered, mut addrs) = mpsc::channel(16);
        tokio::spawn(coordinate(coordinator, Arc::clone(&told), registered));
        let addr = tokio::time::timeout(Duration::from_secs(60), addrs.recv()).await.expect("the node registers").unwrap();
        Self { child, addr, endpoint: Endpoint::bind_client(loopback, &identity).unwrap(), told, pki }
    }

    pub(crate) async fn try_client(&self, block_bytes: usize, choice: TransportChoice) -> Result<PoolClient, PoolError> {
        self.connect(BlockFormat::whole(LAYOUT, block_bytes as u64), choice).await
    }

    pub(crate) async fn client(&self, choice: TransportChoice) -> PoolClient {
        self.try_client(BLOCK_BYTES, choice).await.unwrap()
    }

    /// A client for another model.
    pub(crate) async fn client_of(&self, layout: LayoutFingerprint, choice: TransportChoice) -> PoolClient {
        self.connect(BlockFormat { layout, ..FORMAT }, choice).await.unwrap()
    }

    /// A client for one shard of the model.
    pub(crate) async fn client_of_shard(&self, shard: Shard, choice: TransportChoice) -> Result<PoolClient, PoolError> {
        self.connect(BlockFormat { shard, ..FORMAT }, choice).await
    }

    async fn connect(&self, blocks: BlockFormat, choice: TransportChoice) -> Result<PoolClient, PoolError> {
        PoolClient::connect(&self.endpoint, self.addr, blocks, choice, Arc::new(TransferCounters::default())).await
    }

    pub(crate) fn pki(&self) -> &std::path::Path {
        self.pki.path()
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits until the coordinator's knowledge satisfies `what`.
    pub(crate) async fn told(&self, what: impl Fn(&Told) -> bool) {
        eventually(|| what(&self.told.lock().unwrap())).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fails if `condition` does not come true within a time that only a broken program needs.
pub(crate) async fn eventually(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "this never happens");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Registers the node whenever it connects, and keeps track of its events.
async fn coordinate(endpoint: Endpoint, told: Arc<Mutex<Told>>, registered: mpsc::Sender<SocketAddr>) {
    let mut listener = endpoint.listen();
    while let Some(connection) = listener.accept().await {
        let (mut sender, mut receiver) = connection.accept::<ToWorker, ToCoordinator>(Preamble::Control).await.unwrap();
        let Some(ToCoordinator::Register { register: Register { role: RoleInfo::Kvpool { addr }, .. }, .. }) =
            receiver.recv().await.unwrap()
        else {
            panic!("a pool node registers first");
        };
        sender.send(&ToWorker::Registered { epoch: Epoch(1) }).await.unwrap();
        let links = told.lock().unwrap().links + 1;
        *told.lock().unwrap() = Told { links, ..Told::default() };
        // Only the first registration is waited for.
        let _ = registered.send(addr).await;
        while let Ok(Some(ToCoordinator::Event { event, .. })) = receiver.recv().await {
            let mut told = told.lock().unwrap();
            match event {
                WorkerEvent::Heartbeat(report) => told.report = Some(*report),
                WorkerEvent::Release(_) => {}
                WorkerEvent::Leaving => told.leaving = true,
                WorkerEvent::PoolEvents { from, events } => {
                    assert_eq!(from, told.next, "the stream of events has a gap");
                    told.next += events.len() as u64;
                    for event in events {
                        match event {
                            PoolEvent::Stored { key, .. } => assert!(told.keys.insert(key), "stored twice"),
                            PoolEvent::Evicted(key) => assert!(told.keys.remove(&key), "evicted what was not there"),
                            PoolEvent::Moved { key, .. } => assert!(told.keys.contains(&key), "moved what was not there"),
                            PoolEvent::Cleared => told.keys.clear(),
                        }
                    }
                }
                other => panic!("a pool node said {other:?}"),
            }
            if told.hang_up {
                break;
            }
        }
        connection.close("coordinator ends");
    }
}

pub(crate) fn key(n: u16) -> BlockKey {
    let mut key = [0; 16];
    key[..2].copy_from_slice(&n.to_le_bytes());
    BlockKey(key)
}

pub(crate) fn keys(range: std::ops::Range<u16>) -> Vec<BlockKey> {
    range.map(key).collect()
}

pub(crate) fn bytes(n: u16) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|i| (i as u16).wrapping_mul(n + 3) as u8 ^ (i >> 8) as u8).collect()
}

pub(crate) fn blocks(range: std::ops::Range<u16>) -> Vec<(BlockKey, Vec<u8>)> {
    range.map(|n| (key(n), bytes(n))).collect()
}

/// All results of a get, in the order of its keys.
pub(crate) async fn fetch(client: &PoolClient, keys: Vec<BlockKey>, wait: Duration) -> Vec<Result<Block, Miss>> {
    let mut results: Vec<_> = keys.iter().map(|_| None).collect();
    let mut fetch = client.get(keys, wait);
    while let Some((index, result)) = fetch.next().await {
        assert!(results[index].replace(result.and_then(|block| block.read())).is_none(), "answered twice");
    }
    results.into_iter().map(|result| result.expect("every key is answered")).collect()
}

/// Asserts that the blocks of `range` are there, with the right bytes.
pub(crate) async fn assert_held(client: &PoolClient, range: std::ops::Range<u16>) {
    for (n, result) in range.clone().zip(fetch(client, keys(range), Duration::ZERO).await) {
        let block = result.unwrap_or_else(|miss| panic!("block {n}: {miss:?}"));
        assert!(block.bytes == bytes(n), "block {n} has other bytes");
        assert_eq!((block.origin, block.transport), (ORIGIN, client.transport()));
    }
}
