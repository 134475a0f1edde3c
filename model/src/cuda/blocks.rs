//! Copies KV blocks between host memory and the device, on streams of their own.
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
use tidemill_kernels::cuda::{CudaError, Device, DeviceKv, host::HostBuffer, kv::BlockSlot, pinned::Pinned, transfer::Transfer};

pub(super) struct BlockCopies {
    block_bytes: usize,
    fetches: Transfer,
    publishes: Transfer,
    /// Two buffers, the first of which is being filled.
    arriving: [Arriving; 2],
    /// Copies from pinned memory of other owners, in the order in which they end.
    copying: VecDeque<(u32, Arc<CudaEvent>)>,
    /// Blocks that are being read, in the order in which they may be overwritten.
    leaving: VecDeque<(Vec<u32>, Arc<CudaEvent>)>,
    outgoing: Outgoing,
}

/// Blocks on their way to the device.
struct Arriving {
    buffer: HostBuffer<u8>,
    placed: Vec<BlockSlot>,
    /// Set while the device copies them.
    arrival: Option<Arc<CudaEvent>>,
}

/// Size of a buffer, unless a block is larger; enough to keep the bus busy.
const BUFFER_BYTES: usize = 32 << 20;
const BLOCKS_AT_ONCE_MAX: usize = 64;

