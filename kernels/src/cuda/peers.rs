//! Devices of one process that compute parts of one model: the order of their streams, and gathering what they have computed.
//!
//! A device reads the others' parts from their memory, over NVLink or the PCI bus, by a kernel of its own ([`Kernels::gather`]). What must
//! be complete before is a matter of events, so that a whole step on all devices is one graph: a stream that waits for an event of a
//! recorded stream joins the recording.

use super::{
    CudaError,
    device::Device,
    kernels::Kernels,
    launch::{Arg, PartAddresses, Shape, address, launch},
};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, sys};
use std::sync::Arc;

/// The most devices that compute parts of one model.
pub const RANKS_MAX: usize = 16;

/// The streams of devices that compute together, each with an event that it records for the others.
pub struct Peers {
    streams: Vec<Arc<CudaStream>>,
    events: Vec<CudaEvent>,
}

impl Peers {
    /// Lets each of the devices read the memory of all others. They must be of one kind, as each computes some things for itself that all must
    /// have alike, such as the experts that rows choose.
    pub fn connect(devices: &[Device]) -> Result<Self, CudaError> {
        assert!((1..=RANKS_MAX).contains(&devices.len()), "up to {RANKS_MAX} devices");
        let kind = |device: &Device| (device.properties().name.clone(), device.properties().arch);
        if let Some(other) = devices.iter().find(|device| kind(device) != kind(&devices[0])) {
            let (first, its) = (devices[0].properties().name.clone(), other.properties().name.clone());
            return Err(CudaError::UnlikeDevices { first, other: other.ordinal(), its });
        }
        for reader in devices {
            for other in devices.iter().filter(|other| other.ordinal() != reader.ordinal()) {
                reader.read_memory_of(other)?;
            }
        }
        let streams: Vec<_> = devices.iter().map(|device| Arc::clone(device.stream())).collect();
        let events = streams.iter().map(|stream| stream.context().new_event(None)).collect::<Result<_, _>>()?;
        Ok(Self { streams, events })
    }

    /// Checks that each device reads what the others have: where an IOMMU is in the way, a driver may say that memory can be read, and other
    /// bytes arrive. `kernels` are those of the devices.
    pub fn verify(&self, devices: &[Device], kernels: &[&Kernels]) -> Result<(), CudaError> {
        const NUMBERS: usize = 1 << 16;
        if devices.len() == 1 {
            return Ok(());
        }
        let pattern = |of: usize| (0..NUMBERS as u32).map(move |i| i.wrapping_mul(0x9e37_79b9).wrapping_add(of as u32)).collect::<Vec<_>>();
        let patterns = devices.iter().map(|device| device.upload(&pattern(device.ordinal()))).collect::<Result<Vec<_>, _>>()?;
        for (reader, kernels) in devices.iter().zip(kernels) {
            let mut read = reader.alloc::<u32>(NUMBERS)?;
            for (other, pattern_of_other) in devices.iter().zip(&patterns).filter(|(other, _)| other.ordinal() != reader.ordinal()) {
                // SAFETY: the pattern was uploaded, which waits, and does not change.
                unsafe { kernels.gather(reader.stream(), &mut read.as_view_mut(), &[Part::from(pattern_of_other)], 1, NUMBERS) }?;
                let found = reader.stream().clone_dtoh(&read)?;
                reader.stream().synchronize()?;
                if found != pattern(other.ordinal()) {
                    return Err(CudaError::WrongPeerBytes { reader: reader.ordinal(), other: other.ordinal() });
                }
            }
        }
        Ok(())
    }

    /// Makes all streams wait for the first one.
    pub fn fork(&self) -> Result<(), CudaError> {
        let (first, others) = self.streams.split_first().expect("at least one device");
        if !others.is_empty() {
            self.events[0].record(first)?;
        }
        others.iter().try_for_each(|stream| Ok(stream.wait(&self.events[0])?))
    }

    /// Makes the first stream wait for all others.
    pub fn join(&self) -> Result<(), CudaError> {
        for (stream, event) in self.streams.iter().zip(&self.events).skip(1) {
            event.record(stream)?;
            self.streams[0].wait(event)?;
        }
        Ok(())
    }

    /// Makes each stream wait for all others. Every stream waits for every other itself, as going by way of one of them would take twice
    /// as long.
    pub fn meet(&self) -> Result<(), CudaError> {
        if self.streams.len() == 1 {
            return Ok(());
        }
        self.events.iter().zip(&self.streams).try_for_each(|(event, stream)| event.record(stream))?;
        for (i, stream) in self.streams.iter().enumerate() {
            let mut others = self.events.iter().enumerate().filter(|(j, _)| *j != i);
            others.try_for_each(|(_, event)| stream.wait(event))?;
        }
        Ok(())
    }
}

