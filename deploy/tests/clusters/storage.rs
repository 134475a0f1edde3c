//! Faults of a pool node's memory and disk while it serves: no answer changes, losses are counted, and the node continues.

use crate::support::{
    Answer, Case, Cluster, DISAGGREGATED, SHORT_OF_MEMORY, assert_same, complete_all, member, mixed_cases, reference, reference_with,
    reusable, terminate,
};
use serde_json::Value;
use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// Memory for a prompt or two, and a disk that holds all of them.
const ON_DISK: &[&str] = &["--pool-memory", "1MiB", "--pool-nvme", "64MiB", "--prefill", "1", "--decode", "1"];
/// The interval of flipped bits, smaller than a block, so that every block is hit.
const PAGE: u64 = 4096;

/// The file behind the memory that a pool node shares.
fn arena(pid: u32) -> PathBuf {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("the node runs").flatten().map(|entry| entry.path());
    let mut arenas = open.filter(|path| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:tidemill-kvpool")));
    arenas.next().expect("an arena")
}

/// Checks that only the owner has access to the files and directories below a directory.
fn assert_private(dir: &Path) {
    for entry in fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry")) {
        let metadata = entry.metadata().expect("it is there");
        assert_eq!(metadata.mode() & 0o077, 0, "{}", entry.path().display());
        if metadata.is_dir() {
            assert_private(&entry.path());
        }
    }
}

/// Flips a bit at every `step` bytes of a file, from `first` on.
fn flip(path: &Path, first: u64, step: u64) {
    let file = File::options().read(true).write(true).open(path).expect("a file of our own");
    let length = file.metadata().expect("its length").len();
    for at in (first..length).step_by(step as usize) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("its bytes");
        file.write_all_at(&[byte[0] ^ 0x10], at).expect("its bytes");
    }
    file.sync_all().expect("its bytes, where the node reads them");
}

/// Makes a process's writes fail, by setting the limit on its files' size to 0.
fn forbid_writing(pid: u32) {
    let status = Command::new("prlimit").args(["--pid", &pid.to_string(), "--fsize=0"]).status().expect("util-linux is installed");
    assert!(status.success(), "prlimit ended with {status}");
}

fn cached(answers: &[Answer], cases: &[Case]) -> (u64, u64) {
    (answers.iter().map(Answer::cached).sum(), cases.iter().map(reusable).sum())
}

