//! A pool node in its own process, and clients that reach it over shared memory and over QUIC.

use crate::support::*;
use nix::sys::signal::Signal;
use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    ops::Range,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_kvpool::{
    arena::Arena,
    client::{Miss, PoolClient, PoolError, PutReport, TransferCounters, Transport, TransportChoice},
};
use tidemill_net::{
    identity::Identity,
    link::{Connection, Endpoint, Receiver, Sender},
};
use tidemill_proto::{
    block::{BlockKey, Shard},
    frame::Preamble,
    pool::{
        ArenaInfo, CallId,
        Direction::{Get, Put},
        FromPool, Reservation, Room, ToPool,
    },
};
use twox_hash::XxHash3_64;

/// A time longer than any of these tests may take, for waits that an event ends.
const LONG: Duration = Duration::from_secs(60);

/// A client that speaks the protocol by hand.
async fn raw_client(node: &Node) -> (Connection, Sender<ToPool>, Receiver<FromPool>, ArenaInfo) {
    let connection = node.endpoint.connect(node.addr).await.unwrap();
    let (mut sender, mut receiver) = connection.open::<ToPool, FromPool>(Preamble::Pool).await.unwrap();
    sender.send(&ToPool::Hello(FORMAT.into())).await.unwrap();
    let Some(FromPool::Welcome { arena }) = receiver.recv().await.unwrap() else { panic!("not welcome") };
    (connection, sender, receiver, arena)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_client_puts_another_gets() {
    for (writer, reader) in BOTH.into_iter().flat_map(|a| BOTH.map(|b| (a, b))) {
        let node = Node::start(64, &[]).await;
        let (writer, reader) = (node.client(writer).await, node.client(reader).await);
        assert_eq!(reader.match_prefix(&keys(0..30)).await.unwrap(), 0);
        let report = writer.put(LINEAGE, blocks(0..30)).await.unwrap();
        assert_eq!(report, PutReport { written: 30, held: 0, refused: 0 });
        assert_eq!(reader.match_prefix(&keys(0..40)).await.unwrap(), 30);
        assert_held(&reader, 0..30).await;
        let misses = fetch(&reader, keys(28..32), Duration::ZERO).await;
        assert!(misses[..2].iter().all(Result::is_ok) && misses[2..].iter().all(|miss| matches!(miss, Err(Miss::Absent))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cheapest_transport_is_used_and_quic_can_be_forced() {
    let node = Node::start(8, &[]).await;
    for (choice, transport) in [(TransportChoice::Auto, Transport::Shm), (TransportChoice::Quic, Transport::Quic)] {
        assert_eq!(node.client(choice).await.transport(), transport);
    }
    let counters = Arc::new(TransferCounters::default());
    let connect = tidemill_kvpool::client::PoolClient::connect;
    let client = connect(&node.endpoint, node.addr, FORMAT, TransportChoice::Quic, Arc::clone(&counters)).await.unwrap();
    client.put(LINEAGE, blocks(0..3)).await.unwrap();
    assert_held(&client, 0..2).await;
    fetch(&client, keys(7..8), Duration::ZERO).await;
    let (transfer, misses) = counters.snapshot();
    let block = BLOCK_BYTES as u64;
    assert_eq!(
        (transfer[(Transport::Quic, Put)].bytes, transfer[(Transport::Quic, Get)].bytes, transfer[(Transport::Shm, Get)].bytes),
        (3 * block, 2 * block, 0)
    );
    assert_eq!((misses.absent, misses.corrupt), (1, 0));
    node.told(|told| told.report.as_ref().is_some_and(|report| report.counters.transfer[(Transport::Quic, Get)].bytes == 2 * block)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_waits_for_blocks_that_nobody_has_reserved_yet() {
    for choice in BOTH {
        let node = Node::start(64, &[]).await;
        let (writer, reader) = (node.client(choice).await, node.client(choice).await);
        let mut fetch = reader.get(keys(0..20), LONG);
        for n in [5..10, 0..5, 10..20] {
            writer.put(LINEAGE, blocks(n.clone())).await.unwrap();
            let mut arrived = BTreeSet::new();
            for _ in n.clone() {
                let (index, result) = fetch.next().await.unwrap();
                assert!(result.unwrap().read().unwrap().bytes == bytes(index as u16));
                arrived.insert(index as u16);
            }
            assert_eq!(arrived, n.collect(), "blocks arrive when they are put");
        }
        assert!(fetch.next().await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_with_a_miss() {
    for choice in BOTH {
        let node = Node::start(8, &[]).await;
        let client = node.client(choice).await;
        client.put(LINEAGE, blocks(0..1)).await.unwrap();
        let results = fetch(&client, keys(0..3), Duration::from_millis(200)).await;
        assert!(matches!(results[..], [Ok(_), Err(Miss::Absent), Err(Miss::Absent)]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_twice() {
    for choice in BOTH {
        let node = Node::start(64, &[]).await;
        let (a, b) = (node.client(choice).await, node.client(choice).await);
        a.put(LINEAGE, blocks(0..10)).await.unwrap();
        assert_eq!(b.put(LINEAGE, blocks(0..12)).await.unwrap(), PutReport { written: 2, held: 10, refused: 0 });
        let (a, b) = tokio::join!(a.put(LINEAGE, blocks(20..40)), b.put(LINEAGE, blocks(20..40)));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((a.written + b.written, a.held + b.held), (20, 20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn under_pressure_the_oldest_chain_leaves_from_its_end() {
    for choice in BOTH {
        let node = Node::start(16, &[]).await;
        let client = node.client(choice).await;
        client.put(LINEAGE, blocks(0..8)).await.unwrap();
        client.put(LINEAGE, blocks(100..108)).await.unwrap();
        assert_held(&client, 0..8).await;
        client.put(LINEAGE, blocks(200..204)).await.unwrap();
        assert_eq!(client.match_prefix(&keys(0..8)).await.unwrap(), 8, "used last");
        assert_eq!(client.match_prefix(&keys(100..108)).await.unwrap(), 4, "its end made room");
        let held = BTreeSet::from_iter([keys(0..8), keys(100..104), keys(200..204)].concat());
        node.told(|told| told.keys == held).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_fits_is_refused_in_part_and_what_fits_is_held() {
    for choice in BOTH {
        let node = Node::start(16, &[]).await;
        let client = node.client(choice).await;
        assert_eq!(client.put(LINEAGE, blocks(0..20)).await.unwrap(), PutReport { written: 16, held: 0, refused: 4 });
        assert_held(&client, 0..16).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_fetch_leaves_nothing_behind() {
    for choice in BOTH {
        let node = Node::start(64, &[]).await;
        let client = node.client(choice).await;
        client.put(LINEAGE, blocks(0..60)).await.unwrap();
        for _ in 0..20 {
            let mut fetch = client.get(keys(0..70), LONG);
            fetch.next().await.unwrap().1.unwrap();
        }
        // All leases must end before a chain of this length finds room.
        let mut report = PutReport::default();
        for _ in 0..100 {
            report = client.put(LINEAGE, blocks(100..164)).await.unwrap();
            if report.refused == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(report.refused, 0);
        node.told(|told| told.report.as_ref().is_some_and(|report| report.blocks.dram.used == 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_is_given_up_blocks_nobody() {
    for choice in BOTH {
        let node = Node::start(64, &["--put-deadline-ms", "60000"]).await;
        let (a, b) = (node.client(choice).await, node.client(choice).await);
        for _ in 0..20 {
            // The put is cancelled after the first few polls, at any point.
            let _ = tokio::time::timeout(Duration::from_micros(700), a.put(LINEAGE, blocks(0..60))).await;
        }
        let mut held = 0;
        for _ in 0..200 {
            let report = b.put(LINEAGE, blocks(0..60)).await.unwrap();
            held = b.match_prefix(&keys(0..60)).await.unwrap();
            if held == 60 {
                break;
            }
            assert!(report.refused + report.held > 0);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(held, 60);
        assert_held(&b, 0..60).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flipped_bytes_are_a_miss_and_the_block_can_be_put_again() {
    for choice in BOTH {
        let node = Node::start(8, &[]).await;
        let client = node.client(choice).await;
        client.put(LINEAGE, blocks(0..4)).await.unwrap();
        let (_connection, _sender, _receiver, info) = raw_client(&node).await;
        let arena = Arena::open(&info).unwrap();
        let slot = (0..arena.slots()).find(|&slot| arena.read_block(slot).0 == bytes(2)).unwrap();
        arena.write(slot, BLOCK_BYTES - 1, &[bytes(2)[BLOCK_BYTES - 1] ^ 0x40], &mut XxHash3_64::new());
        let results = fetch(&client, keys(0..4), Duration::ZERO).await;
        assert!(matches!(results[..], [Ok(_), Ok(_), Err(Miss::Corrupt), Ok(_)]));
        node.told(|told| told.keys == BTreeSet::from_iter([key(0), key(1), key(3)])).await;
        assert_eq!(client.put(LINEAGE, blocks(0..4)).await.unwrap(), PutReport { written: 1, held: 3, refused: 0 });
        assert_held(&client, 0..4).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moved_on_while_it_was_read_is_a_miss() {
    let node = Node::start(4, &[]).await;
    let client = node.client(TransportChoice::Auto).await;
    client.put(LINEAGE, blocks(0..1)).await.unwrap();
    let (_connection, _sender, _receiver, info) = raw_client(&node).await;
    let arena = Arena::open(&info).unwrap();
    let slot = (0..arena.slots()).find(|&slot| arena.read_block(slot).0 == bytes(0)).unwrap();
    arena.set_generation(slot, arena.read_block(slot).1.generation_after + 1);
    assert!(matches!(fetch(&client, keys(0..1), Duration::ZERO).await[..], [Err(Miss::Stale)]));
}

/// The other half of `a_writer_killed_between_start_and_end_holds_nothing_up`: reserves slots, reports it, and waits to be killed.
#[tokio::test]
#[ignore = "runs in a process of its own"]
async fn dying_writer() {
    let [pki, addr] = ["DYING_PKI", "DYING_POOL"].map(|name| std::env::var(name).unwrap());
    let endpoint = Endpoint::bind_client("127.0.0.1:0".parse().unwrap(), &Identity::load(pki.as_ref()).unwrap()).unwrap();
    let connection = endpoint.connect(addr.parse().unwrap()).await.unwrap();
    let (mut sender, mut receiver) = connection.open::<ToPool, FromPool>(Preamble::Pool).await.unwrap();
    sender.send(&ToPool::Hello(FORMAT.into())).await.unwrap();
    let Some(FromPool::Welcome { arena }) = receiver.recv().await.unwrap() else { panic!("not welcome") };
    let arena = Arena::open(&arena).unwrap();
    sender.send(&ToPool::PutStart { call: CallId(1), lineage: LINEAGE, room: Room::Made, keys: keys(0..8) }).await.unwrap();
    let Some(FromPool::PutStarted { answers, .. }) = receiver.recv().await.unwrap() else { panic!("no slots") };
    for answer in answers {
        let Reservation::Write(at) = answer else { panic!("{answer:?}") };
        arena.write(at.slot, 0, b"half a block", &mut XxHash3_64::new());
    }
    println!("\nreserved");
    std::future::pending().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_killed_between_start_and_end_holds_nothing_up() {
    for choice in BOTH {
        let node = Node::start(8, &["--put-deadline-ms", "1000"]).await;
        let client = node.client(choice).await;
        let mut waiting = client.get(keys(0..8), LONG);
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "node::dying_writer", "--ignored", "--nocapture"])
            .env("DYING_PKI", node.pki())
            .env("DYING_POOL", node.addr.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(writer.stdout.take().unwrap()).lines().map_while(Result::ok).any(|line| line == "reserved");
        assert!(said, "the writer reserves");
        assert_eq!(client.put(LINEAGE, blocks(0..8)).await.unwrap().held, 8, "in flight");
        writer.kill().unwrap();
        writer.wait().unwrap();
        while client.put(LINEAGE, blocks(0..8)).await.unwrap().written < 8 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for _ in 0..8 {
            let (index, result) = waiting.next().await.unwrap();
            assert!(
                result.unwrap().read().unwrap().bytes == bytes(index as u16),
                "who waited for the dead writer's blocks got them from another"
            );
        }
        drop(waiting);
        // Every slot holds a block, and no slot is in use.
        node.told(|told| told.report.as_ref().is_some_and(|report| (report.blocks.dram.used, report.blocks.dram.cached) == (0, 8))).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_ends_the_connection_that_sent_it_and_no_other() {
    let node = Node::start(8, &[]).await;
    let client = node.client(TransportChoice::Quic).await;
    client.put(LINEAGE, blocks(0..4)).await.unwrap();
    let mut garbage: Vec<Vec<u8>> = vec![vec![0; 64], vec![0xff; 64], b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![200, 0, 0, 0]];
    garbage.extend((0..40u32).map(|n| (0..n * 7 + 1).map(|i| (i.wrapping_mul(2_654_435_761) ^ (n << 3)).to_be_bytes()[0]).collect()));
    for bytes in &garbage {
        let (data, _sender, _receiver, _) = raw_client(&node).await;
        let mut stream = data.open_uni(Preamble::PoolData).await.unwrap();
        let _ = stream.write_all(bytes).await;
        let _ = stream.finish();
        let (wrong, _sender, _receiver, _) = raw_client(&node).await;
        let mut stream = wrong.open_uni(Preamble::Control).await.unwrap();
        let _ = stream.write_all(bytes).await;
        let reason = wrong.closed().await;
        assert!(reason.contains("preamble"), "{reason}");
    }
    let (connection, mut sender, _receiver, _) = raw_client(&node).await;
    sender.send(&ToPool::Hello(FORMAT.into())).await.unwrap();
    assert!(connection.closed().await.contains("second hello"));
    let (connection, mut sender, _receiver, _) = raw_client(&node).await;
    sender.send(&ToPool::Match { call: CallId(1), keys: vec![key(1); (1 << 16) + 1] }).await.unwrap();
    assert!(connection.closed().await.contains("too many keys"));
    assert_held(&client, 0..4).await;
    assert_held(&node.client(TransportChoice::Auto).await, 0..4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_may_be_larger_than_what_flow_control_lets_through_at_once() {
    let node = Node::start(512, &[]).await;
    let client = node.client(TransportChoice::Quic).await;
    // This is repeated, since the stream of a batch that is delayed differs.
    for n in 0..8 {
        assert_eq!(client.put(LINEAGE, blocks(n * 128..(n + 1) * 128)).await.unwrap().written, 128);
        assert_held(&client, n * 128..(n + 1) * 128).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_block_size_is_refused_with_a_reason() {
    let node = Node::start(8, &[]).await;
    let client = node.client(TransportChoice::Auto).await;
    let error = client.put(LINEAGE, vec![(key(0), vec![0; 5])]).await.unwrap_err();
    assert!(matches!(error, PoolError::BlockSize { bytes: 5, expected: BLOCK_BYTES }));
    let small = Node::start(1, &[]).await;
    let error = small.try_client(2 * BLOCK_BYTES, TransportChoice::Auto).await.unwrap_err();
    assert!(error.to_string().contains("--dram"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn layouts_share_memory_and_one_that_is_gone_leaves_it_to_the_others() {
    const OTHER_BYTES: usize = BLOCK_BYTES / 3;
    let of_other = |range: Range<u16>| -> Vec<(BlockKey, Vec<u8>)> { range.map(|n| (key(n), bytes(n)[..OTHER_BYTES].to_vec())).collect() };
    for choice in BOTH {
        let node = Node::start(64, &[]).await;
        let large = node.client(choice).await;
        assert_eq!(large.put(LINEAGE, blocks(0..64)).await.unwrap().written, 64);
        let small = node.try_client(OTHER_BYTES, choice).await.unwrap();
        assert_eq!(small.match_prefix(&keys(0..1)).await.unwrap(), 0, "the same key is another block there");
        assert_eq!(small.put(LINEAGE, of_other(0..48)).await.unwrap().written, 48);
        for (n, result) in (0..).zip(fetch(&small, keys(0..48), Duration::ZERO).await) {
            assert!(result.unwrap().bytes == bytes(n)[..OTHER_BYTES], "block {n} has other bytes");
        }
        let mut held = 0;
        for (n, result) in (0..).zip(fetch(&large, keys(0..64), Duration::ZERO).await) {
            if let Ok(block) = result {
                assert!(block.bytes == bytes(n), "block {n} has other bytes");
                held += 1;
            }
        }
        assert!((10..64).contains(&held), "{held} are left of 64");

        drop(large);
        // Its leases, and then the memory: all of it is the other's, from the same process.
        let full = 64 * 3 - 4;
        let started = Instant::now();
        while small.put(LINEAGE, of_other(0..full)).await.unwrap().refused > 0 {
            assert!(started.elapsed() < LONG, "the memory stays with a layout that is gone");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        node.told(|told| told.report.as_ref().is_some_and(|report| report.blocks.dram.total >= u64::from(full))).await;
        for (n, result) in (0..).zip(fetch(&small, keys(0..full), Duration::ZERO).await) {
            assert!(result.unwrap().bytes == bytes(n)[..OTHER_BYTES], "block {n} has other bytes");
        }
        assert!(node.client(choice).await.match_prefix(&keys(0..64)).await.unwrap() < 8, "and it begins anew");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_named_models_keeps_no_others() {
    let node = Node::start(64, &["--models", "a=3,b", "--floors", "b=40"]).await;
    let connect = async |model: Option<&str>| {
        let hello = FORMAT.of_model(model.map(str::to_owned));
        PoolClient::connect(&node.endpoint, node.addr, hello, TransportChoice::Auto, Default::default()).await
    };
    let (a, b) = (connect(Some("a")).await.unwrap(), connect(Some("b")).await.unwrap());
    a.put(LINEAGE, blocks(0..4)).await.unwrap();
    assert_eq!(b.match_prefix(&keys(0..4)).await.unwrap(), 0, "not even of one layout");
    for (model, words) in [(Some("c"), "not of `c`"), (None, "--model-name")] {
        let error = connect(model).await.unwrap_err();
        assert!(matches!(&error, PoolError::Refused { reason, .. } if reason.contains(words) && reason.contains("`a`, `b`")), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_of_one_prompt_share_its_keys_and_never_their_bytes() {
    for choice in BOTH {
        let node = Node::start(64, &[]).await;
        let shards = [0, 1].map(|index| Shard { index, count: 2 });
        let [a, b] = [node.client_of_shard(shards[0], choice).await.unwrap(), node.client_of_shard(shards[1], choice).await.unwrap()];
        assert_eq!(a.put(LINEAGE, blocks(0..8)).await.unwrap().written, 8);
        assert_eq!(b.match_prefix(&keys(0..8)).await.unwrap(), 0, "what one shard has, the other has not");
        assert!(fetch(&b, keys(0..1), Duration::ZERO).await[0].is_err());
        // The keys are the same, but the bytes differ.
        let others = keys(0..8).into_iter().zip((100..).map(bytes)).collect();
        assert_eq!(b.put(LINEAGE, others).await.unwrap(), PutReport { written: 8, held: 0, refused: 0 });
        assert_held(&a, 0..8).await;
        for (n, result) in (100..).zip(fetch(&b, keys(0..8), Duration::ZERO).await) {
            assert!(result.unwrap().bytes == bytes(n), "block {n} of the other shard has other bytes");
        }
        assert_eq!(node.client(choice).await.match_prefix(&keys(0..8)).await.unwrap(), 0, "nor has the whole model");
        let nobody = node.client_of_shard(Shard { index: 2, count: 2 }, choice).await.unwrap_err();
        assert!(matches!(&nobody, PoolError::Refused { reason, .. } if reason.contains("no shard 2 of 2")), "{nobody}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_written_in_place_and_read_in_place() {
    for choice in BOTH {
        let node = Node::start(4, &["--lease-ms", "100"]).await;
        let client = node.client(choice).await;
        client.put(LINEAGE, blocks(0..1)).await.unwrap();
        let reserved = client.reserve(Room::Made, LINEAGE, keys(0..4)).await.unwrap();
        assert_eq!(reserved.wanted(), [1, 2, 3], "block 0 is held");
        assert!(matches!(reserved.write(1, &[0; 5]), Err(PoolError::BlockSize { .. })));
        for n in [2, 1, 0, 1] {
            reserved.write(n, &bytes(n as u16)).unwrap();
        }
        assert_eq!(client.match_prefix(&keys(0..4)).await.unwrap(), 1, "found only when it is committed");
        assert_eq!(reserved.commit().await.unwrap(), PutReport { written: 2, held: 1, refused: 1 });
        assert_held(&client, 0..3).await;
        drop(client.reserve(Room::Made, LINEAGE, keys(3..4)).await.unwrap());
        assert_eq!(client.put(LINEAGE, blocks(3..4)).await.unwrap().written, 1, "given back");

        // The block is read long after its lease, and after its slot was reused: a miss, or the right bytes.
        let mut fetch = client.get(keys(0..4), Duration::ZERO);
        let mut late = Vec::new();
        while let Some((n, result)) = fetch.next().await {
            late.push((n as u16, result.unwrap()));
        }
        // The end of a lease is a time.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(client.put(LINEAGE, blocks(10..13)).await.unwrap().written, 3, "leases have ended");
        let mut memory = vec![0; BLOCK_BYTES];
        for (n, block) in late {
            match block.read_into(&mut memory) {
                Ok(()) => assert!(memory == bytes(n), "block {n} has other bytes"),
                Err(miss) => assert_eq!((miss, choice), (Miss::Stale, TransportChoice::Auto)),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_ends_is_unreachable_at_once_and_leaves_nothing() {
    let shm = || std::fs::read_dir("/dev/shm").unwrap().flatten().filter(|f| f.file_name().to_string_lossy().contains("tidemill")).count();
    for choice in BOTH {
        let mut node = Node::start(8, &[]).await;
        let client = node.client(choice).await;
        client.put(LINEAGE, blocks(0..4)).await.unwrap();
        let mut waiting = client.get(keys(10..12), LONG);
        node.signal(Signal::SIGTERM);
        for _ in 0..2 {
            assert!(matches!(waiting.next().await, Some((_, Err(Miss::Unreachable)))));
        }
        assert!(waiting.next().await.is_none());
        eventually(|| !client.is_open()).await;
        assert!(matches!(client.put(LINEAGE, blocks(0..1)).await, Err(PoolError::Unreachable { .. })));
        assert!(matches!(client.match_prefix(&keys(0..1)).await, Err(PoolError::Unreachable { .. })));
        assert!(matches!(fetch(&client, keys(0..1), LONG).await[..], [Err(Miss::Unreachable)]));
        assert!(node.child.wait().unwrap().success());
        node.told(|told| told.leaving).await;
    }
    let mut killed = Node::start(8, &[]).await;
    let client = killed.client(TransportChoice::Auto).await;
    client.put(LINEAGE, blocks(0..4)).await.unwrap();
    killed.signal(Signal::SIGKILL);
    killed.child.wait().unwrap();
    assert_eq!(shm(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn coordinators_know_what_a_node_holds_also_after_their_link_broke() {
    let node = Node::start(8, &[]).await;
    let client = node.client(TransportChoice::Auto).await;
    client.put(LINEAGE, blocks(0..6)).await.unwrap();
    node.told(|told| told.keys == BTreeSet::from_iter(keys(0..6))).await;
    node.told(|told| {
        told.report.as_ref().is_some_and(|report| {
            let dram = report.blocks.dram;
            (dram.total, dram.cached, dram.free, dram.bytes_per_block) == (8, 6, 2, BLOCK_BYTES as u64)
        })
    })
    .await;
    node.told.lock().unwrap().hang_up = true;
    client.put(LINEAGE, blocks(6..8)).await.unwrap();
    node.told(|told| told.links == 2 && told.keys == BTreeSet::from_iter(keys(0..8))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_ends_with_its_parent() {
    let mut node = Node::start(8, &["--exit-with-parent", "true"]).await;
    drop(node.child.stdin.take());
    assert!(node.child.wait().unwrap().success());
}
