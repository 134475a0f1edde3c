//! Pool nodes that share a directory, in their own processes: blocks that one wrote are served by another, and faults of the directory are
//! misses.

use crate::support::*;
use nix::sys::signal::Signal;
use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tidemill_kvpool::client::{Miss, PoolClient, TransportChoice};
use tidemill_proto::{block::LayoutFingerprint, pool::Tier};

const SLOTS: usize = 32;
const ALL: Range<u16> = 0..24;

async fn start(shared: &Path, flags: &[&str]) -> Node {
    let url = format!("file://{}", shared.display());
    Node::start(SLOTS, &[&["--object-store", &url], flags].concat()).await
}

/// Flags to refresh and write often.
const SOON: &[&str] = &["--object-refresh-s", "1", "--object-flush-s", "1"];
/// Flags to refresh once, and write at the end.
const ONCE: &[&str] = &["--object-refresh-s", "3600", "--object-flush-s", "3600"];

/// Puts blocks and reads them once, so that they are worth writing.
async fn fill(client: &PoolClient, range: Range<u16>) {
    client.put(LINEAGE, blocks(range.clone())).await.unwrap();
    assert_held(client, range).await;
}

/// Ends a node as an operator does. It had neither a disk nor peers.
async fn stop(mut node: Node) {
    node.signal(Signal::SIGTERM);
    let ended = tokio::task::spawn_blocking(move || node.child.wait().unwrap()).await.unwrap();
    assert!(ended.success(), "{ended}");
}

/// Fills a directory with all blocks, written by a node that has ended.
async fn written(shared: &Path) {
    let node = start(shared, ONCE).await;
    fill(&node.client(TransportChoice::Auto).await, ALL).await;
    stop(node).await;
    assert_eq!(packs(shared).len(), 1);
}

fn packs(shared: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(shared).unwrap().map(|folder| folder.unwrap().path());
    folders.flat_map(|folder| fs::read_dir(folder).unwrap()).map(|pack| pack.unwrap().path()).collect()
}

async fn knows_all(node: &Node) {
    node.told(|told| keys(ALL).iter().all(|key| told.keys.contains(key))).await;
}

