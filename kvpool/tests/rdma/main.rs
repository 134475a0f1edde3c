//! A pool node as a process, and clients that reach it by RDMA over two pairs of devices, and by QUIC over loopback. They need the RDMA
//! guest: `make test-rdma`.
//!
//! The network's behaviour is set with `tc` and `ip` on the interfaces under the clients' devices, va0 and va1.

#[allow(dead_code, reason = "the tests over shared memory and QUIC use the rest")]
#[path = "../processes/support.rs"]
mod support;

use nix::sys::signal::Signal;
use std::{
    env,
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};
use support::*;
use tidemill_kvpool::client::{Nics, PoolClient, PoolError, PutReport, TransferCounters, Transport, TransportChoice, Ways};
use tidemill_net::{identity::Identity, link::Endpoint};
use tidemill_proto::pool::{
    Direction::{Get, Put},
    Room,
};

const NEEDS_GUEST: &str = "run by `make test-rdma`";
const WHOLE: PutReport = PutReport { written: 1, held: 0, refused: 0 };

/// A node that is reached over rb0 and rb1. First repairs the network, which a failed test may have left broken.
async fn node(slots: usize, flags: &[&str]) -> Node {
    network("");
    run("ip link set va0 up");
    run("ip link set va1 up");
    Node::start(slots, &[&["--rdma-devices", "rb0,rb1"], flags].concat()).await
}

/// A client that reaches the node over these devices.
async fn rdma_client(node: &Node, devices: &str) -> (PoolClient, Arc<TransferCounters>) {
    let counters = Arc::<TransferCounters>::default();
    let client = connect(&node.endpoint, node.addr, devices, &counters).await.expect(NEEDS_GUEST);
    // An emulator under load may need longer than a new connection waits.
    let rails = devices.split(',').count() as u64;
    eventually(|| counters.rails().opened - counters.rails().lost == rails).await;
    (client, counters)
}

async fn connect(
    endpoint: &Endpoint,
    addr: std::net::SocketAddr,
    devices: &str,
    counters: &Arc<TransferCounters>,
) -> Result<PoolClient, PoolError> {
    let nics = Nics::open(&devices.parse().expect("names"));
    let ways = Ways { choice: TransportChoice::Rdma, nics: Some(nics), device: None };
    PoolClient::connect(endpoint, addr, FORMAT, ways, Arc::clone(counters)).await
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status();
    assert!(status.unwrap().success(), "{command}: {NEEDS_GUEST}");
}

