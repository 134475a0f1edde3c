//! Blocks that the device copies by itself, from the slots of a pool node on this host.
//!
//! ```text
//!   engine ── leased block, copy begun ──► [ threads: wait for the copy, validate, give the lease back ] ──► inbox
//!      │                                                      ▲
//!      └──► device: slot ──► device block ────────────────────┘
//! ```
//!
//! A block counts as fetched when its event is applied, and no step uses it before that. Until then the lease lasts, and with it the memory
//! that the device reads. The engine never waits: if no place is free, it makes the host copy the block.

use crate::engine::Event;
use parking_lot::Mutex;
use std::{mem, ptr::NonNull, sync::Arc, time::Instant};
use tidemill_kvpool::client::{FetchId, FetchedBlock, Pin, Pinned};
use tidemill_model::{
    DeviceCopies, ExecutorError,
    cuda::{self, DeviceCopy, Pinner},
};
use tokio::{runtime::Handle, sync::mpsc};

/// The number of threads. Each reads a block once to validate it, at the rate of a core; more than needed to keep up with a bus would take
/// cores from other work.
const THREADS: usize = 4;

/// The engine's side. The threads end with it.
pub(crate) struct Landings {
    queue: mpsc::Sender<Landing>,
}

/// A place for one block in flight.
pub(crate) struct Place<'a>(mpsc::Permit<'a, Landing>);

struct Landing {
    fetch: FetchId,
    index: usize,
    block: FetchedBlock,
    copy: DeviceCopy,
    started: Instant,
}

impl Landings {
    /// Starts the threads for up to `blocks_max` blocks at a time. They answer to the inbox with [`Event::Landed`].
    pub(crate) fn start(runtime: &Handle, blocks_max: usize, inbox: &mpsc::Sender<Event>) -> Self {
        let (queue, landings) = mpsc::channel(blocks_max);
        let landings = Arc::new(Mutex::new(landings));
        for _ in 0..THREADS {
            let (landings, inbox) = (Arc::clone(&landings), inbox.clone());
            runtime.spawn_blocking(move || land_all(&landings, &inbox));
        }
        Self { queue }
    }

    /// A free place; `None` if the maximum is in flight.
    pub(crate) fn place(&self) -> Option<Place<'_>> {
        self.queue.try_reserve().ok().map(Place)
    }
}

impl Place<'_> {
    /// Makes the device copy the block from its slot, at `from`, to `device_block`.
    pub(crate) fn land(
        self,
        copies: &mut dyn DeviceCopies,
        (fetch, index): (FetchId, usize),
        block: FetchedBlock,
        (from, device_block): (u64, u32),
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        // SAFETY: the address is that of a block's slot in memory that these copies' pinner has pinned (`DevicePin`). It is pinned as long
        // as the block lives, which `Landing` keeps until the copy has ended.
        let copy = unsafe { copies.copy_block(device_block, from) }?;
        self.0.send(Landing { fetch, index, block, copy, started });
        Ok(())
    }
}

fn land_all(landings: &Mutex<mpsc::Receiver<Landing>>, inbox: &mpsc::Sender<Event>) {
    loop {
        let next = landings.lock().blocking_recv();
        let Some(landing) = next else { return };
        // A closed inbox means that the engine has ended; copies are waited for nevertheless.
        let _ = inbox.blocking_send(landing.land());
    }
}

impl Landing {
    fn land(self) -> Event {
        let Self { fetch, index, block, copy, started } = self;
        let outcome = match copy.wait() {
            // A miss is counted where it is found.
            Ok(()) => Ok(block.validate_device_copy(started).is_ok().then(|| block.arrival())),
            Err(error) => {
                // The device may still read the slot, which must stay mapped. This worker ends.
                mem::forget(block);
                Err(error)
            }
        };
        Event::Landed { fetch, index, outcome }
    }
}

/// The model's device, as seen by the pool's client.
#[derive(Debug)]
pub(crate) struct DevicePin(pub(crate) Pinner);

#[derive(Debug)]
struct DeviceMemory(cuda::Pinned);

impl Pin for DevicePin {
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<Box<dyn Pinned>, String> {
        // SAFETY: as the caller promises.
        let pinned = unsafe { self.0.pin(start, bytes) }.map_err(|error| error.to_string())?;
        Ok(Box::new(DeviceMemory(pinned)))
    }
}

impl Pinned for DeviceMemory {
    fn address(&self, offset: usize) -> u64 {
        self.0.address(offset)
    }
}
