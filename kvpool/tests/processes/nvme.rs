//! A pool node with a disk, in its own process: blocks that leave memory are read back, survive the process, and are never wrong.

use crate::support::*;
use nix::sys::signal::Signal;
use std::{
    collections::BTreeSet,
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use tidemill_kvpool::{
    client::{Miss, PoolClient, TransportChoice},
    core::directory::Limits,
};
use tidemill_proto::block::LayoutFingerprint;

const DRAM_SLOTS: usize = 16;
const DISK_SLOTS: usize = 128;
/// All blocks, four times as many as memory holds.
const ALL: Range<u16> = 0..64;
/// The fewest blocks that are read back: reading brings blocks into memory, where they may displace blocks that are not on disk yet.
const ON_DISK: usize = 64 - DRAM_SLOTS;

/// The stores of the disk's records that this build has.
const STORES: &[&str] = &[
    "file",
    #[cfg(feature = "rocksdb")]
    "rocksdb",
];

async fn start(data: &Path) -> Node {
    start_of(data, STORES[0]).await
}

async fn start_of(data: &Path, store: &str) -> Node {
    start_with(data, DISK_SLOTS * BLOCK_BYTES.next_multiple_of(4096), store).await
}

async fn start_with(data: &Path, capacity: usize, store: &str) -> Node {
    let capacity = capacity.to_string();
    Node::start(DRAM_SLOTS, &["--data", data.to_str().unwrap(), "--nvme-capacity", &capacity, "--nvme-records", store]).await
}

/// Offers blocks until all are held, several times as many as memory holds: none is lost on the way, and the node's events agree.
async fn fill(node: &Node, client: &PoolClient, range: Range<u16>) {
    let started = Instant::now();
    while client.offer(LINEAGE, blocks(range.clone())).await.unwrap().refused > 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "the disk makes no room");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    node.told(|told| keys(range.clone()).iter().all(|key| told.keys.contains(key))).await;
}

/// Offers and reads [`ALL`] until every block is on disk, so that reading them writes nothing.
async fn fill_disk(node: &Node, client: &PoolClient) {
    let started = Instant::now();
    while node.told.lock().unwrap().report.as_ref().is_none_or(|report| report.blocks.nvme.cached < ALL.len() as u64) {
        assert!(started.elapsed() < Duration::from_secs(60), "some blocks never reach the disk");
        fill(node, client, ALL).await;
        count_right(client, ALL).await;
    }
}

/// Gets blocks one batch at a time, since memory holds only so many; asserts that those that arrive are right, and counts them.
async fn count_right(client: &PoolClient, range: Range<u16>) -> usize {
    let mut right = 0;
    for n in range.step_by(4) {
        for (n, result) in (n..).zip(fetch(client, keys(n..n + 4), Duration::ZERO).await) {
            match result {
                Ok(block) => {
                    assert!(block.bytes == bytes(n), "block {n} has other bytes");
                    right += 1;
                }
                Err(miss) => assert_eq!(miss, Miss::Absent, "block {n}"),
            }
        }
    }
    right
}

