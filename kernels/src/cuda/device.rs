//! A device, its memory and its streams.

use super::{
    CudaError,
    cache::KernelCache,
    compile::{Arch, Heads, Source},
    libraries,
};
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits, result, sys},
    nvrtc::Ptx,
};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The bits of a bf16 number.
pub type Bf16 = u16;

/// One GPU.
///
/// The owners of streams order them with events; `cudarc`'s own tracking, an event or two per buffer and call, is off.
pub struct Device {
    context: Arc<CudaContext>,
    /// The model's stream.
    stream: Arc<CudaStream>,
    cache: KernelCache,
    properties: Properties,
    allocated_bytes: AtomicUsize,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Properties {
    pub name: String,
    pub arch: Arch,
    pub multiprocessors: usize,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// The most shared memory of a thread block.
    pub shared_bytes_max: usize,
    pub memory_bytes: usize,
}

impl Device {
    /// The number of devices; 0 without a driver.
    pub fn count() -> usize {
        // SAFETY: looks for the driver's library and loads it.
        if !unsafe { sys::is_culib_present() } || result::init().is_err() {
            return 0;
        }
        CudaContext::device_count().map_or(0, |count| count.max(0) as usize)
    }

    /// Opens a device. Compiled kernels are kept in the folder `cache`, which is created if there is a device.
    pub fn open(ordinal: usize, cache: &Path) -> Result<Self, CudaError> {
        // SAFETY: looks for the driver's library and loads it.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let found = Self::count();
        if ordinal >= found {
            return Err(CudaError::NoDevice { ordinal, found });
        }
        let cache = KernelCache::open(cache)?;
        let context = CudaContext::new(ordinal)?;
        // SAFETY: a buffer passes from stream to stream only where an event orders the two (`transfer`, `peers`), also if the streams are of
        // different devices, and memory is freed on the stream that allocated it, or after the devices have become idle.
        unsafe { context.disable_event_tracking() };
        let properties = Properties::of(&context)?;
        if properties.arch.major < 8 {
            let Arch { major, minor } = properties.arch;
            return Err(CudaError::TooOld { name: properties.name, major, minor });
        }
        libraries::assert_that_the_driver_loads_nvrtcs_code()?;
        let stream = context.new_stream()?;
        Ok(Self { context, stream, cache, properties, allocated_bytes: AtomicUsize::new(0) })
    }

    /// The number by which it was opened.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    pub(crate) fn cache(&self) -> &KernelCache {
        &self.cache
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The model's stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Another stream, whose kernels take precedence over the model's.
    pub fn new_urgent_stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        Ok(self.context.new_stream_with_priority(URGENT)?)
    }

    /// Zeroed memory for `len` numbers, ready for every stream. Waits for the device: for set-up, not for steps.
    pub fn alloc<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, CudaError> {
        let bytes = len * size_of::<T>();
        let memory = self.stream.alloc_zeros(len).map_err(|error| CudaError::of_allocation(error, bytes))?;
        self.stream.synchronize()?;
        self.allocated_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(memory)
    }

    /// Memory for `len` numbers, for the model's stream.
    ///
    /// # Safety
    /// Every number is written, on the model's stream, before anything reads it.
    pub(crate) unsafe fn alloc_unwritten<T: DeviceRepr>(&self, len: usize) -> Result<CudaSlice<T>, CudaError> {
        let bytes = len * size_of::<T>();
        // SAFETY: as the caller promises.
        let memory = unsafe { self.stream.alloc(len) }.map_err(|error| CudaError::of_allocation(error, bytes))?;
        self.allocated_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(memory)
    }

    /// Memory holding these numbers, ready for every stream. Waits, as [`Device::alloc`] does.
    pub fn upload<T: DeviceRepr>(&self, numbers: &[T]) -> Result<CudaSlice<T>, CudaError> {
        let memory = self.stream.clone_htod(numbers).map_err(|error| CudaError::of_allocation(error, size_of_val(numbers)))?;
        self.stream.synchronize()?;
        self.allocated_bytes.fetch_add(size_of_val(numbers), Ordering::Relaxed);
        Ok(memory)
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        Ok(self.context.mem_get_info()?)
    }

    /// Bytes ever allocated here: this process's share if other processes also use the device.
    pub fn allocated_bytes(&self) -> usize {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    /// Waits for all streams, and returns any error on them.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.check_err()?;
        Ok(self.context.synchronize()?)
    }

    /// Whether the device still works after an error. Many errors leave the context unusable until the process ends.
    pub fn is_usable(&self) -> bool {
        // The first call may still return an earlier error.
        let _ = self.synchronize();
        self.synchronize().is_ok()
    }

    /// The kernels of a source, compiled for this device.
    pub(crate) fn module(&self, source: &Source, heads: Heads) -> Result<Arc<CudaModule>, CudaError> {
        let cubin = self.cache.load(source, self.properties.arch, heads)?;
        Ok(self.context.load_module(Ptx::from_binary(cubin))?)
    }
}

/// The priority of urgent streams; the driver takes the nearest that the device has.
const URGENT: i32 = -5;

impl Properties {
    fn of(context: &CudaContext) -> Result<Self, CudaError> {
        use sys::CUdevice_attribute as Attribute;
        let attribute = |which| Ok::<_, CudaError>(context.attribute(which)?.max(0) as usize);
        let (major, minor) = context.compute_capability()?;
        Ok(Self {
            name: context.name()?,
            arch: Arch { major: major as u32, minor: minor as u32 },
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            shared_bytes_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory_bytes: context.total_mem()?,
        })
    }
}

/// A kernel that may use `bytes` of dynamic shared memory. More than 48 KiB must be requested.
pub(crate) fn function(module: &Arc<CudaModule>, name: &str, bytes: usize) -> Result<CudaFunction, CudaError> {
    let function = module.load_function(name)?;
    if bytes > SHARED_BYTES_FREE {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, bytes as i32)?;
    }
    Ok(function)
}

const SHARED_BYTES_FREE: usize = 48 << 10;