async fn misses(cluster: &Cluster, reason: &str) -> f64 {
    cluster.settled_metric("tidemill_kv_misses_total", &[format!("reason=\"{reason}\"")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_changed_in_memory_are_computed_again() {
    let cases = mixed_cases(6);
    let reference = reference(&cases).await;
    for transport in ["auto", "quic"] {
        let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, &["--transport", transport, "--decode", "1"]].concat());
        assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "cold");
        cluster.at_rest().await;
        let node = member(&cluster.cluster().await, "kvpool-0");
        let dram = &node["report"]["blocks"]["dram"];
        let [slots, block_bytes] = ["total", "bytes_per_block"].map(|name| dram[name].as_u64().expect("a number"));
        // Slots are contiguous at the end of the arena.
        let arena = arena(cluster.pid("kvpool-0").await);
        let length = fs::metadata(&arena).expect("the arena").len();
        flip(&arena, length - slots * block_bytes + block_bytes / 2, 16 * block_bytes);

        let again = complete_all(&cluster, &cases, 4).await;
        assert_same(&reference, &again, &cases, &format!("{transport}, with other bytes in memory"));
        assert!(misses(&cluster, "corrupt").await > 0.0, "{transport}: what was wrong is counted");
        // A reader notices the first wrong block of a chain, and does not check the ones after it.
        let mut healed = false;
        for _ in 0..10 {
            let again = complete_all(&cluster, &cases, 1).await;
            assert_same(&reference, &again, &cases, &format!("{transport}, after that"));
            let (cached, total) = cached(&again, &cases);
            healed |= cached * 10 >= total * 9;
        }
        assert!(healed, "{transport}: what was wrong was computed and put again");
        cluster.at_rest().await;
        cluster.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_changed_on_disk_are_computed_again() {
    let cases = mixed_cases(7);
    let reference = reference(&cases).await;
    let data = tempfile::tempdir().expect("a directory");
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, ON_DISK, &["--data", data.path().to_str().expect("text")]].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "cold");
    cluster.at_rest().await;
    flip(&data.path().join("kvpool-0/slab"), 0, PAGE);
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "with other bytes on disk");
    assert!(misses(&cluster, "disk_corrupt").await > 0.0, "what was wrong is counted");
    let healed = complete_all(&cluster, &cases, 1).await;
    assert_same(&reference, &healed, &cases, "after that");
    let nvme: u64 = healed.iter().map(|answer| answer.source("nvme")).sum();
    assert!(nvme > 0, "the disk is still of use");
    cluster.at_rest().await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_takes_no_more_leaves_a_node_without_one() {
    let (before, after) = (mixed_cases(8), mixed_cases(9));
    let cases = [&before[..], &after[..]].concat();
    let reference = reference(&cases).await;
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, ON_DISK].concat());
    assert_same(&reference, &complete_all(&cluster, &before, 4).await, &before, "cold");
    forbid_writing(cluster.pid("kvpool-0").await);
    // New blocks evict old ones from memory, and the disk accepts none.
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "with a disk that takes no more");
    let given_up = |c: &Value| {
        let report = &member(c, "kvpool-0")["report"];
        report["counters"]["disk"]["given_up"] == 1 && report["blocks"]["nvme"]["total"] == 0 && report["blocks"]["dram"]["cached"] != 0
    };
    cluster.until("going on without a disk", given_up).await;
    assert_eq!(cluster.metric("tidemill_kv_disk_given_up", &[]).await, 1.0);
    assert!(cluster.metric("tidemill_kv_disk_errors_total", &[]).await >= 1.0);
    let without = complete_all(&cluster, &cases, 4).await;
    assert_same(&reference, &without, &cases, "without a disk");
    assert_eq!(without.iter().map(|answer| answer.source("nvme")).sum::<u64>(), 0, "nothing comes from it any more");
    cluster.at_rest().await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_leaves_hands_over_what_is_on_its_disk() {
    let cases = mixed_cases(11);
    let reference = reference(&cases).await;
    // All work is on the first host, so all blocks are at the first node. A quarter of them fit its memory.
    let two: &[&str] = &["--pool-memory", "512KiB", "--pool-nvme", "64MiB", "--kvpool", "2", "--hosts", "2"];
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, two].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 1).await, &cases, "cold");
    cluster.at_rest().await;
    let indexed = |c: &Value, node: &str| member(c, node)["indexed_blocks"].as_u64().expect("a number");
    let in_memory = |c: &Value| member(c, "kvpool-0")["report"]["blocks"]["dram"]["cached"].as_u64().expect("a number");
    cluster.until("blocks that are on disk only", |c| in_memory(c) > 0 && indexed(c, "kvpool-0") > in_memory(c)).await;
    let left_behind = indexed(&cluster.cluster().await, "kvpool-0");
    let leaving = cluster.pid("kvpool-0").await;
    terminate(leaving);
    cluster.gone(leaving).await;
    cluster.until("all of them at the other node", |c| indexed(c, "kvpool-1") >= left_behind).await;

    let after = complete_all(&cluster, &cases, 1).await;
    assert_same(&reference, &after, &cases, "after a node left");
    let (cached, total) = cached(&after, &cases);
    assert!(cached > 0, "{cached} of {total} tokens are still cached");
    cluster.at_rest().await;
    // Some processes are gone, so `stop` does not apply.
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_serves_the_model_that_it_was_written_for_and_no_other() {
    let cases = mixed_cases(10);
    // The other model's blocks have the same size but different contents.
    let other: &[&str] = &["--quantize", "int8"];
    let references = [reference(&cases).await, reference_with(other, &cases).await];
    assert!(references[0].iter().zip(&references[1]).any(|(a, b)| a.tokens != b.tokens), "the models differ");
    let data = tempfile::tempdir().expect("a directory");
    let kept: &[&str] = &["--data", data.path().to_str().expect("text")];
    for (flags, reference, from_disk) in
        [(&[][..], &references[0], false), (&[], &references[0], true), (other, &references[1], false), (other, &references[1], true)]
    {
        let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, ON_DISK, kept, flags].concat());
        let answers = complete_all(&cluster, &cases, 1).await;
        assert_same(reference, &answers, &cases, &format!("{flags:?}, written before: {from_disk}"));
        let (cached, total) = cached(&answers, &cases);
        if from_disk {
            // Blocks that were only in memory are lost.
            assert!(cached * 4 > total, "{cached} of {total} tokens were there after the restart");
        } else {
            assert_eq!(cached, 0, "another model's blocks are nobody's");
        }
        cluster.at_rest().await;
        cluster.stop();
    }
    assert_private(data.path());
}