impl BlockCopies {
    pub(super) fn new(device: &Device, kv: &DeviceKv) -> Result<Self, CudaError> {
        let block_bytes = kv.layout().block_bytes();
        let at_once = (BUFFER_BYTES / block_bytes).clamp(1, BLOCKS_AT_ONCE_MAX);
        let arriving = || {
            Ok::<_, CudaError>(Arriving {
                buffer: HostBuffer::new(device, at_once * block_bytes)?,
                placed: Vec::with_capacity(at_once),
                arrival: None,
            })
        };
        Ok(Self {
            block_bytes,
            fetches: Transfer::new(device, kv, at_once)?,
            publishes: Transfer::new(device, kv, at_once)?,
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
        kv: &mut DeviceKv,
        block: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<bool, CudaError> {
        assert!((block as usize) < kv.blocks(), "block {block} is not one of {}", kv.blocks());
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

    /// Sends all written blocks, and makes the model's stream wait for those of `used` that are still in flight.
    pub(super) fn settle(&mut self, layers: &Layers, kv: &mut DeviceKv, used: impl Iterator<Item = u32>) -> Result<(), CudaError> {
        self.flush(layers, kv)?;
        self.arriving.iter_mut().for_each(Arriving::forget_if_arrived);
        self.forget_ended_copies();
        if self.copying.is_empty() && self.arriving.iter().all(|arriving| arriving.arrival.is_none()) {
            return Ok(());
        }
        let used: HashSet<u32> = used.collect();
        for Arriving { placed, arrival, .. } in &self.arriving {
            if let Some(arrival) = arrival.as_ref().filter(|_| placed.iter().any(|placed| used.contains(&placed.block))) {
                layers.stream.wait(arrival)?;
            }
        }
        if let Some((_, last)) = self.copying.iter().rfind(|(block, _)| used.contains(block)) {
            layers.stream.wait(last)?;
        }
        Ok(())
    }

    /// Starts to copy into a device block that no step uses yet.
    ///
    /// # Safety
    /// As [`DeviceCopies::copy_block`](crate::executor::DeviceCopies::copy_block).
    pub(super) unsafe fn copy(&mut self, layers: &Layers, kv: &mut DeviceKv, block: u32, from: u64) -> Result<DeviceCopy, CudaError> {
        assert!((block as usize) < kv.blocks(), "block {block} is not one of {}", kv.blocks());
        // Bytes written for a previous owner of the block must not arrive after this copy.
        self.flush(layers, kv)?;
        self.forget_ended_copies();
        self.let_leave(&[block])?;
        // SAFETY: the slot is pinned until the event; until then no step uses the block, except after `settle`.
        let done = unsafe { self.fetches.fetch(&layers.kernels, kv, &[BlockSlot { block, slot: from }]) }?;
        self.copying.push_back((block, Arc::clone(&done)));
        Ok(DeviceCopy { done, begun: Instant::now() })
    }

    /// Delays copies to these blocks until their previous contents are read.
    fn let_leave(&mut self, blocks: &[u32]) -> Result<(), CudaError> {
        self.forget_those_that_left();
        match self.leaving.iter().rfind(|(leaving, _)| blocks.iter().any(|block| leaving.contains(block))) {
            Some((_, gathered)) => self.fetches.wait(gathered),
            None => Ok(()),
        }
    }

    /// Makes the model's stream wait until the previous contents of these blocks are read, so that it may overwrite them. Most blocks that
    /// are read are full and stay as they are, so a step rarely waits.
    pub(super) fn let_overwrite(&mut self, layers: &Layers, written: impl Iterator<Item = u32>) -> Result<(), CudaError> {
        self.forget_those_that_left();
        if self.leaving.is_empty() {
            return Ok(());
        }
        let written: HashSet<u32> = written.collect();
        match self.leaving.iter().rfind(|(leaving, _)| leaving.iter().any(|block| written.contains(block))) {
            Some((_, gathered)) => Ok(layers.stream.wait(gathered)?),
            None => Ok(()),
        }
    }

    fn forget_those_that_left(&mut self) {
        while self.leaving.front().is_some_and(|(_, gathered)| gathered.is_complete()) {
            self.leaving.pop_front();
        }
    }

    fn forget_ended_copies(&mut self) {
        while self.copying.front().is_some_and(|(_, done)| done.is_complete()) {
            self.copying.pop_front();
        }
    }

    fn flush(&mut self, layers: &Layers, kv: &mut DeviceKv) -> Result<(), CudaError> {
        let [Arriving { placed, arrival, .. }, _] = &self.arriving;
        if placed.is_empty() || arrival.is_some() {
            return Ok(());
        }
        let blocks: Vec<u32> = placed.iter().map(|placed| placed.block).collect();
        self.let_leave(&blocks)?;
        let [Arriving { placed, arrival, .. }, _] = &mut self.arriving;
        // SAFETY: the buffer is pinned, has room for every block, and is not overwritten before the event; until then
        // no step uses these blocks, except after `settle`.
        *arrival = Some(unsafe { self.fetches.fetch(&layers.kernels, kv, placed) }?);
        self.arriving.swap(0, 1);
        Ok(())
    }

    /// Starts to copy the blocks' contents as of now in the model's stream. Later steps may overwrite them after
    /// [`let_overwrite`](Self::let_overwrite).
    pub(super) fn read(&mut self, layers: &Layers, kv: &DeviceKv, device: &Device, blocks: &[u32]) -> Result<PendingBlocks, CudaError> {
        let slots = self.outgoing.take(device, blocks.len())?;
        let placed: Vec<BlockSlot> = blocks.iter().zip(slots.addresses()).map(|(&block, slot)| BlockSlot { block, slot }).collect();
        let ready = layers.stream.record_event(None)?;
        // SAFETY: each slot is pinned, of a block's size, and left alone until `done`; later writes to these blocks wait until they
        // are gathered: those of steps by `let_overwrite`, those of fetches by `let_leave`.
        let published = unsafe { self.publishes.publish(&layers.kernels, kv, &placed, 0..layers.shape.layers, &ready) }?;
        self.leaving.push_back((blocks.to_vec(), published.gathered));
        Ok(PendingBlocks { slots, done: published.done })
    }
}

impl Arriving {
    fn forget_if_arrived(&mut self) {
        if self.arrival.as_ref().is_some_and(|arrival| arrival.is_complete()) {
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
    done: Arc<CudaEvent>,
    begun: Instant,
}

/// The deadline of a copy, which takes microseconds and waits for no more than a burst of others.
const COPY_MAX: Duration = Duration::from_secs(10);
/// The interval at which the host polls a copy. Its thread could wait in the driver, but not with a deadline.
const ASK_AGAIN: Duration = Duration::from_micros(20);

impl DeviceCopy {
    /// Blocks the thread until the device has read the last byte and written it, up to 10 s after the start. After an error, the copy may
    /// still be in flight.
    pub fn wait(&self) -> Result<(), ExecutorError> {
        let deadline = self.begun + COPY_MAX;
        self.done.context().bind_to_thread().map_err(CudaError::from)?;
        while !self.done.try_is_complete().map_err(CudaError::from)? {
            if Instant::now() > deadline {
                return Err(CudaError::Stuck { seconds: COPY_MAX.as_secs() }.into());
            }
            thread::sleep(ASK_AGAIN);
        }
        Ok(())
    }
}

/// Blocks that the device is copying out.
pub struct PendingBlocks {
    slots: Slots,
    done: Arc<CudaEvent>,
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