/// Sets the behaviour of the network between va0 and vb0, in `tc`'s words; without any, the normal one.
fn network(words: &str) {
    let _ = Command::new("tc").args("qdisc del dev va0 root".split(' ')).output();
    if !words.is_empty() {
        run(&format!("tc qdisc add dev va0 root netem limit 100000 {words}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn blocks_move_by_rdma_and_are_those_that_move_by_quic() {
    let node = node(64, &[]).await;
    let (rdma, counters) = rdma_client(&node, "ra0,ra1").await;
    let quic = node.client(TransportChoice::Quic).await;
    assert_eq!(rdma.put(LINEAGE, blocks(0..30)).await.unwrap(), PutReport { written: 30, held: 0, refused: 0 });
    assert_eq!(quic.put(LINEAGE, blocks(30..40)).await.unwrap(), PutReport { written: 10, held: 0, refused: 0 });
    assert_eq!(rdma.put(LINEAGE, blocks(30..42)).await.unwrap(), PutReport { written: 2, held: 10, refused: 0 });
    for client in [&rdma, &quic] {
        assert_eq!(client.match_prefix(&keys(0..50)).await.unwrap(), 42);
        assert_held(client, 0..42).await;
    }
    let (transfer, misses) = counters.snapshot();
    let block = BLOCK_BYTES as u64;
    let moved = [Transport::Rdma, Transport::Quic].map(|transport| [Put, Get].map(|direction| transfer[(transport, direction)].bytes));
    assert_eq!(moved, [[32 * block, 42 * block], [0, 0]]);
    assert_eq!((misses.corrupt, misses.stale, misses.unreachable), (0, 0, 0));
    assert_eq!((counters.rails().opened, counters.rails().lost), (2, 0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn a_network_that_loses_packets_loses_no_block() {
    let node = node(64, &[]).await;
    let (client, counters) = rdma_client(&node, "ra0").await;
    network("loss 1%");
    client.put(LINEAGE, blocks(0..20)).await.unwrap();
    assert_held(&client, 0..20).await;
    network("");
    assert_eq!((client.transport(), counters.rails().lost), (Transport::Rdma, 0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn another_device_takes_over_then_quic_then_rdma_again() {
    let node = node(64, &[]).await;
    let (client, counters) = rdma_client(&node, "ra0,ra1").await;
    client.put(LINEAGE, blocks(0..10)).await.unwrap();
    run("ip link set va0 down");
    client.put(LINEAGE, blocks(10..20)).await.unwrap();
    assert_held(&client, 0..20).await;
    assert_eq!(client.transport(), Transport::Rdma);
    eventually(|| counters.rails().lost >= 1).await;
    run("ip link set va1 down");
    // The bytes of these blocks are on their way when the last rail breaks.
    let report = client.put(LINEAGE, blocks(20..30)).await.unwrap();
    assert_eq!(report, PutReport { written: 10, held: 0, refused: 0 });
    assert_eq!(client.transport(), Transport::Quic);
    assert_held(&client, 0..30).await;
    assert!(counters.snapshot().0[(Transport::Quic, Put)].bytes >= 10 * BLOCK_BYTES as u64);
    run("ip link set va0 up");
    run("ip link set va1 up");
    eventually(|| client.transport() == Transport::Rdma).await;
    assert_held(&client, 0..30).await;
}

/// The node has one slot.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn a_late_writer_is_fenced_before_its_slot_is_anothers() {
    let node = node(1, &["--put-deadline-ms", "3000"]).await;
    let (late, counters) = rdma_client(&node, "ra0").await;
    let quic = node.client(TransportChoice::Quic).await;
    let reserved = late.reserve(Room::Made, LINEAGE, keys(0..1)).await.unwrap();
    network("loss 100%");
    reserved.write(0, &bytes(0)).unwrap();
    let started = Instant::now();
    let report = tokio::spawn(reserved.commit());
    node.told(|told| told.report.as_ref().is_some_and(|report| report.counters.rails.fenced == 1)).await;
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    // Its slot is free again, and is reused.
    assert_eq!(quic.put(LINEAGE, blocks(1..2)).await.unwrap(), WHOLE);
    network("");
    assert_eq!(report.await.unwrap().unwrap(), PutReport { written: 0, held: 0, refused: 1 });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_held(&quic, 1..2).await;
    // The late client recovers.
    assert_eq!(counters.rails().lost, 1);
    eventually(|| late.transport() == Transport::Rdma).await;
    assert_held(&late, 1..2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn a_node_that_is_killed_under_a_write_is_noticed() {
    let node = node(64, &[]).await;
    let (client, _) = rdma_client(&node, "ra0").await;
    client.put(LINEAGE, blocks(0..1)).await.unwrap();
    let leased = client.get(keys(0..1), Duration::ZERO).next().await.unwrap().1.unwrap();
    network("rate 4mbit");
    let started = Instant::now();
    let put = tokio::spawn({
        let client = client.clone();
        async move { client.put(LINEAGE, blocks(1..20)).await }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    node.signal(Signal::SIGKILL);
    assert!(matches!(put.await.unwrap(), Err(PoolError::Unreachable { .. })));
    assert!(leased.read().is_err(), "what was leased is a miss");
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    assert!(!client.is_open());
    network("");
}

/// The process that the next test kills: this test program once more.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn writer_process() {
    let (Ok(addr), Ok(pki)) = (env::var("TEST_NODE"), env::var("TEST_PKI")) else { return };
    let identity = Identity::load(Path::new(&pki)).unwrap();
    let endpoint = Endpoint::bind_client("127.0.0.1:0".parse().unwrap(), &identity).unwrap();
    let client = connect(&endpoint, addr.parse().unwrap(), "ra0", &Arc::default()).await.unwrap();
    let _ = client.put(LINEAGE, blocks(0..20)).await;
    unreachable!("it is killed before");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn a_writer_that_is_killed_holds_nothing_and_writes_nothing_more() {
    let node = node(20, &[]).await;
    network("rate 1mbit");
    let mut writer = Command::new(env::current_exe().unwrap())
        .args(["--exact", "writer_process", "--ignored"])
        .envs([("TEST_NODE", node.addr.to_string()), ("TEST_PKI", node.pki().display().to_string())])
        .spawn()
        .unwrap();
    node.told(|told| told.report.as_ref().is_some_and(|report| report.blocks.dram.used == 20)).await;
    writer.kill().unwrap();
    writer.wait().unwrap();
    let started = Instant::now();
    node.told(|told| told.report.as_ref().is_some_and(|report| report.blocks.dram.used == 0)).await;
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    network("");
    // All slots are written again, some of them while packets of the dead client may still be on their way.
    let quic = node.client(TransportChoice::Quic).await;
    quic.put(LINEAGE, blocks(100..120)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_held(&quic, 100..120).await;
}