/// Gets all blocks; asserts that those that arrive are right, and counts them.
async fn count_right(client: &PoolClient) -> usize {
    let mut right = 0;
    for (n, result) in ALL.zip(fetch(client, keys(ALL), Duration::ZERO).await) {
        match result {
            Ok(block) => {
                assert!(block.bytes == bytes(n), "block {n} has other bytes");
                right += 1;
            }
            Err(miss) => assert_eq!(miss, Miss::Absent, "block {n}"),
        }
    }
    right
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_start_with_nothing_find_what_others_wrote() {
    let shared = tempfile::tempdir().unwrap();
    written(shared.path()).await;
    let pack = packs(shared.path())[0].metadata().unwrap();
    assert_eq!((pack.mode() & 0o077, pack.len()), (0, 24 * (BLOCK_BYTES as u64 + 80) + 56), "its user's alone");
    for choice in BOTH {
        let node = start(shared.path(), SOON).await;
        let client = node.client(choice).await;
        knows_all(&node).await;
        let found = fetch(&client, keys(ALL), Duration::ZERO).await;
        assert!(ALL.zip(found).all(|(n, block)| block.is_ok_and(|block| block.bytes == bytes(n) && block.tier == Tier::Object)));
        assert_held(&client, ALL).await;
        node.told(|told| {
            let counters = &told.report.as_ref().unwrap().counters.objects;
            (counters.loaded.bytes, counters.errors) == (24 * BLOCK_BYTES as u64, 0) && counters.bytes_per_ms > 0.0
        })
        .await;
        // A node for another model finds no blocks.
        let other = start(shared.path(), SOON).await;
        let client = other.client_of(LayoutFingerprint([6; 16]), choice).await;
        assert_eq!(count_right(&client).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_run_learn_of_each_others_blocks() {
    let shared = tempfile::tempdir().unwrap();
    let (one, other) = (start(shared.path(), SOON).await, start(shared.path(), SOON).await);
    let (writer, reader) = (one.client(TransportChoice::Auto).await, other.client(TransportChoice::Auto).await);
    writer.put(LINEAGE, blocks(0..4)).await.unwrap();
    // Those that are written later would have been in one pack with these.
    fill(&writer, 4..8).await;
    other.told(|told| keys(4..8).iter().all(|key| told.keys.contains(key))).await;
    assert!(keys(0..4).iter().all(|key| !other.told.lock().unwrap().keys.contains(key)), "used once");
    assert_held(&writer, 0..4).await;
    other.told(|told| keys(0..4).iter().all(|key| told.keys.contains(key))).await;
    assert_held(&reader, 0..4).await;
    // Blocks that are gone from the directory are gone from the index, except those in memory.
    fs::remove_dir_all(shared.path()).unwrap();
    let third = start(shared.path(), SOON).await;
    let _client = third.client(TransportChoice::Auto).await;
    fill(&writer, 8..12).await;
    third.told(|told| keys(8..12).iter().all(|key| told.keys.contains(key))).await;
    assert_eq!(third.told.lock().unwrap().keys.len(), 4, "it has looked, and found what is there by now");
    assert_held(&reader, 0..4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_changed_and_packs_that_are_gone_are_misses() {
    let shared = tempfile::tempdir().unwrap();
    written(shared.path()).await;
    let node = start(shared.path(), ONCE).await;
    let client = node.client(TransportChoice::Auto).await;
    knows_all(&node).await;
    let pack = &packs(shared.path())[0];
    let file = File::options().read(true).write(true).open(pack).unwrap();
    for n in (0..24).step_by(3) {
        let (at, mut byte) = (n * BLOCK_BYTES as u64 + 700, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
    assert_eq!(count_right(&client).await, 16);
    node.told(|told| told.report.as_ref().unwrap().counters.objects.corrupt == 8).await;

    let node = start(shared.path(), ONCE).await;
    let client = node.client(TransportChoice::Auto).await;
    knows_all(&node).await;
    fs::remove_file(pack).unwrap();
    let started = Instant::now();
    assert_eq!(count_right(&client).await, 0);
    assert!(started.elapsed() < Duration::from_secs(1), "misses come at once: {:?}", started.elapsed());
    fill(&client, ALL).await;
    stop(node).await;
    assert_eq!(packs(shared.path()).len(), 1, "what is gone is written again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_cannot_be_written_leaves_a_node_that_works() {
    // Not even root may create directories there.
    let node = start(Path::new("/proc/self/kv"), SOON).await;
    let client = node.client(TransportChoice::Auto).await;
    fill(&client, ALL).await;
    node.told(|told| told.report.as_ref().is_some_and(|report| report.counters.objects.errors > 0)).await;
    assert_held(&client, ALL).await;
    stop(node).await;
}

/// The pool nodes' part of `tests/python/test_object_storage.py`, which tests a whole cluster. Credentials and region also come from the
/// environment.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an S3 server with a bucket kv-blocks; its URL is in TIDEMILL_TEST_S3"]
async fn an_s3_server_is_a_place_like_a_directory() {
    let server = std::env::var("TIDEMILL_TEST_S3").expect("the URL of an S3 server");
    let url = format!("s3://kv-blocks/{}", std::process::id());
    let flags = |more: &[&str]| {
        let flags = [&["--object-store", &url, "--object-endpoint", &server][..], more].concat();
        flags.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let start = async |more: &[&str]| Node::start(SLOTS, &flags(more).iter().map(String::as_str).collect::<Vec<_>>()).await;
    let node = start(ONCE).await;
    fill(&node.client(TransportChoice::Auto).await, ALL).await;
    stop(node).await;

    let node = start(ONCE).await;
    let client = node.client(TransportChoice::Auto).await;
    knows_all(&node).await;
    let started = Instant::now();
    let found = fetch(&client, keys(ALL), Duration::ZERO).await;
    assert!(ALL.zip(found).all(|(n, block)| block.is_ok_and(|block| block.bytes == bytes(n) && block.tier == Tier::Object)));
    println!("{} blocks of {BLOCK_BYTES} bytes in {:?}", ALL.len(), started.elapsed());
    node.told(|told| told.report.as_ref().unwrap().counters.objects.loaded.bytes == 24 * BLOCK_BYTES as u64).await;
    println!("{:?}", node.told.lock().unwrap().report.as_ref().unwrap().counters.objects);

    // The capacity is for one pack: the older one leaves.
    let node = start(&["--object-flush-s", "1", "--object-capacity", "3000000"]).await;
    let client = node.client(TransportChoice::Auto).await;
    knows_all(&node).await;
    fill(&client, 100..124).await;
    node.told(|told| told.report.as_ref().is_some_and(|report| report.counters.objects.deletes == 1)).await;
    node.told(|told| !keys(ALL).iter().any(|key| told.keys.contains(key))).await;

    // No server listens at this address.
    let node = Node::start(SLOTS, &["--object-store", &url, "--object-endpoint", "http://127.0.0.1:9", "--object-flush-s", "1"]).await;
    let client = node.client(TransportChoice::Auto).await;
    fill(&client, ALL).await;
    node.told(|told| told.report.as_ref().is_some_and(|report| report.counters.objects.errors > 0)).await;
    assert_held(&client, ALL).await;
}
