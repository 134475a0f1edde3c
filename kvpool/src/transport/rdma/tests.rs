//! Both ends of rails in one process, over two devices. They need the RDMA guest: `make test-rdma`.
//!
//! A network that is slow or drops everything is simulated with `tc` on the interface under the client's device.

use super::{
    client::{Nics, Rails},
    devices::DeviceNames,
    node::{ArenaNics, ClientRails},
    rail::Remote,
    staging::Kind,
};
use crate::{
    arena::Arena,
    client::TransferCounters,
    core::validate::checksum,
    transport::{Access, Broken, Landing, Offer, Slots, rdma},
};
use std::{
    process::Command,
    sync::{Arc, Once},
    thread::sleep,
    time::{Duration, Instant},
};
use tidemill_proto::pool::{RailOpened, ToPool};
use tokio::sync::mpsc;

const NEEDS_GUEST: &str = "run by `make test-rdma`";

/// A node's arena, and one client that accesses it.
struct Fabric {
    arena: Arc<Arena>,
    nics: Arc<ArenaNics>,
    node: ClientRails,
    client: Arc<Rails>,
    counters: Arc<TransferCounters>,
    client_nics: Arc<Nics>,
    said: mpsc::Receiver<ToPool>,
    control: mpsc::Sender<ToPool>,
}

fn only(names: &str) -> DeviceNames {
    names.parse().expect(NEEDS_GUEST)
}

impl Fabric {
    fn new(block_bytes: usize, slots: usize, client: &str, node: &str) -> Self {
        static LOGGED: Once = Once::new();
        LOGGED.call_once(|| tidemill_net::process::Logging::new(None, None).start());
        let capacity = slots * block_bytes.next_multiple_of(64);
        let arena = Arc::new(Arena::create(capacity as u64, block_bytes as u64, [9; 16]).unwrap());
        let nics = Arc::new(ArenaNics::open(&only(node), arena.memory()));
        let (control, said) = mpsc::channel(16);
        let client_nics = Nics::open(&only(client));
        assert!(!client_nics.is_empty(), "{NEEDS_GUEST}");
        let counters = Arc::<TransferCounters>::default();
        let client = rails(&arena, &client_nics, &control, &counters);
        Self { arena, nics, node: ClientRails::default(), client, counters, client_nics, said, control }
    }

    fn open(&mut self) -> Vec<RailOpened> {
        open(&self.client, &mut self.node, &self.nics)
    }

    /// A second client.
    fn another(&self) -> (Arc<Rails>, ClientRails) {
        (rails(&self.arena, &self.client_nics, &self.control, &self.counters), ClientRails::default())
    }
}

fn rails(arena: &Arena, nics: &Arc<Nics>, control: &mpsc::Sender<ToPool>, counters: &Arc<TransferCounters>) -> Arc<Rails> {
    let info = arena.info();
    let offer = Offer { arena: &info, nics: Some(nics), device: None, control: control.downgrade(), counters };
    let Ok(Access::Slots(slots)) = rdma::client::open(&offer) else { panic!("{NEEDS_GUEST}") };
    Arc::clone(slots.rails().unwrap())
}

fn open(client: &Arc<Rails>, node: &mut ClientRails, nics: &ArenaNics) -> Vec<RailOpened> {
    let opening = client.begin();
    let opened = node.open(nics, &opening.ends());
    client.finish(opening, opened.clone());
    opened.into_iter().flatten().collect()
}

fn block(n: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(n) ^ (i >> 8) as u8).collect()
}

async fn land(landing: Option<Landing>) -> bool {
    landing.expect("it is on its way").0.await.is_ok()
}

/// Sets the behaviour of the network under the first pair of devices, in `tc`'s words; without any, the normal one.
fn network(words: &str) {
    let _ = Command::new("tc").args(["qdisc", "del", "dev", "va0", "root"]).output();
    if !words.is_empty() {
        let set = Command::new("tc").args("qdisc add dev va0 root netem limit 100000".split(' ')).args(words.split(' ')).status();
        assert!(set.unwrap().success(), "{NEEDS_GUEST}");
    }
}

fn eventually(mut condition: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "this never happens");
        sleep(Duration::from_millis(5));
    }
    started.elapsed()
}

