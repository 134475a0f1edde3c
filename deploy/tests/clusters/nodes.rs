//! Several pool nodes on several simulated hosts. Blocks are read from the node that has them, and the loss of a node, writer or reader
//! during a transfer never shows in an answer.

use crate::support::{
    Answer, Cluster, DISAGGREGATED, SHORT_OF_MEMORY, assert_same, complete_all, crash, member, mixed_cases, pause, reference, resume,
    reusable, terminate,
};
use serde_json::Value;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tidemill_net::{identity::Identity, link::Endpoint};
use tidemill_proto::{
    block::{BlockKey, Chain, LayoutFingerprint, Tenant},
    frame::Preamble,
    ids::RequestId,
    pool::{BlockFormat, CallId, FromPool, Lineage, Reservation, Room, ToPool},
};

fn tokens(answers: &[Answer], source: &str) -> u64 {
    answers.iter().map(|answer| answer.source(source)).sum()
}

/// The most reads until all blocks are copied: a generous bound, since one suffices on a machine that keeps up.
const READINGS_UNTIL_COPIED: usize = 10;

#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_read_from_another_host_and_copied_when_they_are_hot() {
    let cases = mixed_cases(1);
    let reference = reference(&cases).await;
    let flags = [DISAGGREGATED, SHORT_OF_MEMORY, &["--hosts", "2", "--kvpool", "2", "--prefill", "2", "--decode", "2"]].concat();
    let cluster = Cluster::start(&flags);
    let cold = complete_all(&cluster, &cases, 1).await;
    assert_same(&reference, &cold, &cases, "two hosts, cold");
    let total: u64 = cases.iter().map(reusable).sum();
    assert_eq!((tokens(&cold, "prefill"), tokens(&cold, "remote")), (total, 0), "blocks were handed over near the decode worker");

    // Sent one at a time, all requests went to the same decode worker. The other worker is on the other host.
    let first = cold[0].usage["tidemill"]["decode_worker"].as_str().expect("a name").to_owned();
    let first = cluster.pid(&first).await;
    terminate(first);
    cluster.gone(first).await;
    // By default a block is copied when it is read from another host for the third time.
    for time in 1..=3 {
        let far = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &far, &cases, "from the other host");
        let (remote, hbm) = (tokens(&far, "remote"), tokens(&far, "hbm"));
        assert!(remote + hbm == total && remote > hbm, "reading for the {time}. time, {remote} tokens were remote and {hbm} in HBM");
    }
    // Copies are put in the background; one that fails is tried again at the next read.
    let mut near = (0, 0);
    for _ in 0..READINGS_UNTIL_COPIED {
        let again = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &again, &cases, "while copies are made, or from them");
        near = (tokens(&again, "dram"), tokens(&again, "hbm"));
        if (near.0 + near.1) * 10 >= total * 9 {
            break;
        }
    }
    let (dram, hbm) = near;
    assert!(dram > hbm && (dram + hbm) * 10 >= total * 9, "{dram} tokens came from the near node and {hbm} from HBM, of {total}");
    cluster.at_rest().await;
    // Some processes are gone, so `stop` does not apply.
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_leaves_hands_its_blocks_over() {
    let cases = mixed_cases(2);
    let reference = reference(&cases).await;
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, &["--kvpool", "2"]].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "cold");
    // The node with the most blocks leaves.
    let view = cluster.cluster().await;
    let blocks = |name: &str| member(&view, name)["indexed_blocks"].as_u64().expect("a number");
    let leaving = cluster.pid(["kvpool-0", "kvpool-1"].into_iter().max_by_key(|name| blocks(name)).expect("two")).await;
    let has_left = AtomicBool::new(false);
    // At least one round of requests begins before the node leaves, and one after it has left.
    let serve = async {
        loop {
            let last = has_left.load(Ordering::Relaxed);
            assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "while a node leaves");
            if last {
                break;
            }
        }
    };
    let leave = async {
        cluster.until("requests running", |c| c["sequences_running"].as_u64() > Some(0)).await;
        terminate(leaving);
        cluster.gone(leaving).await;
        has_left.store(true, Ordering::Relaxed);
    };
    tokio::join!(serve, leave);
    let after = complete_all(&cluster, &cases, 1).await;
    assert_same(&reference, &after, &cases, "after a node left");
    let (cached, total) = (after.iter().map(Answer::cached).sum::<u64>(), cases.iter().map(reusable).sum::<u64>());
    assert!(cached * 10 >= total * 9, "{cached} of {total} tokens are still cached");
    cluster.at_rest().await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_transfers_costs_misses_only() {
    let cases = mixed_cases(3);
    let reference = reference(&cases).await;
    for transport in ["auto", "quic"] {
        let flags = [DISAGGREGATED, SHORT_OF_MEMORY, &["--kvpool", "2", "--transport", transport]].concat();
        let cluster = Cluster::start(&flags);
        assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "cold");
        let victim = cluster.pids("kvpool").await[0];
        // The victim is paused first, so that transfers to and from it are in flight when it dies.
        let kill = async {
            pause(victim);
            cluster.until("requests running", |c| c["sequences_running"].as_u64() > Some(0)).await;
            // Neither side reports a transfer that waits: so this is a time. The misses below prove that it was long enough.
            tokio::time::sleep(Duration::from_millis(300)).await;
            crash(victim);
        };
        let (answers, ()) = tokio::join!(complete_all(&cluster, &cases, 4), kill);
        assert_same(&reference, &answers, &cases, "while a node dies");
        cluster.gone(victim).await;
        let misses = cluster.settled_metric("tidemill_kv_misses_total", &["reason=\"unreachable\"".to_owned()]).await;
        assert!(misses > 0.0, "{transport}: what the node had was missed");
        assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "after a node died");
        cluster.at_rest().await;
        drop(cluster);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_paused_past_its_lease_reads_nothing_wrong() {
    let cases = mixed_cases(4);
    let reference = reference(&cases).await;
    // A small pool, so that slots are reused while the reader sleeps.
    let flags = ["--pool-memory", "2MiB", "--pool-lease-ms", "200", "--prefill", "1", "--decode", "1"];
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, &flags].concat());
    let reader = cluster.pids("decode").await[0];
    let pauses = async {
        loop {
            pause(reader);
            // Longer than its leases.
            tokio::time::sleep(Duration::from_millis(600)).await;
            resume(reader);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let twice = [&cases[..], &cases[..]].concat();
    let answers = tokio::select! {
        answers = complete_all(&cluster, &twice, 4) => answers,
        () = pauses => unreachable!("pauses go on"),
    };
    resume(reader);
    assert_same(&[&reference[..], &reference[..]].concat(), &answers, &twice, "with a reader that sleeps");
    cluster.at_rest().await;
    cluster.stop();
}

/// Reserves slots for blocks, never writes or revokes them, and stays connected.
async fn reserve_and_fall_silent(cluster: &Value, pki: &std::path::Path, keys: Vec<BlockKey>) -> Endpoint {
    let node = member(cluster, "kvpool-0");
    let addr = node["addr"].as_str().expect("an address").parse().expect("an address");
    let layout = layout(cluster);
    let endpoint = Endpoint::bind_client(([127, 0, 0, 1], 0).into(), &Identity::load(pki).expect("certificates")).expect("a socket");
    let connection = endpoint.connect(addr).await.expect("the node listens");
    let (mut sender, mut receiver) = connection.open::<ToPool, FromPool>(Preamble::Pool).await.expect("a stream");
    let lineage = Lineage { origin: RequestId(0), tenant: Tenant::of_salt(b""), parent: None, position: 0 };
    let blocks = keys.len();
    let block_bytes = node["report"]["blocks"]["dram"]["bytes_per_block"].as_u64().expect("a number");
    let hello = ToPool::Hello(BlockFormat::whole(layout, block_bytes).into());
    for message in [hello, ToPool::PutStart { call: CallId(0), lineage, room: Room::Made, keys }] {
        sender.send(&message).await.expect("the node reads");
    }
    assert!(matches!(receiver.recv().await, Ok(Some(FromPool::Welcome { .. }))));
    let Ok(Some(FromPool::PutStarted { answers, .. })) = receiver.recv().await else { panic!("no answer") };
    assert_eq!(answers.iter().filter(|answer| matches!(answer, Reservation::Write(_))).count(), blocks);
    // A writer that was killed does not close its connection either.
    std::mem::forget((sender, receiver, connection));
    endpoint
}

fn layout(cluster: &Value) -> LayoutFingerprint {
    let hex = cluster["layout"].as_str().expect("a fingerprint");
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hexadecimal");
    LayoutFingerprint(std::array::from_fn(byte))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_dies_between_start_and_end_of_a_put_holds_nobody_up() {
    let cases = mixed_cases(5);
    let reference = reference(&cases).await;
    let data = tempfile::tempdir().expect("a directory");
    let flags = ["--data", data.path().to_str().expect("text"), "--pool-put-deadline-ms", "1000"];
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, &flags].concat());
    // The node learns from its first clients how large a block is.
    assert_same(&reference[..1], &complete_all(&cluster, &cases[..1], 1).await, &cases[..1], "first");
    cluster.until("the arena", |c| member(c, "kvpool-0")["report"]["blocks"]["dram"]["bytes_per_block"].as_u64() > Some(0)).await;
    let view = cluster.cluster().await;
    let mut silent = Vec::new();
    for case in &cases[1..] {
        let keys = Chain::new(&layout(&view), b"", &case.prompt).keys().to_vec();
        silent.push(reserve_and_fall_silent(&view, &data.path().join("pki/decode/decode-0"), keys).await);
    }
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "with blocks that never come");
    cluster.at_rest().await;
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, "after that");
    drop(silent);
    cluster.at_rest().await;
    cluster.stop();
}
