//! The driver (`libcuda`): context, memory, streams, events, modules, graphs.

use crate::{
    device::{Device, Work, device},
    fault::Fault,
    options::options,
    ptx::{decode::decode, program::Kernel},
};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::Arc,
};

type Status = u32;
type Pointer = u64;

const OK: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const NO_DEVICE: Status = 100;
const INVALID_DEVICE: Status = 101;
const INVALID_CONTEXT: Status = 201;
const PEER_ACCESS_UNSUPPORTED: Status = 217;
const NOT_FOUND: Status = 500;
const NOT_READY: Status = 600;
const PEER_ACCESS_ALREADY_ENABLED: Status = 704;
const ALREADY_REGISTERED: Status = 712;
const CAPTURE_UNSUPPORTED: Status = 900;

/// The first bytes of a module, which the PTX's length (8 bytes) and text follow. Written by `nvrtc.rs`.
pub(super) const MODULE_MAGIC: &[u8; 16] = b"TIDEMILL-STANDIN";

/// The handle of the first device's context; those of the others follow.
const CONTEXT: u64 = 0xc0;

/// Runs a call, unless an earlier one has failed, or this thread has no context. A fault is reported on stderr and persists.
pub(super) fn call(name: &str, run: impl FnOnce(&mut Device) -> Result<Status, Fault>) -> Status {
    let Some(current) = of_context(CURRENT.get()) else {
        eprintln!("gpu-standin: {name}: this thread has no context");
        return INVALID_CONTEXT;
    };
    let mut device = device();
    (device.current, device.memory.accessor) = (current, current);
    if let Some(code) = device.failed[current as usize] {
        return code;
    }
    let fault = match run(&mut device) {
        Ok(status) => return status,
        Err(fault) => fault,
    };
    // The device that did the work; others that wait for it do so for ever.
    let failing = device.memory.accessor;
    if device.failed[failing as usize].is_none() {
        eprintln!("gpu-standin: {name}: {fault}\n    seed {}", options().seed);
        device.failed[failing as usize] = Some(fault.code());
    }
    if failing == current {
        return fault.code();
    }
    if name != "cuEventQuery" {
        eprintln!("gpu-standin: {name}: device {current} waits for device {failing}, which has failed: the call never returns");
        std::process::abort();
    }
    NOT_READY
}

/// The device of a context.
fn of_context(context: u64) -> Option<u32> {
    let ordinal = context.checked_sub(CONTEXT)?;
    (ordinal < options().devices.into()).then_some(ordinal as u32)
}

fn done(outcome: Result<(), Fault>) -> Result<Status, Fault> {
    outcome.map(|()| OK)
}

fn dropped(name: &str) -> bool {
    options().drop.as_deref() == Some(name)
}

thread_local! {
    /// The context of this thread's calls.
    static CURRENT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    /// Whether NVRTC is at work: it looks for a driver, and would ask this one for functions that only NVIDIA's has.
    pub(super) static COMPILES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> Status {
    let _ = options();
    if COMPILES.get() { NO_DEVICE } else { OK }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(to: *mut c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = options().driver };
    OK
}

/// The table by which NVIDIA's own libraries reach each other, which is absent here.
#[unsafe(no_mangle)]
extern "C" fn cuGetExportTable(_to: *mut *const c_void, _which: *const c_void) -> Status {
    NOT_FOUND
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *count = options().devices as c_int };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(to: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = ordinal };
    if (0..options().devices as c_int).contains(&ordinal) { OK } else { INVALID_DEVICE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, len: c_int, _device: c_int) -> Status {
    let name = b"Tidemill's stand-in for a GPU\0";
    if (len as usize) < name.len() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's buffer of `len` bytes.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(name.as_ptr(), name.len()) };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(to: *mut c_int, attribute: c_uint, _device: c_int) -> Status {
    let (major, minor) = options().arch;
    let value = match attribute {
        // Multiprocessors, second-level cache, memory pools.
        16 => 4,
        38 => 4 << 20,
        115 => 1,
        75 => major,
        76 => minor,
        // The most shared memory of a block: that of A100 and H100.
        97 => {
            if major == 9 {
                227 << 10
            } else {
                163 << 10
            }
        }
        _ => {
            eprintln!("gpu-standin: the device attribute {attribute} is not implemented");
            return INVALID_VALUE;
        }
    };
    // SAFETY: the caller's pointer.
    unsafe { *to = value };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *bytes = options().memory_bytes as usize };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut u64, device: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = CONTEXT + device as u64 };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(to: *mut c_int, device: c_int, peer: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = (options().peers && device != peer).into() };
    OK
}

