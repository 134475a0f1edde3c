//! Our own pinned host memory: copies from and to it proceed while the host does something else.

use super::{CudaError, device::Device, launch::address};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits, result, sys::CUresult};
use std::{ops::Range, ptr::NonNull, sync::Arc};

/// Pinned numbers. A copy from or to them may be in flight: every access waits for it first.
pub struct HostBuffer<T> {
    context: Arc<CudaContext>,
    start: NonNull<T>,
    len: usize,
    /// The event that marks the end of the last copy.
    busy: Option<CudaEvent>,
}

impl<T: DeviceRepr + ValidAsZeroBits> HostBuffer<T> {
    /// Allocates `len` zeros.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        let context = device.context().clone();
        context.bind_to_thread()?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: initialized right below.
        let memory = unsafe { result::malloc_host(bytes, 0) }.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::Pin { bytes, source: error },
            _ => error.into(),
        })?;
        // SAFETY: just allocated, with this size.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        let start = NonNull::new(memory.cast::<T>()).expect("the driver hands out memory or an error");
        Ok(Self { context, start, len, busy: None })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The numbers, once no copy is in flight.
    pub fn numbers(&mut self) -> Result<&mut [T], CudaError> {
        if let Some(event) = self.busy.take() {
            event.synchronize()?;
        }
        // SAFETY: allocated with this length, initialized, and borrowed as `self` is; no copy is in flight.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) })
    }

    /// Some of the numbers, if the owner knows that no copy of them is in flight.
    ///
    /// # Safety
    /// Nothing writes these numbers while the slice lives.
    pub unsafe fn part(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len, "numbers that there are");
        // SAFETY: inside the allocation, initialized, borrowed as `self` is, and not written, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// Copies the first `to.len()` numbers to the device.
    pub fn send(&mut self, stream: &CudaStream, to: &mut CudaViewMut<'_, T>) -> Result<(), CudaError> {
        let (count, to) = (to.len(), address(to));
        self.context.bind_to_thread()?;
        // SAFETY: `to` has as many numbers, and `busy` keeps ours unchanged until they are copied.
        unsafe { result::memcpy_htod_async(to, &self.numbers()?[..count], stream.cu_stream()) }?;
        self.busy = Some(stream.record_event(None)?);
        Ok(())
    }

    /// Copies `from` to the front, for [`numbers`](Self::numbers) to return.
    pub fn receive(&mut self, stream: &CudaStream, from: &CudaView<'_, T>) -> Result<(), CudaError> {
        let (count, from) = (from.len(), address(from));
        self.context.bind_to_thread()?;
        // SAFETY: `from` has as many numbers, and `busy` holds readers back until they are here.
        unsafe { result::memcpy_dtoh_async(&mut self.numbers()?[..count], from, stream.cu_stream()) }?;
        self.busy = Some(stream.record_event(None)?);
        Ok(())
    }

    /// The device's address of number `offset`.
    pub fn address(&self, offset: usize) -> u64 {
        assert!(offset <= self.len);
        (self.start.as_ptr().addr() + offset * size_of::<T>()) as u64
    }
}

impl<T> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        if let Some(event) = self.busy.take() {
            self.context.record_err(event.synchronize());
        }
        // SAFETY: allocated in `new`, freed only here, and no copy is in flight.
        self.context.record_err(unsafe { result::free_host(self.start.as_ptr().cast()) });
    }
}

// SAFETY: owned memory of plain numbers.
unsafe impl<T: Send> Send for HostBuffer<T> {}
// SAFETY: as above; nothing changes through a shared reference.
unsafe impl<T: Sync> Sync for HostBuffer<T> {}