async fn nothing_in_use(node: &Node) {
    node.told(|told| told.report.as_ref().is_some_and(|report| report.blocks.dram.used == 0 && report.blocks.nvme.used == 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_leaves_memory_is_read_back_from_disk() {
    for choice in BOTH {
        let data = tempfile::tempdir().unwrap();
        let node = start(data.path()).await;
        let client = node.client(choice).await;
        fill(&node, &client, ALL).await;
        assert_eq!(client.match_prefix(&keys(ALL)).await.unwrap(), ALL.len(), "both tiers are one chain");
        // Matched blocks stay in memory for this long: until then there is no slot to read into.
        tokio::time::sleep(Limits::MATCH_LEASE).await;
        for _ in 0..2 {
            assert!(count_right(&client, ALL).await >= ON_DISK);
        }
        let mut tiers = BTreeSet::new();
        for block in fetch(&client, keys(0..8), Duration::ZERO).await.into_iter().chain(fetch(&client, keys(0..8), Duration::ZERO).await) {
            tiers.insert(block.unwrap().tier);
        }
        assert_eq!(tiers.len(), 2, "first from disk, then from memory");
        nothing_in_use(&node).await;
        node.told(|told| {
            let report = told.report.as_ref().unwrap();
            report.blocks.nvme.total == DISK_SLOTS as u64 && report.counters.disk.loaded.bytes > 0 && report.counters.disk.errors == 0
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_comes_back_with_what_its_disk_holds() {
    for store in STORES {
        kill_and_restart(store).await;
    }
}

async fn kill_and_restart(store: &str) {
    let data = tempfile::tempdir().unwrap();
    let mut node = start_of(data.path(), store).await;
    let client = node.client(TransportChoice::Auto).await;
    fill(&node, &client, ALL).await;
    node.signal(Signal::SIGKILL);
    node.child.wait().unwrap();

    let node = start_of(data.path(), store).await;
    node.told(|told| told.keys.len() >= ON_DISK && told.keys.is_subset(&keys(ALL).into_iter().collect())).await;
    let held = node.told.lock().unwrap().keys.len();
    let client = node.client(TransportChoice::Auto).await;
    assert_eq!(count_right(&client, ALL).await, held, "found before a client came, and served");
    fill(&node, &client, ALL).await;
    assert!(count_right(&client, ALL).await >= ON_DISK);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_begins_with_an_empty_disk() {
    for store in STORES {
        restart_for_another_model(store).await;
    }
}

async fn restart_for_another_model(store: &str) {
    let data = tempfile::tempdir().unwrap();
    let mut node = start_of(data.path(), store).await;
    fill(&node, &node.client(TransportChoice::Auto).await, ALL).await;
    node.signal(Signal::SIGTERM);
    node.child.wait().unwrap();

    let node = start_of(data.path(), store).await;
    node.told(|told| !told.keys.is_empty()).await;
    let client = node.client_of(LayoutFingerprint([6; 16]), TransportChoice::Auto).await;
    node.told(|told| told.keys.is_empty()).await;
    assert_eq!(count_right(&client, ALL).await, 0);
    fill(&node, &client, ALL).await;
    assert!(count_right(&client, ALL).await >= ON_DISK);
}

/// A node that goes from one store to the other begins with an empty disk, never with claims of another time.
#[cfg(feature = "rocksdb")]
#[tokio::test(flavor = "multi_thread")]
async fn another_store_begins_with_an_empty_disk() {
    let data = tempfile::tempdir().unwrap();
    for store in ["file", "rocksdb", "file"] {
        let mut node = start_of(data.path(), store).await;
        let client = node.client(TransportChoice::Auto).await;
        assert_eq!(count_right(&client, ALL).await, 0);
        fill_disk(&node, &client).await;
        node.signal(Signal::SIGTERM);
        node.child.wait().unwrap();
    }
}

#[cfg(not(feature = "rocksdb"))]
#[test]
fn a_store_that_is_not_built_in_is_refused_with_a_reason() {
    let node = Command::new(env!("CARGO_BIN_EXE_tidemill-kvpool"))
        .args(["--coordinators", "127.0.0.1:1", "--nvme-capacity", "1MiB", "--data", "/nowhere", "--nvme-records", "rocksdb"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&node.stderr);
    assert!(!node.status.success() && said.contains("nvme_records") && said.contains("built without RocksDB"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_changed_on_disk_are_a_miss() {
    for (choice, store) in BOTH.iter().flat_map(|&choice| STORES.iter().map(move |store| (choice, store))) {
        let data = tempfile::tempdir().unwrap();
        let node = start_of(data.path(), store).await;
        let client = node.client(choice).await;
        fill(&node, &client, ALL).await;
        let slab = File::options().read(true).write(true).open(data.path().join("slab")).unwrap();
        let stride = BLOCK_BYTES.next_multiple_of(4096) as u64;
        for slot in 0..DISK_SLOTS as u64 {
            let (at, mut byte) = (slot * stride + slot * 700, [0]);
            slab.read_exact_at(&mut byte, at).unwrap();
            slab.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        }
        slab.sync_all().unwrap();
        assert!(count_right(&client, ALL).await <= DRAM_SLOTS, "only what was in memory is left");
        node.told(|told| told.report.as_ref().is_some_and(|report| report.counters.disk.corrupt >= (ALL.len() - DRAM_SLOTS) as u64)).await;
        nothing_in_use(&node).await;
        fill(&node, &client, ALL).await;
        assert!(count_right(&client, ALL).await >= ON_DISK, "what was wrong can be put again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_leaves_a_node_without_one() {
    let data = tempfile::tempdir().unwrap();
    let node = start(data.path()).await;
    let client = node.client(TransportChoice::Auto).await;
    fill_disk(&node, &client).await;
    File::options().write(true).open(data.path().join("slab")).unwrap().set_len(0).unwrap();
    assert!(count_right(&client, ALL).await <= DRAM_SLOTS);
    node.told(|told| {
        let report = told.report.as_ref().unwrap();
        (report.counters.disk.given_up, report.blocks.nvme.total) == (1, 0) && told.keys.len() <= DRAM_SLOTS
    })
    .await;
    client.put(LINEAGE, blocks(100..108)).await.unwrap();
    assert_held(&client, 100..108).await;
    nothing_in_use(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_takes_no_more_leaves_a_node_without_one() {
    for store in STORES {
        take_no_more(store).await;
    }
}

async fn take_no_more(store: &str) {
    let data = tempfile::tempdir().unwrap();
    let node = start_of(data.path(), store).await;
    let client = node.client(TransportChoice::Auto).await;
    fill(&node, &client, ALL).await;
    // From now on, every write of the node to a file fails.
    let status = Command::new("prlimit").args(["--pid", &node.child.id().to_string(), "--fsize=0"]).status().unwrap();
    assert!(status.success());
    for n in (200..264).step_by(4) {
        client.put(LINEAGE, blocks(n..n + 4)).await.unwrap();
        assert_held(&client, n..n + 4).await;
    }
    node.told(|told| {
        let report = told.report.as_ref().unwrap();
        (report.counters.disk.given_up, report.blocks.nvme.total) == (1, 0) && report.counters.disk.errors > 0
    })
    .await;
    assert!(count_right(&client, ALL).await <= DRAM_SLOTS);
    client.put(LINEAGE, blocks(100..108)).await.unwrap();
    assert_held(&client, 100..108).await;
    nothing_in_use(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_room_leaves_a_node_without_one() {
    let data = tempfile::tempdir().unwrap();
    let node = start_with(data.path(), 1 << 50, STORES[0]).await;
    let client = node.client(TransportChoice::Auto).await;
    client.put(LINEAGE, blocks(0..8)).await.unwrap();
    assert_held(&client, 0..8).await;
    node.told(|told| told.report.as_ref().is_some_and(|report| (report.counters.disk.given_up, report.blocks.nvme.total) == (1, 0))).await;
}
