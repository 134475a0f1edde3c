//! A process's devices, and one connection's rails over them.

use super::{
    DeviceNames,
    completions::{Outcome, Pending, Poller},
    devices::{Device, open_all},
    rail::{HalfOpen, REQUESTS, Rail, Remote},
    staging::{Kind, PAD_BYTES, Place, Staging},
    verbs::{Access, Local, Region, VerbsError},
};
use crate::{
    arena::{ArenaError, Layout, PROOF_BYTES, proof},
    client::TransferCounters,
    core::validate::{Copied, checksum},
    transport::{Access as Way, Broken, Filled, Landing, Offer, STALL_MAX, Slots},
};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};
use tidemill_proto::pool::{RailEnd, RailOpened, ToPool, Transport};
use tokio::sync::{mpsc, oneshot};

/// The RDMA devices of a process that reads and writes blocks.
#[derive(Debug)]
pub struct Nics {
    nics: Vec<Arc<Nic>>,
    /// The staging memory for blocks of the size that was last requested.
    staging: Mutex<Option<Arc<Staging>>>,
    /// The process's own memory that is registered, by registration and device.
    memory: RwLock<Vec<Arc<Vec<Region>>>>,
}

#[derive(Debug)]
pub(super) struct Nic {
    pub(super) index: usize,
    pub(super) device: Device,
    pub(super) pending: Arc<Pending>,
    _poller: Poller,
}

/// A registration of memory, which ends when this is dropped.
#[derive(Debug)]
pub struct Registration {
    nics: Arc<Nics>,
    regions: Arc<Vec<Region>>,
}

impl Nics {
    /// Opens devices. If there are none, blocks use other transports.
    pub fn open(names: &DeviceNames) -> Arc<Self> {
        let open = |name: &str| {
            let device = Device::open(name, 2 * REQUESTS)?;
            if device.limits.requests < REQUESTS {
                let what = "holding enough requests";
                return Err(VerbsError::Refused { device: name.into(), what, status: format!("at most {}", device.limits.requests) });
            }
            let pending = Arc::<Pending>::default();
            let started = Poller::start(name, Arc::clone(&device.queue), Arc::clone(&pending));
            let poller = started.map_err(|source| VerbsError::Failed { device: name.into(), what: "starting its thread", source })?;
            Ok((device, pending, poller))
        };
        let nics = open_all(names, open).into_iter().enumerate();
        let nics = nics.map(|(index, (device, pending, _poller))| Arc::new(Nic { index, device, pending, _poller })).collect();
        Arc::new(Self { nics, staging: Mutex::default(), memory: RwLock::default() })
    }

    pub fn is_empty(&self) -> bool {
        self.nics.is_empty()
    }

    /// Registers memory into which blocks will be read, so that they arrive without a copy. Should the memory be remapped before the
    /// registration is dropped, reads into it are misses and affect no other memory: the old pages stay allocated.
    pub fn register(self: &Arc<Self>, memory: &mut [u8]) -> Result<Registration, VerbsErrorText> {
        let register = |nic: &Arc<Nic>| {
            // SAFETY: peers get no access; the device writes only to a read's destination inside it, which is borrowed meanwhile.
            unsafe { Region::register(Arc::clone(&nic.device.domain), memory.as_mut_ptr(), memory.len(), Access::LOCAL) }
        };
        let regions = self.nics.iter().map(register).collect::<Result<Vec<_>, _>>().map_err(|error| VerbsErrorText(error.to_string()))?;
        let regions = Arc::new(regions);
        self.memory.write().push(Arc::clone(&regions));
        Ok(Registration { nics: Arc::clone(self), regions })
    }

    /// The memory as named in requests to a device, if it is registered.
    fn registered(&self, device: usize, memory: &mut [u8]) -> Option<(Local, Arc<Vec<Region>>)> {
        let part = |regions: &Arc<Vec<Region>>| {
            let local = regions.get(device)?.part(memory.as_mut_ptr() as usize, memory.len())?;
            Some((local, Arc::clone(regions)))
        };
        self.memory.read().iter().find_map(part)
    }

    fn staging(&self, block_bytes: usize) -> Result<Arc<Staging>, VerbsError> {
        let mut staging = self.staging.lock();
        match &*staging {
            Some(staging) if staging.block_bytes() == block_bytes => Ok(Arc::clone(staging)),
            _ => {
                let new = Staging::new(block_bytes, self.nics.iter().map(|nic| &nic.device))?;
                Ok(Arc::clone(staging.insert(new)))
            }
        }
    }
}

/// The reason why memory cannot be registered.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct VerbsErrorText(String);

