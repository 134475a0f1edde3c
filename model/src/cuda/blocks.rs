//! Copies KV blocks between host memory and the devices, on streams of their own. A block on the host is whole; each device copies the part
//! with its heads.
//!
//! ```text
//!   copy:   pinned memory of others ──► device blocks
//!   write:  bytes ──► one of two pinned buffers ──(when it is full, or a step begins)──► device blocks
//!   read:   device blocks ──► pinned slots (`outgoing`) ──(`wait`)──► their reader ──(dropped)──► the next read
//! ```

use super::{
    layers::Layers,
    outgoing::{Outgoing, PinnedBlock, Slots},
};
use crate::executor::ExecutorError;
use cudarc::driver::{CudaContext, CudaEvent};
use std::{
    collections::{HashSet, VecDeque},
    ptr::NonNull,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tidemill_kernels::cuda::{
    CudaError, Device, DeviceKv,
    host::HostBuffer,
    kv::BlockSlot,
    pinned::Pinned,
    transfer::{SlotPart, Transfer},
};

/// An event of each device.
#[derive(Clone, Debug)]
struct Events(Vec<Arc<CudaEvent>>);

impl Events {
    fn are_complete(&self) -> bool {
        self.0.iter().all(|event| event.is_complete())
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        self.0.iter().try_for_each(|event| Ok(event.synchronize()?))
    }
}

pub(super) struct BlockCopies {
    block_bytes: usize,
    /// By device.
    fetches: Vec<Transfer>,
    publishes: Vec<Transfer>,
    /// Two buffers, the first of which is being filled.
    arriving: [Arriving; 2],
    /// Copies from pinned memory of other owners, in the order in which they end.
    copying: VecDeque<(u32, Events)>,
    /// Blocks that are being read, in the order in which they may be overwritten.
    leaving: VecDeque<(Vec<u32>, Events)>,
    outgoing: Outgoing,
}

/// Blocks on their way to the device.
struct Arriving {
    buffer: HostBuffer<u8>,
    placed: Vec<BlockSlot>,
    /// Set while the devices copy them.
    arrival: Option<Events>,
}

/// Size of a buffer, unless a block is larger; enough to keep the bus busy.
const BUFFER_BYTES: usize = 32 << 20;
const BLOCKS_AT_ONCE_MAX: usize = 64;

impl BlockCopies {
    /// Creates the copies between blocks of `block_bytes` and the devices, each with its part of a block.
    pub(super) fn new(devices: &[Device], kv: &[DeviceKv], parts: &[SlotPart], block_bytes: usize) -> Result<Self, CudaError> {
        let first = devices.first().expect("at least one device");
        let at_once = (BUFFER_BYTES / block_bytes).clamp(1, BLOCKS_AT_ONCE_MAX);
        let arriving = || {
            Ok::<_, CudaError>(Arriving {
                buffer: HostBuffer::new(first, at_once * block_bytes)?,
                placed: Vec::with_capacity(at_once),
                arrival: None,
            })
        };
        let transfers = || {
            let of_devices = devices.iter().zip(kv).zip(parts);
            of_devices.map(|((device, kv), part)| Transfer::new(device, kv, part.clone(), at_once)).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            block_bytes,
            fetches: transfers()?,
            publishes: transfers()?,
            arriving: [arriving()?, arriving()?],
            copying: VecDeque::new(),
            leaving: VecDeque::new(),
            outgoing: Outgoing::new(block_bytes),
        })
    }

    /// Pins memory for reading this many blocks at once.
    pub(super) fn reserve_reads(&mut self, device: &Device, blocks: usize) -> Result<(), CudaError> {
        self.outgoing.reserve(device, blocks)
    }

    /// Calls `fill` to write the bytes of a device block that no step uses yet into pinned memory. The bytes are sent if `fill` returns
    /// true.
    pub(super) fn write(
        &mut self,
        layers: &Layers,
        kv: &mut [DeviceKv],
        block: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<bool, CudaError> {
        assert!((block as usize) < kv[0].blocks(), "block {block} is not one of {}", kv[0].blocks());
        let [filling, _] = &mut self.arriving;
        filling.make_room()?;
        let Arriving { buffer, placed, .. } = filling;
        let at = placed.len() * self.block_bytes;
        if !fill(&mut buffer.numbers()?[at..at + self.block_bytes]) {
            return Ok(false);
        }
        placed.push(BlockSlot { block, slot: buffer.address(at) });
        if at + 2 * self.block_bytes > buffer.len() {
            self.flush(layers, kv)?;
        }
        Ok(true)
    }

    /// Sends all written blocks, and makes the model's streams wait for those of `used` that are still in flight.
    pub(super) fn settle(&mut self, layers: &Layers, kv: &mut [DeviceKv], used: impl Iterator<Item = u32>) -> Result<(), CudaError> {
        self.flush(layers, kv)?;
        self.arriving.iter_mut().for_each(Arriving::forget_if_arrived);
        self.forget_ended_copies();
        if self.copying.is_empty() && self.arriving.iter().all(|arriving| arriving.arrival.is_none()) {
            return Ok(());
        }
        let used: HashSet<u32> = used.collect();
        for Arriving { placed, arrival, .. } in &self.arriving {
            if let Some(arrival) = arrival.as_ref().filter(|_| placed.iter().any(|placed| used.contains(&placed.block))) {
                layers.wait(&arrival.0)?;
            }
        }
        if let Some((_, last)) = self.copying.iter().rfind(|(block, _)| used.contains(block)) {
            layers.wait(&last.0)?;
        }
        Ok(())
    }

    /// Starts to copy into a device block that no step uses yet.
    ///
    /// # Safety
    /// As [`DeviceCopies::copy_block`](crate::executor::DeviceCopies::copy_block).
    pub(super) unsafe fn copy(&mut self, layers: &Layers, kv: &mut [DeviceKv], block: u32, from: u64) -> Result<DeviceCopy, CudaError> {
        assert!((block as usize) < kv[0].blocks(), "block {block} is not one of {}", kv[0].blocks());
        // Bytes written for a previous owner of the block must not arrive after this copy.
        self.flush(layers, kv)?;
        self.forget_ended_copies();
        self.let_leave(&[block])?;
        // SAFETY: the slot is pinned until the event; until then no step uses the block, except after `settle`.
        let done = unsafe { fetch(&mut self.fetches, layers, kv, &[BlockSlot { block, slot: from }]) }?;
        self.copying.push_back((block, done.clone()));
        Ok(DeviceCopy { done, begun: Instant::now() })
    }

    /// Delays copies to these blocks until their previous contents are read.
    fn let_leave(&mut self, blocks: &[u32]) -> Result<(), CudaError> {
        self.forget_those_that_left();
        match self.leaving.iter().rfind(|(leaving, _)| blocks.iter().any(|block| leaving.contains(block))) {
            Some((_, gathered)) => self.fetches.iter().zip(&gathered.0).try_for_each(|(fetches, event)| fetches.wait(event)),
            None => Ok(()),
        }
    }

    /// Makes the model's streams wait until the previous contents of these blocks are read, so that it may overwrite them. Most blocks that
    /// are read are full and stay as they are, so a step rarely waits.
    pub(super) fn let_overwrite(&mut self, layers: &Layers, written: impl Iterator<Item = u32>) -> Result<(), CudaError> {
        self.forget_those_that_left();
        if self.leaving.is_empty() {
            return Ok(());
        }
        let written: HashSet<u32> = written.collect();
        match self.leaving.iter().rfind(|(leaving, _)| leaving.iter().any(|block| written.contains(block))) {
            Some((_, gathered)) => layers.wait(&gathered.0),
            None => Ok(()),
        }
    }

    fn forget_those_that_left(&mut self) {
        while self.leaving.front().is_some_and(|(_, gathered)| gathered.are_complete()) {
            self.leaving.pop_front();
        }
    }

    fn forget_ended_copies(&mut self) {
        while self.copying.front().is_some_and(|(_, done)| done.are_complete()) {
            self.copying.pop_front();
        }
    }

    fn flush(&mut self, layers: &Layers, kv: &mut [DeviceKv]) -> Result<(), CudaError> {
        let [Arriving { placed, arrival, .. }, _] = &self.arriving;
        if placed.is_empty() || arrival.is_some() {
            return Ok(());
        }
        let blocks: Vec<u32> = placed.iter().map(|placed| placed.block).collect();
        self.let_leave(&blocks)?;
        let [Arriving { placed, arrival, .. }, _] = &mut self.arriving;
        // SAFETY: the buffer is pinned, has room for every block, and is not overwritten before the event; until then
        // no step uses these blocks, except after `settle`.
        *arrival = Some(unsafe { fetch(&mut self.fetches, layers, kv, placed) }?);
        self.arriving.swap(0, 1);
        Ok(())
    }

    /// Starts to copy the blocks' contents as of now in the model's stream. Later steps may overwrite them after
    /// [`let_overwrite`](Self::let_overwrite).
    pub(super) fn read(&mut self, layers: &Layers, kv: &[DeviceKv], device: &Device, blocks: &[u32]) -> Result<PendingBlocks, CudaError> {
        let slots = self.outgoing.take(device, blocks.len())?;
        let placed: Vec<BlockSlot> = blocks.iter().zip(slots.addresses()).map(|(&block, slot)| BlockSlot { block, slot }).collect();
        let ready = layers.record_events()?;
        let (mut gathered, mut done) = (Vec::new(), Vec::new());
        for (((publishes, rank), kv), ready) in self.publishes.iter_mut().zip(&layers.ranks).zip(kv).zip(&ready) {
            // SAFETY: each slot is pinned, of a block's size, and left alone until `done`; later writes to these blocks wait until they
            // are gathered: those of steps by `let_overwrite`, those of fetches by `let_leave`.
            let published = unsafe { publishes.publish(&rank.kernels, kv, &placed, 0..layers.shape.layers, ready) }?;
            gathered.push(published.gathered);
            done.push(published.done);
        }
        self.leaving.push_back((blocks.to_vec(), Events(gathered)));
        Ok(PendingBlocks { slots, done: Events(done) })
    }
}

/// Starts to copy each device's part of blocks.
///
/// # Safety
/// As [`Transfer::fetch`].
unsafe fn fetch(fetches: &mut [Transfer], layers: &Layers, kv: &mut [DeviceKv], placed: &[BlockSlot]) -> Result<Events, CudaError> {
    let of_devices = fetches.iter_mut().zip(&layers.ranks).zip(kv);
    // SAFETY: as the caller promises.
    of_devices.map(|((fetches, rank), kv)| unsafe { fetches.fetch(&rank.kernels, kv, placed) }).collect::<Result<_, _>>().map(Events)
}

impl Arriving {
    fn forget_if_arrived(&mut self) {
        if self.arrival.as_ref().is_some_and(Events::are_complete) {
            self.arrival = None;
            self.placed.clear();
        }
    }

    /// Waits for the blocks that are in flight, if any.
    fn make_room(&mut self) -> Result<(), CudaError> {
        if let Some(arrival) = self.arrival.take() {
            arrival.synchronize()?;
            self.placed.clear();
        }
        Ok(())
    }
}

/// Pins other owners' memory for a device.
#[derive(Clone, Debug)]
pub struct Pinner(Arc<CudaContext>);

impl Pinner {
    pub(super) fn new(device: &Device) -> Self {
        Self(Arc::clone(device.context()))
    }

    /// # Safety
    /// As [`Pinned::register`].
    pub unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<Pinned, ExecutorError> {
        // SAFETY: as the caller promises.
        Ok(unsafe { Pinned::register(&self.0, start, bytes) }?)
    }
}

/// A block on its way into device memory.
#[derive(Debug)]
pub struct DeviceCopy {
    done: Events,
    begun: Instant,
}

/// The deadline of a copy, which takes microseconds and waits for no more than a burst of others.
const COPY_MAX: Duration = Duration::from_secs(10);
/// The interval at which the host polls a copy. Its thread could wait in the driver, but not with a deadline.
const ASK_AGAIN: Duration = Duration::from_micros(20);

impl DeviceCopy {
    /// Blocks the thread until the devices have read the last byte and written it, up to 10 s after the start. After an error, the copy may
    /// still be in flight.
    pub fn wait(&self) -> Result<(), ExecutorError> {
        let deadline = self.begun + COPY_MAX;
        for done in &self.done.0 {
            done.context().bind_to_thread().map_err(CudaError::from)?;
            while !done.try_is_complete().map_err(CudaError::from)? {
                if Instant::now() > deadline {
                    return Err(CudaError::Stuck { what: "a copy", seconds: COPY_MAX.as_secs() }.into());
                }
                thread::sleep(ASK_AGAIN);
            }
        }
        Ok(())
    }
}

/// Blocks that the device is copying out.
pub struct PendingBlocks {
    slots: Slots,
    done: Events,
}

impl PendingBlocks {
    pub(crate) fn wait(mut self) -> Result<Vec<PinnedBlock>, CudaError> {
        self.done.synchronize()?;
        // SAFETY: the copies have ended, and these slots belong to this read until the blocks are dropped.
        Ok(unsafe { self.slots.take_blocks() })
    }
}

impl Drop for PendingBlocks {
    fn drop(&mut self) {
        // A slot that the device may still write must not be reused; if that cannot be known, the device has failed.
        if self.done.synchronize().is_ok() {
            // SAFETY: the copies have ended.
            unsafe { self.slots.give_back() };
        }
    }
}
