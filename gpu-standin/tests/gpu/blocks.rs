//! Blocks that a device copies by itself from pinned memory: in the right order with all other uses of a block, and refused if their source
//! changed meanwhile.

use crate::standin::{Standin, cache, repository};
use std::{collections::HashMap, ptr::NonNull};
use tidemill_kvpool::{
    arena::Arena,
    client::{Pin, Pinned},
    core::validate::{Invalid, checksum, validate},
};
use tidemill_model::{
    CudaExecutor, Executor, ExecutorError,
    cuda::{self, CudaOptions, DeviceCopy, KvBytes, Pinner},
};
use tidemill_proto::{
    block::KvDtype,
    ids::RequestId,
    pool::{Found, SlotRef, Tier},
};

#[test]
fn whatever_happens_to_a_block_happens_in_order() {
    for seed in 1..6 {
        Standin::new(&format!("seed={seed}")).passes("blocks::ordered");
    }
}

#[test]
fn a_slot_that_changes_during_the_copy_is_refused() {
    for seed in 1..4 {
        Standin::new(&format!("seed={seed}")).passes("blocks::overwritten");
    }
}

#[test]
fn a_large_arena_is_pinned_in_pieces_that_a_driver_takes() {
    Standin::new("register=1024").passes("blocks::in_pieces");
}

#[test]
fn memory_that_cannot_be_pinned_is_an_error_that_says_what_to_do() {
    Standin::new("pinned=0").passes("blocks::unpinnable");
}

const SLOTS: u32 = 8;

/// An executor, and a node's arena as mapped by a worker.
struct World {
    executor: CudaExecutor,
    node: Arena,
    client: Arena,
}

#[derive(Debug)]
struct Device(Pinner);

#[derive(Debug)]
struct Memory(cuda::Pinned);

impl Pin for Device {
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<Box<dyn Pinned>, String> {
        // SAFETY: as the caller promises.
        unsafe { self.0.pin(start, bytes) }.map(|pinned| Box::new(Memory(pinned)) as _).map_err(|error| error.to_string())
    }
}

impl Pinned for Memory {
    fn address(&self, offset: usize) -> u64 {
        self.0.address(offset)
    }
}

impl World {
    fn new() -> Self {
        Self::with_slots(|_| SLOTS)
    }

    /// Creates a world; `slots` gets the size of a block.
    fn with_slots(slots: impl Fn(u64) -> u32) -> Self {
        let (kv, kv_dtype) = (KvBytes::Exactly(1 << 20), KvDtype::Bf16);
        let options = CudaOptions { kernel_cache: cache(), step_tokens: 64, sequences_max: 0, kv, kv_dtype, ranks: 1 };
        let executor = CudaExecutor::load(&repository().join("model/tests/fixtures/llama3"), &options, &mut |_, _| {}).unwrap();
        let block_bytes = executor.kv_shape().block_bytes() as u64;
        let node = Arena::create(u64::from(slots(block_bytes)) * block_bytes.next_multiple_of(64), block_bytes, [3; 16]).unwrap();
        let client = Arena::open(&node.info()).unwrap();
        Self { executor, node, client }
    }

    fn pin(&mut self) -> Result<(), String> {
        let device = Device(self.executor.device_copies().expect("it copies").pinner());
        (0..self.client.pieces()).try_for_each(|piece| self.client.pin_piece(piece, &device))
    }

    fn bytes(&self, n: u8) -> Vec<u8> {
        (0..self.node.block_bytes()).map(|i| (i as u8).wrapping_mul(7) ^ n).collect()
    }

    /// Starts to copy a slot to a device block.
    fn copy(&mut self, block: u32, slot: u32) -> DeviceCopy {
        let from = self.client.device_address(slot).expect("it is pinned");
        // SAFETY: the arena is pinned, and dropped after the executor, which ends when its copies have.
        unsafe { self.executor.device_copies().expect("it copies").copy_block(block, from) }.unwrap()
    }

    fn write(&mut self, block: u32, bytes: &[u8]) {
        let fill = &mut |memory: &mut [u8]| {
            memory.copy_from_slice(bytes);
            true
        };
        assert!(self.executor.write_block(block, fill).unwrap());
    }