impl Drop for Registration {
    fn drop(&mut self) {
        self.nics.memory.write().retain(|regions| !Arc::ptr_eq(regions, &self.regions));
    }
}

/// A connection's rails. Not usable without an open one.
#[derive(Debug)]
pub(crate) struct Rails {
    nics: Arc<Nics>,
    staging: Arc<Staging>,
    layout: Layout,
    nonce: [u8; 16],
    /// The rails, at most one per device; closed ones are replaced.
    rails: RwLock<Vec<Arc<Rail>>>,
    turn: AtomicUsize,
    control: mpsc::WeakSender<ToPool>,
    counters: Arc<TransferCounters>,
}

/// Makes a connection's rails, none of which is open yet.
pub(in crate::transport) fn open(offer: &Offer<'_>) -> Result<Way, ArenaError> {
    let nics = offer.nics.filter(|nics| !nics.is_empty()).ok_or(ArenaError::Rails("this process has no RDMA device".into()))?;
    Ok(Way::Slots(Arc::new(Arc::new(Rails::new(nics, offer)?))))
}

/// Rails that exist only at this end so far.
#[derive(Debug, Default)]
pub(crate) struct Opening(Vec<HalfOpen>);

impl Opening {
    pub(crate) fn ends(&self) -> Vec<RailEnd> {
        self.0.iter().map(HalfOpen::end).collect()
    }
}

impl Rails {
    fn new(nics: &Arc<Nics>, offer: &Offer<'_>) -> Result<Self, ArenaError> {
        let info = offer.arena;
        let layout =
            Layout::new(info.capacity_bytes, info.block_bytes).ok_or(ArenaError::Rails("the arena's announced size is absurd".into()))?;
        let staging = nics.staging(layout.block_bytes).map_err(|error| ArenaError::Rails(error.to_string()))?;
        let (nics, control, counters) = (Arc::clone(nics), offer.control.clone(), Arc::clone(offer.counters));
        Ok(Self { nics, staging, layout, nonce: info.nonce, rails: RwLock::default(), turn: AtomicUsize::new(0), control, counters })
    }

    /// Makes this end of a rail for each device that has none open. Takes a while: call it on a thread that may block.
    pub(crate) fn begin(&self) -> Opening {
        let open: Vec<usize> = self.open_rails().iter().map(|rail| rail.nic().index).collect();
        let missing = self.nics.nics.iter().filter(|nic| !open.contains(&nic.index));
        let half_open = missing.filter_map(|nic| {
            let half = HalfOpen::new(nic);
            half.inspect_err(|error| tracing::debug!(%error, "no rail over this device now")).ok()
        });
        Opening(half_open.collect())
    }

    /// Connects these rails with the node's ends, in the same order, and keeps those over which the node's arena can be read. Blocks the
    /// thread.
    pub(crate) fn finish(self: &Arc<Self>, opening: Opening, opened: Vec<Option<RailOpened>>) {
        for (half, opened) in opening.0.into_iter().zip(opened) {
            let Some(opened) = opened else { continue };
            let rail = match half.open(opened, self.control.clone(), &self.counters) {
                Ok(rail) => rail,
                Err(error) => {
                    tracing::warn!(%error, "no rail");
                    continue;
                }
            };
            if self.reads_the_arena(&rail) {
                tracing::info!(device = rail.nic().device.name(), pair = opened.end.pair, "rail open");
                let mut rails = self.rails.write();
                rails.retain(|rail| rail.is_open());
                rails.push(rail);
            } else {
                rail.close("the node's arena cannot be read over it");
            }
        }
    }

    /// Whether the rail can read the node's arena: checks the proof at its start.
    fn reads_the_arena(&self, rail: &Arc<Rail>) -> bool {
        let Some(pad) = self.staging.take(Kind::Pad, Instant::now() + STALL_MAX) else { return false };
        let start = (pad.local(rail.nic().index, PROOF_BYTES), Remote { at: 0, bytes: PROOF_BYTES });
        const { assert!(PROOF_BYTES <= PAD_BYTES) };
        // SAFETY: this thread owns the pad.
        let read = unsafe { rail.read(start, None) };
        read.is_ok() && pad.start_of::<PROOF_BYTES>() == proof(self.nonce)
    }

    /// Closes all rails after the node has closed its ends.
    pub(crate) fn close(&self, reason: &str) {
        self.rails.read().iter().for_each(|rail| rail.close(reason));
    }