/// Lets the present device access the memory of another.
#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(context: u64, _flags: c_uint) -> Status {
    call("cuCtxEnablePeerAccess", |device| {
        let Some(peer) = of_context(context).filter(|peer| *peer != device.current) else { return Ok(INVALID_CONTEXT) };
        if !options().peers {
            return Ok(PEER_ACCESS_UNSUPPORTED);
        }
        let is_new = device.memory.peers.insert((device.current, peer));
        Ok(if is_new { OK } else { PEER_ACCESS_ALREADY_ENABLED })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Status {
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(to: *mut u64) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = CURRENT.get() };
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> Status {
    if context != 0 && of_context(context).is_none() {
        return INVALID_CONTEXT;
    }
    CURRENT.set(context);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Status {
    call("cuCtxSynchronize", |device| done(device.synchronize_current()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: Status, to: *mut *const c_char) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = error_name(code).as_ptr() };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: Status, to: *mut *const c_char) -> Status {
    // SAFETY: as above.
    unsafe { cuGetErrorName(code, to) }
}

fn error_name(code: Status) -> &'static CStr {
    match code {
        1 => c"invalid value",
        2 => c"out of memory",
        101 => c"invalid device",
        201 => c"invalid context",
        217 => c"peer access unsupported",
        500 => c"not found",
        600 => c"not ready",
        700 => c"illegal address",
        704 => c"peer access already enabled",
        712 => c"host memory already registered",
        716 => c"misaligned address",
        719 => c"launch failed",
        801 => c"not supported",
        900 => c"not permitted while a stream is captured",
        _ => c"an error of the GPU stand-in",
    }
}

// --- Memory.

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    call("cuMemGetInfo", |device| {
        // SAFETY: the caller's pointers.
        unsafe {
            *free = device.memory.free_bytes() as usize;
            *total = device.memory.total as usize;
        }
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(to: *mut Pointer, bytes: usize) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { allocate(to, bytes, false) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(to: *mut Pointer, bytes: usize, _stream: u64) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { allocate(to, bytes, true) }
}

unsafe fn allocate(to: *mut Pointer, bytes: usize, is_pooled: bool) -> Status {
    call("cuMemAlloc", |device| {
        if device.captures() {
            return Ok(CAPTURE_UNSUPPORTED);
        }
        if bytes == 0 {
            return Ok(INVALID_VALUE);
        }
        let Some(start) = device.memory.allocate(bytes as u64, is_pooled) else { return Ok(OUT_OF_MEMORY) };
        // SAFETY: the caller's pointer.
        unsafe { *to = start };
        Ok(OK)
    })
}

/// A pool's handle is its device's number, and one more.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetMemPool(to: *mut u64, device: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = device as u64 + 1 };
    OK
}

/// `CUmemAccessDesc`: a device that may access a pool's memory.
#[repr(C)]
struct PoolAccess {
    kind: c_uint,
    device: c_int,
    flags: c_uint,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAccess(pool: u64, access: *const PoolAccess, count: usize) -> Status {
    const A_DEVICE: c_uint = 1;
    const READ_AND_WRITE: c_uint = 3;
    call("cuMemPoolSetAccess", |device| {
        // SAFETY: the caller's array.
        for PoolAccess { kind, device: peer, flags } in unsafe { std::slice::from_raw_parts(access, count) } {
            if *kind != A_DEVICE || *flags != READ_AND_WRITE || pool == 0 || !options().peers {
                return Ok(INVALID_VALUE);
            }
            if !dropped("pool_access") {
                device.memory.pool_peers.insert((*peer as u32, pool as u32 - 1));
            }
        }
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: Pointer) -> Status {
    call("cuMemFree", |device| {
        device.synchronize()?;
        done(device.memory.free(address))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: Pointer, stream: u64) -> Status {
    call("cuMemFreeAsync", |device| done(device.push(stream, Work::Free { address })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Status {
    call("cuMemHostAlloc", |device| {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), 4096) else { return Ok(INVALID_VALUE) };
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Ok(OUT_OF_MEMORY);
        }
        device.host_allocations.insert(start.addr() as u64, layout);
        device.memory.pin(start, bytes as u64, false);
        // SAFETY: the caller's pointer.
        unsafe { *to = start.cast() };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(start: *mut c_void) -> Status {
    call("cuMemFreeHost", |device| {
        // The driver also waits for the device.
        device.synchronize()?;
        let address = start.addr() as u64;
        let Some(layout) = device.host_allocations.remove(&address) else { return Ok(INVALID_VALUE) };
        device.memory.unpin(address);
        // SAFETY: allocated in `cuMemHostAlloc` with this layout, and not freed yet.
        unsafe { dealloc(start.cast(), layout) };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, _flags: c_uint) -> Status {
    call("cuMemHostRegister", |device| {
        if device.registered_bytes + bytes as u64 > options().pinned_bytes_max || bytes as u64 > options().registered_bytes_max {
            return Ok(OUT_OF_MEMORY);
        }
        if device.memory.has_pinned_pages(start.addr() as u64, bytes as u64) {
            return Ok(ALREADY_REGISTERED);
        }
        device.registered_bytes += bytes as u64;
        device.memory.pin(start.cast(), bytes as u64, is_shared(start.addr()));
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: *mut c_void) -> Status {
    call("cuMemHostUnregister", |device| {
        device.synchronize()?;
        let Some(bytes) = device.memory.unpin(start.addr() as u64) else { return Ok(INVALID_VALUE) };
        device.registered_bytes -= bytes;
        Ok(OK)
    })
}

/// Whether the memory at an address is a mapping shared with other processes, according to the system.
fn is_shared(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // `START-END PERMISSIONS …`, whose fourth permission is `s` or `p`.
    let shared = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let at = |text| usize::from_str_radix(text, 16).ok();
        (at(start)?..at(end)?).contains(&address).then(|| rest.as_bytes().get(3) == Some(&b's'))
    };
    maps.lines().find_map(shared).unwrap_or(false)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(to: *mut Pointer, start: *mut c_void, _flags: c_uint) -> Status {
    call("cuMemHostGetDevicePointer", |device| {
        if !device.memory.is_pinned(start.addr() as u64, 1) {
            return Ok(INVALID_VALUE);
        }
        // SAFETY: the caller's pointer.
        unsafe { *to = start.addr() as u64 };
        Ok(OK)
    })
}

// --- Copies.

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyAsync(to: Pointer, from: Pointer, bytes: usize, stream: u64) -> Status {
    call("cuMemcpyAsync", |device| done(device.push(stream, Work::Copy { to, from, bytes: bytes as u64, check: None })))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: Pointer, from: Pointer, bytes: usize, stream: u64) -> Status {
    cuMemcpyAsync(to, from, bytes, stream)
}

/// `CUDA_MEMCPY2D`: an end of a copy of rows.
#[repr(C)]
struct End {
    x: usize,
    y: usize,
    kind: c_uint,
    host: *const c_void,
    address: Pointer,
    array: *const c_void,
    pitch: usize,
}

/// The end of a copy of rows whose kind tells that its address is of the space that all devices and the host share.
const UNIFIED: c_uint = 4;

#[repr(C)]
struct Rows {
    from: End,
    to: End,
    width: usize,
    height: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Rows, stream: u64) -> Status {
    call("cuMemcpy2DAsync", |device| {
        // SAFETY: the caller's pointer.
        let Rows { from, to, width, height } = unsafe { &*copy };
        let is_simple = |end: &End| end.kind == UNIFIED && end.x == 0 && end.y == 0 && end.pitch >= *width;
        if !is_simple(from) || !is_simple(to) {
            return Ok(INVALID_VALUE);
        }
        for row in 0..*height {
            let at = |end: &End| end.address + (row * end.pitch) as u64;
            device.push(stream, Work::Copy { to: at(to), from: at(from), bytes: *width as u64, check: None })?;
        }
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: Pointer, from: *const c_void, bytes: usize, stream: u64) -> Status {
    call("cuMemcpyHtoDAsync", |device| {
        let (address, len) = (from.addr() as u64, bytes as u64);
        if device.memory.is_pinned(address, len) {
            return done(device.push(stream, Work::Copy { to, from: address, bytes: len, check: None }));
        }
        // SAFETY: the caller's memory. Ordinary memory is staged before the call returns.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
        done(device.push(stream, Work::Send { to, bytes }))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Pointer, bytes: usize, stream: u64) -> Status {
    call("cuMemcpyDtoHAsync", |device| {
        let (address, len) = (to.addr() as u64, bytes as u64);
        if device.memory.is_pinned(address, len) {
            return done(device.push(stream, Work::Copy { to: address, from, bytes: len, check: None }));
        }
        if device.is_capturing(stream) {
            return Ok(CAPTURE_UNSUPPORTED);
        }
        device.synchronize_stream(stream)?;
        let read = device.memory.read(from, len, true, "a copy to the host reads")?;
        // SAFETY: the caller's memory.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(read.as_ptr(), bytes) };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: Pointer, byte: u8, bytes: usize, stream: u64) -> Status {
    call("cuMemsetD8Async", |device| done(device.push(stream, Work::Fill { to, byte, bytes: bytes as u64 })))
}

// --- Streams and events.

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(to: *mut u64, _flags: c_uint) -> Status {
    call("cuStreamCreate", |device| {
        let stream = device.new_stream();
        // SAFETY: the caller's pointer.
        unsafe { *to = stream };
        Ok(OK)
    })
}

/// Priorities are ignored, as any stream may run at any time here.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(to: *mut u64, flags: c_uint, _priority: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { cuStreamCreate(to, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: u64, to: *mut c_uint) -> Status {
    call("cuStreamIsCapturing", |device| {
        // SAFETY: the caller's pointer.
        unsafe { *to = device.is_capturing(stream).into() };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> Status {
    call("cuStreamDestroy", |device| done(device.destroy_stream(stream)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> Status {
    call("cuStreamSynchronize", |device| if device.captures() { Ok(CAPTURE_UNSUPPORTED) } else { done(device.synchronize_stream(stream)) })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> Status {
    if dropped("cuStreamWaitEvent") {
        return OK;
    }
    call("cuStreamWaitEvent", |device| {
        if device.is_across(stream, event) {
            device.waits_across += 1;
            if dropped("waits_across") && device.waits_across.is_multiple_of(options().every) {
                return Ok(OK);
            }
        }
        done(device.wait_event(stream, event))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(to: *mut u64, _flags: c_uint) -> Status {
    call("cuEventCreate", |device| {
        let event = device.new_event();
        // SAFETY: the caller's pointer.
        unsafe { *to = event };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> Status {
    call("cuEventDestroy", |device| {
        device.destroy_event(event);
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> Status {
    call("cuEventRecord", |device| done(device.record(event, stream)))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> Status {
    if dropped("cuEventQuery") {
        return OK;
    }
    call("cuEventQuery", |device| Ok(if device.query(event)? { OK } else { NOT_READY }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> Status {
    if dropped("cuEventSynchronize") {
        return OK;
    }
    call("cuEventSynchronize", |device| done(device.synchronize_event(event)))
}

/// Reports one microsecond, as the stand-in measures no time.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(ms: *mut f32, _start: u64, end: u64) -> Status {
    call("cuEventElapsedTime", |device| {
        device.synchronize_event(end)?;
        // SAFETY: the caller's pointer.
        unsafe { *ms = 1e-3 };
        Ok(OK)
    })
}

// --- Graphs.

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: u64, _mode: c_uint) -> Status {
    call("cuStreamBeginCapture", |device| done(device.begin_capture(stream)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: u64, to: *mut u64) -> Status {
    call("cuStreamEndCapture", |device| {
        let graph = device.end_capture(stream)?;
        // SAFETY: the caller's pointer.
        unsafe { *to = graph };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(to: *mut u64, graph: u64, _flags: u64) -> Status {
    call("cuGraphInstantiate", |device| {
        let instance = device.instantiate(graph)?;
        // SAFETY: the caller's pointer.
        unsafe { *to = instance };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphUpload(_graph: u64, _stream: u64) -> Status {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(graph: u64, stream: u64) -> Status {
    call("cuGraphLaunch", |device| done(device.launch_graph(graph, stream)))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: u64) -> Status {
    call("cuGraphDestroy", |device| {
        device.destroy_graph(graph);
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(graph: u64) -> Status {
    cuGraphDestroy(graph)
}

// --- Modules. Handles are boxes: a module's is freed when it is unloaded, a kernel's never.

struct Module {
    /// The device whose context loaded it.
    device: u32,
    kernels: Vec<Arc<Kernel>>,
}

struct Function {
    device: u32,
    kernel: Arc<Kernel>,
    dynamic_max: std::sync::atomic::AtomicU32,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(to: *mut *mut c_void, image: *const c_void) -> Status {
    call("cuModuleLoadData", |device| {
        let start = image.cast::<u8>();
        // SAFETY: every image has at least as many bytes as its magic, or ends in a zero before.
        let magic = (0..MODULE_MAGIC.len()).all(|i| unsafe { *start.add(i) } == MODULE_MAGIC[i]);
        if !magic {
            eprintln!("gpu-standin: a module that the stand-in's NVRTC did not make; is the kernel cache a real GPU's?");
            return Ok(INVALID_VALUE);
        }
        // SAFETY: `nvrtc.rs` wrote a length and as much text after the magic.
        let text = unsafe {
            let len = start.add(MODULE_MAGIC.len()).cast::<u64>().read_unaligned() as usize;
            std::slice::from_raw_parts(start.add(MODULE_MAGIC.len() + 8), len)
        };
        let kernels: Vec<Arc<Kernel>> = decode(&String::from_utf8_lossy(text))?.into_iter().map(Arc::new).collect();
        // SAFETY: the caller's pointer.
        unsafe { *to = Box::into_raw(Box::new(Module { device: device.current, kernels })).cast() };
        Ok(OK)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> Status {
    // SAFETY: made in `cuModuleLoadData`, and unloaded once.
    drop(unsafe { Box::from_raw(module.cast::<Module>()) });
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(to: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> Status {
    // SAFETY: made in `cuModuleLoadData`, not unloaded; the name is the caller's string.
    let (Module { device, kernels }, name) = unsafe { (&*module.cast::<Module>(), CStr::from_ptr(name)) };
    let Some(kernel) = kernels.iter().find(|kernel| kernel.name.as_bytes() == name.to_bytes()) else { return NOT_FOUND };
    let function = Function { device: *device, kernel: Arc::clone(kernel), dynamic_max: (48 << 10).into() };
    // SAFETY: the caller's pointer.
    unsafe { *to = Box::into_raw(Box::new(function)).cast() };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncSetAttribute(function: *mut c_void, attribute: c_uint, value: c_int) -> Status {
    // SAFETY: made in `cuModuleGetFunction`, and never freed.
    let function = unsafe { &*function.cast::<Function>() };
    let largest = if options().arch.0 == 9 { 227 << 10 } else { 163 << 10 };
    let fixed: u32 = function.kernel.shared.iter().map(|(start, end)| end - start).sum();
    if attribute != 8 || value < 0 || value as u32 + fixed > largest {
        return INVALID_VALUE;
    }
    function.dynamic_max.store(value as u32, std::sync::atomic::Ordering::Relaxed);
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: u64,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    call("cuLaunchKernel", |device| {
        // SAFETY: made in `cuModuleGetFunction`, and never freed.
        let function = unsafe { &*function.cast::<Function>() };
        if shared_bytes > function.dynamic_max.load(std::sync::atomic::Ordering::Relaxed) {
            eprintln!("gpu-standin: {} asks for {shared_bytes} bytes of shared memory, more than it was allowed", function.kernel.name);
            return Ok(INVALID_VALUE);
        }
        if function.device != device.current {
            eprintln!("gpu-standin: {} was loaded on device {}, not on {}", function.kernel.name, function.device, device.current);
            return Ok(INVALID_CONTEXT);
        }
        let mut params = vec![0; function.kernel.param_bytes];
        for (i, &(offset, size)) in function.kernel.params.iter().enumerate() {
            // SAFETY: the caller passes a pointer to each of the kernel's arguments.
            unsafe { params.as_mut_ptr().add(offset).copy_from_nonoverlapping((*arguments.add(i)).cast(), size) };
        }
        let (grid, threads) = ([grid_x, grid_y, grid_z], [threads_x, threads_y, threads_z]);
        done(device.push(stream, Work::Launch { kernel: Arc::clone(&function.kernel), grid, threads, shared_bytes, params }))
    })
}