impl Device {
    /// Lets this device's kernels and copies read memory of `other` that is or will be allocated.
    fn read_memory_of(&self, other: &Device) -> Result<(), CudaError> {
        let (own, its) = (self.context(), other.context());
        own.bind_to_thread()?;
        let mut can = 0;
        // SAFETY: both are devices, and the pointer is to a live integer.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, own.cu_device(), its.cu_device()) }.result()?;
        if can == 0 {
            return Err(CudaError::NoPeerAccess { reader: self.ordinal(), other: other.ordinal() });
        }
        // SAFETY: both contexts are alive.
        match unsafe { sys::cuCtxEnablePeerAccess(its.cu_ctx(), 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            // Without a switch between them, a device has up to eight peers.
            sys::CUresult::CUDA_ERROR_TOO_MANY_PEERS => {
                return Err(CudaError::NoPeerAccess { reader: self.ordinal(), other: other.ordinal() });
            }
            result => result.result()?,
        }
        // Streams allocate from pools where they can, and access to pools is enabled by itself.
        if its.has_async_alloc() {
            let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.ordinal() as i32 };
            let access = sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
            let mut pool = std::ptr::null_mut();
            // SAFETY: the device has a pool, which lives as long as the process; there is one description.
            unsafe {
                sys::cuDeviceGetMemPool(&mut pool, its.cu_device()).result()?;
                sys::cuMemPoolSetAccess(pool, &access, 1).result()?;
            }
        }
        Ok(())
    }
}

/// A part of a matrix, in the memory of the device that computed it.
#[derive(Clone, Copy)]
pub struct Part {
    address: u64,
    bytes: usize,
}

impl<T> From<&CudaSlice<T>> for Part {
    fn from(memory: &CudaSlice<T>) -> Self {
        Self { address: address(memory), bytes: memory.num_bytes() }
    }
}

impl<T> From<&CudaView<'_, T>> for Part {
    fn from(memory: &CudaView<'_, T>) -> Self {
        Self { address: address(memory), bytes: memory.len() * size_of::<T>() }
    }
}

impl Kernels {
    /// Sets each of `rows` rows of `to` to the concatenation of the parts' rows. to: `[rows, width]`, parts: `[rows.., own]`, where
    /// `own` is `width` over the number of parts, rounded up to `unit` numbers, and for the last part what is left; in whole multiples
    /// of 16 bytes.
    ///
    /// # Safety
    /// The stream's device may read the parts ([`Peers::connect`]). They are complete when the stream gets here, and nothing writes to them
    /// until it has passed.
    pub unsafe fn gather<T>(
        &self,
        stream: &CudaStream,
        to: &mut CudaViewMut<'_, T>,
        parts: &[Part],
        rows: usize,
        unit: usize,
    ) -> Result<(), CudaError> {
        assert!((1..=RANKS_MAX).contains(&parts.len()) && rows > 0 && to.len().is_multiple_of(rows), "rows of up to {RANKS_MAX} parts");
        let width = to.len() / rows;
        let own = own_width(width, parts.len(), unit);
        let last = width.checked_sub(own * (parts.len() - 1)).expect("the last part is not empty");
        let chunks = |numbers: usize| {
            let bytes = numbers * size_of::<T>();
            assert!(bytes > 0 && bytes.is_multiple_of(CHUNK_BYTES), "parts of a multiple of {CHUNK_BYTES} bytes");
            bytes / CHUNK_BYTES
        };
        let mut addresses = PartAddresses::EMPTY;
        for (i, (part, at)) in parts.iter().zip(&mut addresses.at).enumerate() {
            let numbers = if i + 1 < parts.len() { own } else { last };
            assert!(
                part.bytes >= chunks(numbers) * CHUNK_BYTES * rows && part.address.is_multiple_of(CHUNK_BYTES as u64),
                "parts of `rows` rows"
            );
            *at = part.address;
        }
        let blocks = (rows * chunks(width)).div_ceil(THREADS).min(BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors);
        let args = [to.into(), Arg::Parts(&addresses), chunks(width).into(), chunks(own).into(), rows.into()];
        // SAFETY: sizes are asserted, the rest is the caller's contract. A launch copies its arguments.
        unsafe { launch(stream, &self.gather, Shape::new((blocks, 1, 1), THREADS), &args) }
    }
}

/// Columns of a rank out of `width`, in whole units: of all ranks but the last, which has what is left.
pub fn own_width(width: usize, ranks: usize, unit: usize) -> usize {
    width.div_ceil(ranks).next_multiple_of(unit)
}

const _: () = assert!(RANKS_MAX == 16, "`Parts` in gather.cu");
const CHUNK_BYTES: usize = 16;
const THREADS: usize = 256;
/// Enough loads in flight for a link's latency.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;
