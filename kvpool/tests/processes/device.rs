//! A device that copies leased blocks by itself. Here this process plays the device: it accesses the node's memory by its addresses.

use crate::support::*;
use std::{ptr::NonNull, sync::Arc, time::Duration, time::Instant};
use tidemill_kvpool::{
    arena::Arena,
    client::{FetchedBlock, Miss, Pin, Pinned, PoolClient, TransferCounters, TransportChoice, Ways},
};
use tidemill_proto::pool::{Direction, Transport};

#[derive(Debug)]
struct Device {
    pins: bool,
}

#[derive(Debug)]
struct Memory(u64);

impl Pin for Device {
    unsafe fn pin(&self, start: NonNull<u8>, _: usize) -> Result<Box<dyn Pinned>, String> {
        if self.pins { Ok(Box::new(Memory(start.as_ptr().expose_provenance() as u64))) } else { Err("it may lock nothing".into()) }
    }
}

impl Pinned for Memory {
    fn address(&self, offset: usize) -> u64 {
        self.0 + offset as u64
    }
}

async fn client(node: &Node, choice: TransportChoice, pins: bool) -> (PoolClient, Arc<TransferCounters>) {
    let counters = Arc::new(TransferCounters::default());
    let ways = Ways { choice, nics: None, device: Some(Arc::new(Device { pins })) };
    (PoolClient::connect(&node.endpoint, node.addr, FORMAT, ways, Arc::clone(&counters)).await.unwrap(), counters)
}

/// One block, once it lies in pinned memory.
async fn pinned(client: &PoolClient, n: u16) -> FetchedBlock {
    for _ in 0..1000 {
        let block = client.get(keys(n..n + 1), Duration::ZERO).next().await.unwrap().1.unwrap();
        if block.device_address().is_some() {
            return block;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the node's memory is never pinned");
}

fn copied(block: &FetchedBlock) -> Vec<u8> {
    let from = block.device_address().unwrap();
    let mut bytes = vec![0; BLOCK_BYTES];
    // SAFETY: the block keeps the slot mapped. If the slot is written meanwhile, the copy is not used.
    unsafe { std::ptr::with_exposed_provenance::<u8>(from as usize).copy_to_nonoverlapping(bytes.as_mut_ptr(), BLOCK_BYTES) };
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_device_copies_is_validated_and_counted() {
    let node = Node::start(8, &[]).await;
    let (client, counters) = client(&node, TransportChoice::Auto, true).await;
    client.put(LINEAGE, blocks(0..4)).await.unwrap();
    let block = pinned(&client, 2).await;
    assert!(copied(&block) == bytes(2));
    assert_eq!(block.validate_device_copy(Instant::now()), Ok(()));
    let fetched = counters.fetched_bytes();
    assert_eq!((fetched.by_device, fetched.by_host), (BLOCK_BYTES as u64, 0));
    assert_eq!(counters.snapshot().0[(Transport::Shm, Direction::Get)].bytes, BLOCK_BYTES as u64);
    assert_held(&client, 0..4).await;
    assert_eq!(counters.fetched_bytes().by_host, 4 * BLOCK_BYTES as u64, "the host may copy, too");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_changes_while_a_device_copies_it_is_a_miss() {
    let node = Node::start(4, &["--lease-ms", "100"]).await;
    let (client, counters) = client(&node, TransportChoice::Auto, true).await;
    client.put(LINEAGE, blocks(0..3)).await.unwrap();

    // Bytes change without the node's knowledge, after or before the device has read them.
    let block = pinned(&client, 0).await;
    let at = block.device_address().unwrap() as usize + BLOCK_BYTES / 2;
    // SAFETY: as above, and no other code uses this byte now.
    unsafe { *std::ptr::with_exposed_provenance_mut::<u8>(at) ^= 1 };
    assert!(copied(&block) != bytes(0));
    assert_eq!(block.validate_device_copy(Instant::now()), Err(Miss::Corrupt));
    let mut again = client.get(keys(0..1), Duration::ZERO);
    assert!(matches!(again.next().await, Some((0, Err(Miss::Absent)))), "the node was told, and offers it no more");

    // The device is slow, the lease runs out, and the slot goes to another block.
    let block = pinned(&client, 1).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    for n in 10.. {
        client.put(LINEAGE, blocks(n..n + 1)).await.unwrap();
        if copied(&block) != bytes(1) {
            break;
        }
    }
    assert_eq!(block.validate_device_copy(Instant::now()), Err(Miss::Stale));
    let misses = counters.snapshot().1;
    assert_eq!((misses.corrupt, misses.stale, counters.fetched_bytes().by_device), (1, 1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_cannot_be_pinned_and_streams_are_the_hosts() {
    let node = Node::start(4, &[]).await;
    for (choice, pins) in [(TransportChoice::Auto, false), (TransportChoice::Quic, true)] {
        let (client, counters) = client(&node, choice, pins).await;
        client.put(LINEAGE, blocks(0..4)).await.unwrap();
        // Enough time to pin, if pinning were attempted.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let block = client.get(keys(0..1), Duration::ZERO).next().await.unwrap().1.unwrap();
        assert_eq!(block.device_address(), None);
        assert!(block.read().unwrap().bytes == bytes(0));
        assert_eq!((counters.fetched_bytes().by_device, counters.fetched_bytes().by_host), (0, BLOCK_BYTES as u64));
    }
}

/// Memory that is accessed when the device releases it.
#[derive(Debug)]
struct Watched {
    start: NonNull<u8>,
}

// SAFETY: holds only an address.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

impl Pinned for Watched {
    fn address(&self, offset: usize) -> u64 {
        offset as u64
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: memory is still mapped when its device releases it; if not, this test crashes here.
        unsafe { self.start.read_volatile() };
    }
}

#[derive(Debug)]
struct Watching;

impl Pin for Watching {
    unsafe fn pin(&self, start: NonNull<u8>, _: usize) -> Result<Box<dyn Pinned>, String> {
        Ok(Box::new(Watched { start }))
    }
}

#[test]
fn memory_is_let_go_before_it_is_unmapped() {
    let arena = Arena::create(1 << 20, 1000, [1; 16]).unwrap();
    arena.pin_piece(0, &Watching).unwrap();
    assert_eq!((arena.device_address(0), arena.device_address(3)), (Some(0), Some(3 * 1024)));
    drop(arena);
}