/// Two pool nodes that share a directory, behind workers whose device memory is too small for all prompts.
fn sharing(shared: &Path) -> Vec<String> {
    let url = format!("file://{}", shared.display());
    let flags = ["--kvpool", "2", "--prefill", "1", "--decode", "1", "--pool-objects", &url, "--pool-objects-uses", "1"];
    [DISAGGREGATED, SHORT_OF_MEMORY].concat().into_iter().chain(flags).map(str::to_owned).collect()
}

fn strs(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Whether the coordinator knows that a pool node has blocks in object storage, and how fast they are read.
fn knows_objects(cluster: &Value, node: &str) -> bool {
    let report = &member(cluster, node)["report"];
    let blocks = report["blocks"]["object"]["cached"].as_u64().unwrap_or_default();
    blocks > 0 && report["counters"]["objects"]["latency_ms"].as_f64().unwrap_or_default() > 0.0
}

/// A cluster that has nothing but the shared directory in which another one left its blocks, and whose pool nodes have seen them.
async fn restarted(shared: &Path, cases: &[Case], reference: &[Answer]) -> Cluster {
    let flags = sharing(shared);
    let cluster = Cluster::start(&strs(&flags));
    assert_same(reference, &complete_all(&cluster, cases, 1).await, cases, "cold");
    cluster.at_rest().await;
    cluster.stop();
    let cluster = Cluster::start(&strs(&flags));
    // A node looks into the directory once a worker has told it of the blocks' size, which the first job for this node does. Which node
    // that is depends on the prompt.
    for seed in 1000..1100 {
        complete_all(&cluster, &mixed_cases(seed)[..2], 1).await;
        let now = cluster.cluster().await;
        if ["kvpool-0", "kvpool-1"].iter().all(|node| knows_objects(&now, node)) {
            return cluster;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("a node has seen nothing in object storage: {:#}", cluster.cluster().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_starts_with_nothing_finds_its_prefixes_in_object_storage() {
    let cases = mixed_cases(12);
    let reference = reference(&cases).await;
    let shared = tempfile::tempdir().expect("a directory");
    let cluster = restarted(shared.path(), &cases, &reference).await;
    assert_private(shared.path());
    let after = complete_all(&cluster, &cases, 1).await;
    assert_same(&reference, &after, &cases, "after a restart of everything");
    let (cached, total) = cached(&after, &cases);
    assert!(cached * 4 > total, "{cached} of {total} tokens were found in object storage");
    assert!(after.iter().map(|answer| answer.source("object")).sum::<u64>() > 0, "and come from there");
    cluster.at_rest().await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn object_storage_with_other_bytes_or_none_changes_no_answer() {
    let cases = mixed_cases(13);
    let reference = reference(&cases).await;
    let shared = tempfile::tempdir().expect("a directory");
    let cluster = restarted(shared.path(), &cases, &reference).await;
    for folder in fs::read_dir(shared.path()).expect("the directory").flatten() {
        fs::read_dir(folder.path()).expect("a folder").flatten().for_each(|pack| flip(&pack.path(), 0, PAGE));
    }
    assert_same(&reference, &complete_all(&cluster, &cases, 2).await, &cases, "with other bytes in object storage");
    assert!(misses(&cluster, "object_corrupt").await > 0.0, "what was wrong is counted");
    fs::remove_dir_all(shared.path()).expect("the directory");
    assert_same(&reference, &complete_all(&cluster, &cases, 2).await, &cases, "without a directory");
    cluster.at_rest().await;
    cluster.stop();
}
