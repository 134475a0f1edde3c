//! Pinning memory of other owners, so that copies run at the rate of the bus while the host does something else.

use super::CudaError;
use cudarc::driver::{CudaContext, sys};
use std::{ffi::c_void, ptr::NonNull, sync::Arc};

/// Host memory of another owner, registered with the device for as long as this lives: the pool's arena, mapped into a worker.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<CudaContext>,
    start: NonNull<u8>,
    bytes: usize,
    /// The device address of the memory.
    address: u64,
}

impl Pinned {
    /// Registers `bytes` from `start` on. Locks them in memory, which counts against the process's limits and takes 0.1 s per GiB, or up to
    /// 1 s if the system has yet to provide the pages. Other calls of the driver wait meanwhile, also those of other processes: register
    /// little at a time.
    ///
    /// # Safety
    /// The memory stays mapped, for reading and writing, until this is dropped.
    pub unsafe fn register(context: &Arc<CudaContext>, start: NonNull<u8>, bytes: usize) -> Result<Self, CudaError> {
        let context = Arc::clone(context);
        context.bind_to_thread()?;
        let host = start.as_ptr().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the memory is mapped, as the caller promises.
        unsafe { sys::cuMemHostRegister_v2(host, bytes, flags) }.result().map_err(|source| CudaError::Pin { bytes, source })?;
        let mut pinned = Self { context, start, bytes, address: 0 };
        // SAFETY: registered with DEVICEMAP just now.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut pinned.address, host, 0) }.result()?;
        Ok(pinned)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device's address of byte `offset`.
    pub fn address(&self, offset: usize) -> u64 {
        assert!(offset <= self.bytes);
        self.address + offset as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: registered in `register`, and unregistered only here.
        self.context.record_err(unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) }.result());
    }
}

// SAFETY: holds only an address; any thread may register and unregister.
unsafe impl Send for Pinned {}
// SAFETY: as above; nothing changes through a shared reference.
unsafe impl Sync for Pinned {}