    /// Whether a device has no open rail.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.open_rails().len() < self.nics.nics.len()
    }

    fn open_rails(&self) -> Vec<Arc<Rail>> {
        self.rails.read().iter().filter(|rail| rail.is_open()).cloned().collect()
    }

    /// The open rails, starting with the one whose turn it is.
    fn in_turn(&self) -> Vec<Arc<Rail>> {
        let mut rails = self.open_rails();
        if !rails.is_empty() {
            let first = self.turn.fetch_add(1, Relaxed) % rails.len();
            rails.rotate_left(first);
        }
        rails
    }

    /// An open rail, and a place into which it can read.
    #[cfg(test)]
    pub(super) fn for_test(&self, kind: Kind) -> (Arc<Rail>, Place) {
        (self.open_rails().remove(0), self.staging.take(kind, Instant::now()).expect("nobody else is here"))
    }

    fn slot(&self, slot: u32) -> Remote {
        Remote { at: self.layout.slot_at(slot), bytes: self.layout.block_bytes }
    }

    fn generation(&self, slot: u32) -> Remote {
        Remote { at: self.layout.generation_at(slot), bytes: size_of::<u64>() }
    }

    /// Starts a WRITE over the next rail that accepts it.
    fn send(&self, buffer: &Arc<Place>, slot: u32) -> Result<oneshot::Receiver<Outcome>, Broken> {
        self.in_turn().iter().find_map(|rail| rail.write(buffer, self.slot(slot)).ok()).ok_or(Broken)
    }

    /// Reads a block over one rail.
    fn read_over(&self, rail: &Arc<Rail>, slot: u32, to: &mut [u8], until: Instant) -> Result<Copied, Broken> {
        let device = rail.nic().index;
        let pad = self.staging.take(Kind::Pad, until).ok_or(Broken)?;
        let then = Some((&pad, self.generation(slot)));
        let checksum = match self.nics.registered(device, to) {
            Some((local, _registered)) => {
                // SAFETY: `to` is borrowed until this returns, and registered as long.
                unsafe { rail.read((local, self.slot(slot)), then) }?;
                checksum(to)
            }
            None => {
                let buffer = self.buffer(until)?;
                // SAFETY: this thread owns the buffer.
                unsafe { rail.read((buffer.local(device, to.len()), self.slot(slot)), then) }?;
                buffer.copy_to(to)
            }
        };
        Ok(Copied { checksum, generation_after: u64::from_le_bytes(pad.start_of()) })
    }

    fn post_batches(&self) {
        self.open_rails().iter().for_each(Rail::flush);
    }

    /// A free buffer. If there is none, batches that hold buffers are posted first.
    fn buffer(&self, until: Instant) -> Result<Place, Broken> {
        if !self.staging.has_room() {
            self.post_batches();
        }
        self.staging.take(Kind::Buffer, until).ok_or(Broken)
    }
}

impl Slots for Arc<Rails> {
    fn transport(&self) -> Transport {
        Transport::Rdma
    }

    fn rails(&self) -> Option<&Arc<Rails>> {
        Some(self)
    }

    fn usable(&self) -> bool {
        self.rails.read().iter().any(|rail| rail.is_open())
    }

    fn room(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if !self.staging.has_room() {
                self.post_batches();
                self.staging.room().await;
            }
        })
    }

    fn write(&self, slot: u32, bytes: &[u8]) -> Result<Filled, Broken> {
        let buffer = Arc::new(self.buffer(Instant::now() + STALL_MAX)?);
        let checksum = buffer.fill(bytes);
        let landed = self.send(&buffer, slot)?;
        Ok(Filled { checksum, landing: Some(Landing(Box::pin(land(Arc::clone(self), slot, buffer, landed)))) })
    }

    fn flush(&self) {
        self.post_batches();
    }

    fn read(&self, slot: u32, to: &mut [u8]) -> Result<Copied, Broken> {
        let until = Instant::now() + STALL_MAX;
        self.in_turn().iter().find_map(|rail| self.read_over(rail, slot, to, until).ok()).ok_or(Broken)
    }
}

/// Waits until a block is in its slot. If its rail breaks, the block goes over another one; if there is none, it is returned.
async fn land(rails: Arc<Rails>, slot: u32, buffer: Arc<Place>, mut landed: oneshot::Receiver<Outcome>) -> Result<(), Bytes> {
    loop {
        if let Ok(Ok(())) = landed.await {
            return Ok(());
        }
        let Ok(again) = rails.send(&buffer, slot) else {
            let mut bytes = vec![0; buffer.bytes()];
            buffer.copy_to(&mut bytes);
            return Err(bytes.into());
        };
        rails.post_batches();
        landed = again;
    }
}