#[tokio::test]
#[ignore = "needs the RDMA guest"]
async fn blocks_of_any_size_go_there_and_back() {
    for bytes in [1, 100, 4096, 100_008, 2 << 20] {
        let mut fabric = Fabric::new(bytes, 40, "ra0", "rb0");
        assert!(!fabric.client.usable());
        assert_eq!(fabric.open().len(), 1);
        assert!(fabric.client.usable());
        let count: u8 = if bytes > 1 << 20 { 6 } else { 40 };
        let mut landing = Vec::new();
        for n in 0..count {
            fabric.arena.set_generation(u32::from(n), 1000 + u64::from(n));
            let filled = fabric.client.write(u32::from(n), &block(n, bytes)).unwrap();
            assert_eq!(filled.checksum, checksum(&block(n, bytes)));
            landing.push(filled.landing);
        }
        fabric.client.flush();
        for landing in landing {
            assert!(land(landing).await);
        }
        // Blocks are read into memory that is registered, and into memory that is not.
        let mut known = vec![0; bytes];
        let _registered = fabric.client_nics.register(&mut known).unwrap();
        for n in 0..count {
            assert!(fabric.arena.read_block(u32::from(n)).0 == block(n, bytes), "block {n} of {bytes} bytes");
            for to in [&mut known, &mut vec![0; bytes]] {
                to.fill(0xEE);
                let copied = fabric.client.read(u32::from(n), to).unwrap();
                assert!(*to == block(n, bytes), "block {n} of {bytes} bytes");
                assert_eq!((copied.checksum, copied.generation_after), (checksum(to), 1000 + u64::from(n)));
            }
        }
        assert_eq!((fabric.counters.rails().opened, fabric.counters.rails().lost), (1, 0));
    }
}

#[tokio::test]
#[ignore = "needs the RDMA guest"]
async fn only_the_rails_own_keys_open_anything() {
    let mut fabric = Fabric::new(4096, 8, "ra0", "rb0");
    let own = fabric.open()[0];
    fabric.arena.write_block(0, &block(1, 4096));
    fabric.arena.write_block(7, &block(2, 4096));
    // The forgeries: another client's keys, the right keys for the wrong use, a key that was never given, and places beyond the arena.
    let arena_end = fabric.arena.layout().file_bytes;
    type Forge = fn(RailOpened, RailOpened) -> RailOpened;
    let forgeries: [(&str, Forge); 4] = [
        ("another client's keys", |_, own| RailOpened { read_key: own.read_key, write_key: own.write_key, ..own }),
        ("the reader's key for writing", |new, _| RailOpened { write_key: new.read_key, ..new }),
        ("the writer's key for reading", |new, _| RailOpened { read_key: new.write_key, ..new }),
        ("a key that nobody has", |new, _| RailOpened { read_key: new.read_key ^ 0x5500, write_key: new.write_key ^ 0x5500, ..new }),
    ];
    for (what, forge) in forgeries {
        let (client, mut node) = fabric.another();
        let opening = client.begin();
        let opened = node.open(&fabric.nics, &opening.ends());
        let new = opened[0].unwrap();
        let forged = forge(new, own);
        client.finish(opening, vec![Some(RailOpened { end: new.end, ..forged })]);
        if forged.read_key == new.read_key {
            // The client can read, so the rail is open; but it cannot write.
            let filled = client.write(7, &block(3, 4096)).unwrap();
            client.flush();
            assert!(!land(filled.landing).await, "{what}");
        }
        assert!(!client.usable(), "{what} opens something");
        assert!(fabric.arena.read_block(7).0 == block(2, 4096), "{what} changed something");
    }
    for beyond in [arena_end - 100, arena_end, 1 << 40] {
        let (client, mut node) = fabric.another();
        open(&client, &mut node, &fabric.nics);
        let (rail, pad) = client.for_test(Kind::Pad);
        // SAFETY: this thread owns the pad.
        let read = |at, bytes| unsafe { rail.read((pad.local(0, 64), Remote { at, bytes }), None) };
        assert_eq!(read(0, 64), Ok(()));
        assert_eq!(read(beyond, 64), if beyond + 64 <= arena_end { Ok(()) } else { Err(Broken) }, "{beyond}");
    }
    // None of that has affected the honest client.
    let mut bytes = vec![0; 4096];
    assert!(fabric.client.read(0, &mut bytes).is_ok() && bytes == block(1, 4096));
}