    fn read(&mut self, block: u32) -> Result<Vec<u8>, ExecutorError> {
        Ok(self.executor.read_blocks(&[block])?.wait()?[0].as_ref().to_vec())
    }
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn ordered() {
    let mut world = World::new();
    world.pin().unwrap();
    let [a, b, c] = [1, 2, 3].map(|n| world.bytes(n));
    world.node.write_block(0, &a);
    world.node.write_block(1, &b);

    world.copy(5, 0);
    assert!(world.read(5).unwrap() == a, "a read waits for the copy");

    world.write(5, &c);
    let copy = world.copy(5, 1);
    copy.wait().unwrap();
    assert!(world.read(5).unwrap() == b, "a copy comes after what was written before it");

    world.copy(5, 0);
    world.write(5, &c);
    assert!(world.read(5).unwrap() == c, "and before what is written after it");

    // A block that is being read is given up, and its place taken.
    let leaving = world.executor.read_blocks(&[5]).unwrap();
    world.copy(5, 1).wait().unwrap();
    assert!(leaving.wait().unwrap()[0].as_ref() == c, "what is read is what was there");
    let leaving = world.executor.read_blocks(&[5]).unwrap();
    // The second write waits for the first one's buffer, and might overtake it.
    let filling = (0..world.executor.blocks() as u32).filter(|&block| block != 5);
    world.write(5, &c);
    filling.cycle().take(200).for_each(|block| world.write(block, &a));
    assert!(leaving.wait().unwrap()[0].as_ref() == b, "the same of writes");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn overwritten() {
    let mut world = World::new();
    world.pin().unwrap();
    let (published, other) = (world.bytes(1), world.bytes(9));
    let mut verdicts = HashMap::new();
    for (what, generation, bytes) in [("left alone", 7, &published), ("used again", 8, &other), ("damaged", 7, &other)] {
        world.node.set_generation(2, 7);
        world.node.write_block(2, &published);
        let found = Found {
            index: 0,
            at: SlotRef { slot: 2, generation: 7 },
            checksum: checksum(&published),
            origin: RequestId(1),
            tier: Tier::Dram,
        };
        let copy = world.copy(3, 2);
        // Nothing has run yet: the stand-in copies only when the copy is waited for.
        world.node.set_generation(2, generation);
        world.node.write_block(2, bytes);
        copy.wait().unwrap();
        verdicts.insert(what, validate(world.client.read_by_device(2), &found));
        assert!(world.read(3).unwrap() == *bytes, "{what}: the device has copied what was there in the end");
    }
    let expected = [("left alone", Ok(())), ("used again", Err(Invalid::Stale)), ("damaged", Err(Invalid::Corrupt))];
    assert_eq!(verdicts, expected.into());
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn in_pieces() {
    // Little of this memory is ever written, so the system provides few pages.
    let mut world = World::with_slots(|block_bytes| ((5 << 29) / block_bytes.next_multiple_of(64)) as u32);
    assert_eq!(world.client.pieces(), 3);
    let device = Device(world.executor.device_copies().expect("it copies").pinner());
    let last = world.client.slots() - 1;
    world.client.pin_piece(0, &device).unwrap();
    assert!(world.client.device_address(0).is_some() && world.client.device_address(last).is_none(), "slots as their pieces come");
    world.pin().unwrap();
    for slot in [0, last / 3, last / 2, last] {
        let bytes = world.bytes(slot as u8);
        world.node.write_block(slot, &bytes);
        world.copy(5, slot).wait().unwrap();
        assert!(world.read(5).unwrap() == bytes, "slot {slot}");
    }
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn unpinnable() {
    let mut world = World::new();
    let reason = world.pin().unwrap_err();
    assert!(reason.contains("ulimit -l") && reason.contains("IPC_LOCK"), "{reason}");
    assert_eq!(world.client.device_address(0), None);
    let a = world.bytes(1);
    world.write(4, &a);
    assert!(world.read(4).unwrap() == a, "the device works without");
}