/// The first half of this test shows that without a fence, the write that it must prevent does happen. The WRITE stops in its middle (half
/// of its packets have arrived; the others are lost until the network works again, and are then retransmitted).
#[tokio::test]
#[ignore = "needs the RDMA guest"]
async fn no_byte_of_a_fenced_write_lands_after_its_slot_was_given_to_another() {
    const BYTES: usize = 8 << 20;
    for fenced in [false, true] {
        let mut fabric = Fabric::new(BYTES, 3, "ra0", "rb0");
        fabric.open();
        let (old, new, reused) = (block(1, BYTES), block(2, BYTES), block(3, BYTES));
        fabric.arena.write_block(1, &old);
        network("rate 16mbit");
        let filled = fabric.client.write(1, &new).unwrap();
        fabric.client.flush();
        let landed = || fabric.arena.read_block(1).0.iter().zip(&new).take_while(|(a, b)| a == b).count();
        eventually(|| landed() > BYTES / 8);
        network("loss 100%");
        sleep(Duration::from_millis(300));
        let paused = landed();
        sleep(Duration::from_millis(300));
        assert!(paused < BYTES - 4096 && landed() == paused, "the write stands still after {paused} bytes");
        if fenced {
            fabric.node.close_all();
            fabric.arena.set_generation(1, 8);
            fabric.arena.write_block(1, &reused);
        }
        network("");
        let arrived = land(filled.landing).await;
        let there = fabric.arena.read_block(1).0;
        if fenced {
            assert!(!arrived && !fabric.client.usable(), "its writer learns that it was fenced");
            assert!(there == reused, "nothing of the old write landed");
            assert!(matches!(fabric.said.try_recv(), Ok(ToPool::CloseRail { .. })));
            // It does not land later either.
            sleep(Duration::from_secs(1));
            assert!(fabric.arena.read_block(1).0 == reused);
            fabric.open();
            assert!(fabric.client.usable(), "it may come back");
        } else {
            assert!(arrived && there == new, "a write that is not fenced goes on where it stood");
        }
        println!("fenced: {fenced}, stood still after {paused} of {BYTES} bytes");
    }
}

#[tokio::test]
#[ignore = "needs the RDMA guest"]
async fn one_rail_takes_over_from_another_and_a_silent_peer_is_noticed() {
    const BYTES: usize = 100_008;
    let mut fabric = Fabric::new(BYTES, 20, "ra0,ra1", "rb0,rb1");
    assert_eq!(fabric.open().len(), 2);
    let mut bytes = vec![0; BYTES];
    for slot in 0..20 {
        fabric.arena.write_block(slot, &block(slot as u8, BYTES));
    }
    network("loss 100%");
    let started = Instant::now();
    // Both rails get some of these; blocks that the first one loses go over the second.
    for slot in 0..20 {
        fabric.client.read(slot, &mut bytes).unwrap();
        assert!(bytes == block(slot as u8, BYTES));
    }
    let noticed = started.elapsed();
    assert!(noticed < Duration::from_secs(30), "{noticed:?}");
    assert_eq!((fabric.counters.rails().opened, fabric.counters.rails().lost), (2, 1));
    // Writes also move to the other rail.
    network("");
    fabric.open();
    assert_eq!(fabric.counters.rails().opened, 3, "the lost rail comes back");
    network("loss 100%");
    let mut landing = Vec::new();
    for slot in 0..20 {
        landing.push(fabric.client.write(slot, &block(100 + slot as u8, BYTES)).unwrap().landing);
    }
    fabric.client.flush();
    for landing in landing {
        assert!(land(landing).await);
    }
    for slot in 0..20 {
        assert!(fabric.arena.read_block(slot).0 == block(100 + slot as u8, BYTES));
    }
    // With no rail left, a block is returned to its owner.
    fabric.node.close_all();
    let filled = fabric.client.write(0, &block(7, BYTES)).unwrap();
    fabric.client.flush();
    let back = filled.landing.unwrap().0.await;
    assert!(matches!(back, Err(bytes) if bytes == block(7, BYTES)));
    network("");
    println!("a silent peer was noticed within {noticed:?}");
}

#[tokio::test]
#[ignore = "needs the RDMA guest"]
async fn a_lossy_network_loses_nothing() {
    const BYTES: usize = 256 << 10;
    let mut fabric = Fabric::new(BYTES, 8, "ra0", "rb0");
    fabric.open();
    network("loss 1%");
    for round in 0..4 {
        let mut landing = Vec::new();
        for slot in 0..8 {
            landing.push(fabric.client.write(slot, &block(round * 8 + slot as u8, BYTES)).unwrap().landing);
        }
        fabric.client.flush();
        for landing in landing {
            assert!(land(landing).await);
        }
        let mut bytes = vec![0; BYTES];
        for slot in 0..8 {
            fabric.client.read(slot, &mut bytes).unwrap();
            assert!(bytes == block(round * 8 + slot as u8, BYTES));
        }
    }
    network("");
    assert_eq!(fabric.counters.rails().lost, 0);
}
