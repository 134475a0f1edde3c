//! libibverbs as owning types: devices, protection domains, registered memory, queues, queue pairs, windows.
//!
//! The library is opened at run time, so that programs start on machines without it ([`ffi`]). All unsafe code of this transport is here,
//! except where work is posted: [`QueuePair::post`] states the caller's obligations. By the library's contract, every call may be made by
//! any thread at any time.

#[cfg(all(test, feature = "rdma-abi"))]
mod abi;
mod ffi;

use ffi::functions;
use std::{
    ffi::{CStr, c_int},
    fs, io,
    net::Ipv6Addr,
    os::fd::RawFd,
    ptr::{self, NonNull},
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_proto::pool::RailEnd;

#[derive(Debug, thiserror::Error)]
pub(crate) enum VerbsError {
    #[error("libibverbs cannot be used: {0}")]
    NoLibrary(String),
    #[error("there is no RDMA device {0}")]
    NoDevice(String),
    #[error("RDMA device {device}: {what} failed: {source}")]
    Failed { device: String, what: &'static str, source: io::Error },
    #[error("RDMA device {device} cannot register {bytes} bytes: {source} (does `ulimit -l` allow as much locked memory?)")]
    Register { device: String, bytes: usize, source: io::Error },
    #[error("RDMA device {device} has no port that is up")]
    PortDown { device: String },
    #[error("RDMA device {device}: {what} ended with `{status}`")]
    Refused { device: String, what: &'static str, status: String },
}

type Result<T> = std::result::Result<T, VerbsError>;

/// The number of the only port that is used; ports count from 1. A card with two ports appears as two devices if it carries Ethernet.
const PORT: u8 = 1;

/// Access of a peer, or of the device itself, to registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access(c_int);

impl Access {
    pub(crate) const LOCAL: Access = Access(1);
    pub(crate) const REMOTE_WRITE: Access = Access(1 << 1);
    pub(crate) const REMOTE_READ: Access = Access(1 << 2);
    /// Windows may be bound to the memory.
    pub(crate) const WINDOWS: Access = Access(1 << 4);

    pub(crate) const fn and(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

/// The names of the devices that exist now.
pub(crate) fn devices() -> Result<Vec<String>> {
    with_devices(|devices| {
        // SAFETY: the list's devices live until it is freed, after this; names are C strings.
        let name = |&device: &*mut ffi::Device| unsafe { CStr::from_ptr((functions().ok()?.device_name)(device)) }.to_str().ok();
        Ok(devices.iter().filter_map(|device| Some(name(device)?.to_owned())).collect())
    })
}

fn with_devices<T>(what: impl FnOnce(&[*mut ffi::Device]) -> Result<T>) -> Result<T> {
    let functions = functions().map_err(|reason| VerbsError::NoLibrary(reason.into()))?;
    let mut count = 0;
    // SAFETY: returns a list of `count` devices, or null.
    let list = unsafe { (functions.device_list)(&mut count) };
    if list.is_null() {
        return Err(VerbsError::NoLibrary(io::Error::last_os_error().to_string()));
    }
    // SAFETY: as above; the list is freed only after `what`.
    let result = what(unsafe { std::slice::from_raw_parts(list, count as usize) });
    // SAFETY: the list is freed once, and devices that were opened stay open.
    unsafe { (functions.free_device_list)(list) };
    result
}

/// The library's functions, for owners of objects that it made.
fn loaded() -> &'static ffi::Functions {
    functions().expect("what the library made exists")
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<ffi::Context>,
    name: String,
}

/// The limits of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The most requests in progress per queue pair.
    pub(crate) requests: u32,
    /// The most READs of a peer in progress here, per queue pair.
    pub(crate) reads_in: u8,
    /// The most READs in progress from here, per queue pair.
    pub(crate) reads_out: u8,
    /// Whether the device has memory windows that belong to one queue pair (type 2B).
    pub(crate) windows: bool,
}

/// A port, with the properties that peers need to reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Port {
    pub(crate) gid: [u8; 16],
    gid_index: u8,
    /// The local identifier; 0 where addresses are GIDs only (Ethernet).
    pub(crate) lid: u16,
    /// The MTU in the library's encoding: 1 is 256 bytes, 5 is 4096.
    pub(crate) mtu: u8,
}

impl Context {
    pub(crate) fn open(name: &str) -> Result<Self> {
        let raw = with_devices(|devices| {
            for &device in devices {
                // SAFETY: as in devices().
                let found = unsafe { CStr::from_ptr((loaded().device_name)(device)) };
                if found.to_bytes() == name.as_bytes() {
                    // SAFETY: the device is on a list that is not freed yet.
                    let raw = unsafe { (loaded().open_device)(device) };
                    return NonNull::new(raw).ok_or_else(|| failed(name, "opening it"));
                }
            }
            Err(VerbsError::NoDevice(name.into()))
        })?;
        Ok(Self { raw, name: name.into() })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn limits(&self) -> Result<Limits> {
        // SAFETY: all bytes zero are a valid value of these plain numbers.
        let mut attributes: ffi::DeviceAttributes = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure is as long as the library assumes.
        let code = unsafe { (loaded().query_device)(self.raw.as_ptr(), &mut attributes) };
        check(code, &self.name, "asking for its limits")?;
        let reads = |max: c_int| max.clamp(1, READS_MAX) as u8;
        Ok(Limits {
            requests: attributes.requests_max.max(1) as u32,
            reads_in: reads(attributes.reads_in_max),
            reads_out: reads(attributes.reads_out_max),
            windows: attributes.capabilities & WINDOWS_2B != 0,
        })
    }

    /// The current state of the port. The address that other hosts can route to is preferred: IPv4 in RoCE v2, then any other of RoCE v2.
    pub(crate) fn port(&self) -> Result<Port> {
        // SAFETY: all bytes zero are a valid value of these plain numbers.
        let mut port: ffi::PortAttributes = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure has room for more than the library fills.
        let code = unsafe { (loaded().query_port)(self.raw.as_ptr(), PORT, &mut port) };
        check(code, &self.name, "asking for its port")?;
        let down = || VerbsError::PortDown { device: self.name.clone() };
        if port.state != PORT_ACTIVE {
            return Err(down());
        }
        let ethernet = port.link_layer == LINK_ETHERNET;
        let gids = (0..port.gids.clamp(0, GIDS_MAX)).filter_map(|index| {
            let mut gid = [0; 16];
            // SAFETY: the context is open, and a GID has 16 bytes.
            let code = unsafe { (loaded().query_gid)(self.raw.as_ptr(), PORT, index, &mut gid) };
            let rank = self.rank(gid, index, ethernet)?;
            (code == 0).then_some((rank, gid, index as u8))
        });
        let (_, gid, gid_index) = gids.min_by_key(|(rank, ..)| *rank).ok_or_else(down)?;
        Ok(Port { gid, gid_index, lid: if ethernet { 0 } else { port.lid }, mtu: port.mtu.clamp(1, 5) as u8 })
    }

    /// The preference of an address, the lower the better; `None` if it is empty.
    fn rank(&self, gid: [u8; 16], index: c_int, ethernet: bool) -> Option<u8> {
        if gid == [0; 16] {
            return None;
        }
        if !ethernet {
            return Some(0);
        }
        let path = format!("/sys/class/infiniband/{}/ports/{PORT}/gid_attrs/types/{index}", self.name);
        let addr = Ipv6Addr::from(gid);
        Some(match fs::read_to_string(path).is_ok_and(|kind| kind.trim() == "RoCE v2") {
            true if addr.to_ipv4_mapped().is_some() => 0,
            true if !addr.is_unicast_link_local() => 1,
            true => 2,
            false => 3,
        })
    }
}

/// The number of READs in progress per queue pair to request; cards offer as many.
const READS_MAX: c_int = 16;
const WINDOWS_2B: u32 = 1 << 24;
const PORT_ACTIVE: c_int = 4;
const LINK_ETHERNET: u8 = 2;
/// The most addresses of a port that are examined.
const GIDS_MAX: c_int = 128;

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made in the context holds it and is gone.
        unsafe { (loaded().close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain: only memory, queue pairs and windows of one domain work with each other.
#[derive(Debug)]
pub(crate) struct Domain {
    raw: NonNull<ffi::Domain>,
    context: Arc<Context>,
}

impl Domain {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self> {
        // SAFETY: the context is open.
        let raw = unsafe { (loaded().alloc_domain)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| failed(&context.name, "making a protection domain"))?;
        Ok(Self { raw, context })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds it and is gone.
        unsafe { (loaded().dealloc_domain)(self.raw.as_ptr()) };
    }
}

/// Memory that the device may access. Its pages stay in place until this is dropped.
#[derive(Debug)]
pub(crate) struct Region {
    raw: NonNull<ffi::Region>,
    addr: usize,
    bytes: usize,
    domain: Arc<Domain>,
}

impl Region {
    ///
    /// Registers memory with the domain's device.
    /// # Safety
    ///
    /// Until this is dropped, the memory stays mapped; and if `access` lets peers write, no code holds a reference to any of it.
    pub(crate) unsafe fn register(domain: Arc<Domain>, addr: *mut u8, bytes: usize, access: Access) -> Result<Self> {
        // SAFETY: the domain exists; the caller vouches for the memory.
        let raw = unsafe { (loaded().register)(domain.raw.as_ptr(), addr.cast(), bytes, access.0) };
        let device = || domain.context.name.clone();
        let error = || VerbsError::Register { device: device(), bytes, source: io::Error::last_os_error() };
        Ok(Self { raw: NonNull::new(raw).ok_or_else(error)?, addr: addr as usize, bytes, domain })
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region exists.
        unsafe { self.raw.as_ref().remote_key }
    }

    /// A part of the region, for a request, or `None` if it is not inside.
    pub(crate) fn part(&self, addr: usize, bytes: usize) -> Option<Local> {
        let inside = addr >= self.addr && addr.checked_add(bytes)? <= self.addr + self.bytes;
        // SAFETY: the region exists.
        let key = unsafe { self.raw.as_ref().local_key };
        inside.then_some(Local { addr: addr as u64, bytes: u32::try_from(bytes).ok()?, key })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region is deregistered once; its owners make sure that requests and windows that use it have ended.
        let code = unsafe { (loaded().deregister)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(device = self.domain.context.name, code, "memory stays registered with the RDMA device");
        }
    }
}

/// A queue at which completions of requests arrive.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    raw: NonNull<ffi::Queue>,
    channel: NonNull<ffi::Channel>,
    context: Arc<Context>,
}

/// The end of one request, or of several up to this one.
#[derive(Clone, Debug)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    /// The number of the queue pair.
    pub(crate) pair: u32,
    /// The outcome. `Err` says why not everything was moved; the queue pair can no longer be used.
    pub(crate) result: std::result::Result<(), String>,
}

impl CompletionQueue {
    pub(crate) fn new(context: Arc<Context>, depth: u32) -> Result<Self> {
        let error = |what| failed(&context.name, what);
        // SAFETY: the context is open.
        let channel = unsafe { (loaded().create_channel)(context.raw.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(|| error("making a completion channel"))?;
        // SAFETY: context and channel exist; no context pointer is passed, and the first interrupt vector always exists.
        let raw = unsafe { (loaded().create_queue)(context.raw.as_ptr(), depth as c_int, ptr::null_mut(), channel.as_ptr(), 0) };
        let Some(raw) = NonNull::new(raw) else {
            let error = error("making a completion queue");
            // SAFETY: nothing uses the channel.
            unsafe { (loaded().destroy_channel)(channel.as_ptr()) };
            return Err(error);
        };
        Ok(Self { raw, channel, context })
    }

    /// Takes some completions, without waiting.
    pub(crate) fn poll(&self) -> Vec<Completion> {
        let mut taken = [ffi::Completion::default(); POLLED_MAX];
        // SAFETY: the queue exists, and so does the context that it points to; there is room for as many as are requested.
        let count = unsafe { ((*self.raw.as_ref().context).ops.poll)(self.raw.as_ptr(), POLLED_MAX as c_int, taken.as_mut_ptr()) };
        let taken = &taken[..count.clamp(0, POLLED_MAX as c_int) as usize];
        taken.iter().map(|&ffi::Completion { id, status, pair, .. }| Completion { id, pair, result: status_result(status) }).collect()
    }

    /// Makes the next completion signal the file of [`fd`](Self::fd). Poll once more before waiting for that: a completion may just have
    /// arrived.
    pub(crate) fn arm(&self) -> Result<()> {
        // SAFETY: as in poll().
        let code = unsafe { ((*self.raw.as_ref().context).ops.request_notify)(self.raw.as_ptr(), 0) };
        check(code, &self.context.name, "arming a completion queue")
    }

    pub(crate) fn fd(&self) -> RawFd {
        // SAFETY: the channel exists.
        unsafe { self.channel.as_ref().fd }
    }

    /// Takes the event that made [`fd`](Self::fd) readable, or waits for one.
    pub(crate) fn take_event(&self) -> Result<()> {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists and has this queue only, which an event may name until it is acknowledged.
        unsafe {
            let code = (loaded().get_event)(self.channel.as_ptr(), &mut queue, &mut context);
            check(code, &self.context.name, "waiting for completions")?;
            (loaded().ack_events)(queue, 1);
        }
        Ok(())
    }
}

/// The most completions taken at a time.
const POLLED_MAX: usize = 32;

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs that use it hold it and are gone; all events were acknowledged; the channel goes last.
        unsafe {
            (loaded().destroy_queue)(self.raw.as_ptr());
            (loaded().destroy_channel)(self.channel.as_ptr());
        }
    }
}

/// A part of registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    addr: u64,
    bytes: u32,
    key: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    /// A transfer from here to the peer.
    Write = 0,
    /// A transfer from the peer to here.
    Read = 4,
}

/// A request to move bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// A number that is returned with the completion. A request that fails has a completion even if none was requested.
    pub(crate) id: u64,
    pub(crate) operation: Operation,
    pub(crate) local: Local,
    pub(crate) remote_addr: u64,
    pub(crate) remote_key: u32,
    /// Whether a completion is requested. It also implies that all earlier requests have ended.
    pub(crate) signalled: bool,
}

/// One end of a reliable connection. Dropping it removes it from the device: then no request of it or its peer accesses any memory.
#[derive(Debug)]
pub(crate) struct QueuePair {
    raw: NonNull<ffi::Pair>,
    queue: Arc<CompletionQueue>,
    domain: Arc<Domain>,
}

impl QueuePair {
    /// A queue pair for `requests` requests in progress.
    pub(crate) fn new(domain: Arc<Domain>, queue: Arc<CompletionQueue>, requests: u32) -> Result<Self> {
        let mut init = ffi::PairInit {
            context: ptr::null_mut(),
            send_queue: queue.raw.as_ptr(),
            receive_queue: queue.raw.as_ptr(),
            shared_receive_queue: ptr::null_mut(),
            capacities: ffi::Capacities {
                send_requests: requests,
                receive_requests: 1,
                send_ranges: 1,
                receive_ranges: 1,
                inline_bytes: 0,
            },
            kind: RELIABLE,
            signal_all: 0,
        };
        // SAFETY: domain and queue exist, and live as long as the pair, which holds them.
        let raw = unsafe { (loaded().create_pair)(domain.raw.as_ptr(), &mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| failed(&domain.context.name, "making a queue pair"))?;
        Ok(Self { raw, queue, domain })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the pair exists.
        unsafe { self.raw.as_ref().number }
    }

    /// Connects a new pair. `psn` is the number of its first packet; `remote` is the access of the peer.
    pub(crate) fn connect(&self, port: &Port, limits: &Limits, psn: u32, peer: &RailEnd, remote: Option<Access>) -> Result<()> {
        let access = remote.map_or(0, |access| access.0) as u32;
        let new = ffi::PairAttributes::default();
        let init = ffi::PairAttributes { state: STATE_INIT, port: PORT, access, ..new };
        self.modify(init, MASK_STATE | MASK_PKEY | MASK_PORT | MASK_ACCESS, "preparing a queue pair")?;
        let address = ffi::Address {
            gid: peer.gid,
            gid_index: port.gid_index,
            hop_limit: HOPS_MAX,
            lid: peer.lid,
            is_global: 1,
            port: PORT,
            ..ffi::Address::default()
        };
        let receiving = ffi::PairAttributes {
            state: STATE_RECEIVING,
            path_mtu: c_int::from(port.mtu.min(peer.mtu).clamp(1, 5)),
            peer: peer.pair & PSN_MASK,
            receive_psn: peer.psn & PSN_MASK,
            reads_in: limits.reads_in.min(peer.reads_out),
            rnr_timer: RNR_TIMER,
            address,
            ..new
        };
        let mask = MASK_STATE | MASK_ADDRESS | MASK_MTU | MASK_PEER | MASK_RECEIVE_PSN | MASK_READS_IN | MASK_RNR_TIMER;
        self.modify(receiving, mask, "connecting a queue pair")?;
        let sending = ffi::PairAttributes {
            state: STATE_SENDING,
            timeout: TIMEOUT,
            retries: RETRIES,
            rnr_retries: RETRIES,
            send_psn: psn & PSN_MASK,
            reads_out: limits.reads_out.min(peer.reads_in),
            ..new
        };
        let mask = MASK_STATE | MASK_TIMEOUT | MASK_RETRIES | MASK_RNR_RETRIES | MASK_SEND_PSN | MASK_READS_OUT;
        self.modify(sending, mask, "starting a queue pair")
    }

    /// Posts requests, in order, with one ring of the doorbell. After an error the pair must be dropped; some requests may have begun.
    ///
    /// # Safety
    ///
    /// Each request's local memory stays valid, and no code accesses it in a way that conflicts with its use by the device, until a
    /// completion says that the request has ended, or the pair is dropped.
    pub(crate) unsafe fn post(&self, work: &[Work]) -> Result<()> {
        let mut ranges: Vec<ffi::Range> =
            work.iter().map(|work| ffi::Range { addr: work.local.addr, bytes: work.local.bytes, local_key: work.local.key }).collect();
        let ranges = ranges.as_mut_ptr();
        let mut requests: Vec<ffi::Request> = (0..).zip(work).map(|(place, work)| request(work, ranges.wrapping_add(place))).collect();
        self.send(&mut requests)
    }

    /// Links the requests and hands them to the device, which copies them.
    fn send(&self, requests: &mut [ffi::Request]) -> Result<()> {
        for place in (1..requests.len()).rev() {
            requests[place - 1].next = &raw mut requests[place];
        }
        let Some(first) = requests.first_mut() else { return Ok(()) };
        let mut bad = ptr::null_mut();
        // SAFETY: pair and context exist; the list of requests and their ranges live until the call returns.
        let code = unsafe { ((*self.raw.as_ref().context).ops.post_send)(self.raw.as_ptr(), first, &mut bad) };
        check(code, &self.domain.context.name, "posting work")
    }

    /// Grants this pair's peer, and no other, access to part of a region of its domain, until the returned window is dropped.
    pub(crate) fn grant(&self, region: &Arc<Region>, addr: usize, bytes: usize, access: Access) -> Result<Window> {
        let device = &self.domain.context.name;
        // SAFETY: domain and context exist.
        let raw = unsafe {
            let alloc = self.domain.context.raw.as_ref().ops.alloc_window;
            alloc.map_or(ptr::null_mut(), |alloc| alloc(self.domain.raw.as_ptr(), WINDOW_TYPE_2))
        };
        let raw = NonNull::new(raw).ok_or_else(|| failed(device, "making a memory window"))?;
        let mut window = Window { raw, key: 0, region: Arc::clone(region) };
        // SAFETY: the window exists.
        let old = unsafe { raw.as_ref().remote_key };
        // The lowest byte can be chosen freely, and each binding should have a new one.
        window.key = (old & !0xff) | (old.wrapping_add(1) & 0xff);
        let request = ffi::Request {
            operation: OPERATION_BIND,
            flags: FLAG_SIGNALLED,
            window: raw.as_ptr(),
            window_key: window.key,
            bind_region: region.raw.as_ptr(),
            bind_addr: addr as u64,
            bind_bytes: bytes as u64,
            bind_access: access.0 as u32,
            ..empty_request(u64::from(window.key))
        };
        self.send(&mut [request])?;
        let started = Instant::now();
        while started.elapsed() < BIND_MAX {
            let mine = |completion: &Completion| (completion.id, completion.pair) == (u64::from(window.key), self.number());
            if let Some(done) = self.queue.poll().into_iter().find(mine) {
                let refused = |status| VerbsError::Refused { device: device.clone(), what: "binding a memory window", status };
                return done.result.map(|()| window).map_err(refused);
            }
            std::thread::sleep(BIND_POLL);
        }
        Err(VerbsError::Refused { device: device.clone(), what: "binding a memory window", status: "no answer".into() })
    }

    fn modify(&self, mut attributes: ffi::PairAttributes, mask: c_int, what: &'static str) -> Result<()> {
        // SAFETY: the pair exists, and the structure is as long as the library assumes.
        let code = unsafe { (loaded().modify_pair)(self.raw.as_ptr(), &mut attributes, mask) };
        check(code, &self.domain.context.name, what)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // This stops the pair even if it cannot be destroyed.
        let stopped = ffi::PairAttributes { state: STATE_ERROR, ..ffi::PairAttributes::default() };
        let stopped = self.modify(stopped, MASK_STATE, "stopping a queue pair");
        // SAFETY: the pair is destroyed once.
        let code = unsafe { (loaded().destroy_pair)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(device = self.domain.context.name, code, ?stopped, "a queue pair cannot be destroyed");
        }
    }
}

/// A peer's key to part of a region. Dropping it invalidates the key.
#[derive(Debug)]
pub(crate) struct Window {
    raw: NonNull<ffi::Window>,
    key: u32,
    region: Arc<Region>,
}

impl Window {
    pub(crate) fn remote_key(&self) -> u32 {
        self.key
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window and its context exist; the window is freed once.
        let code = unsafe { (*self.raw.as_ref().context).ops.dealloc_window.map_or(0, |dealloc| dealloc(self.raw.as_ptr())) };
        if code != 0 {
            tracing::error!(device = self.region.domain.context.name, code, "a memory window cannot be freed");
        }
    }
}

const RELIABLE: c_int = 2;
const WINDOW_TYPE_2: c_int = 2;
const STATE_INIT: c_int = 1;
const STATE_RECEIVING: c_int = 2;
const STATE_SENDING: c_int = 3;
const STATE_ERROR: c_int = 6;
const MASK_STATE: c_int = 1;
const MASK_ACCESS: c_int = 1 << 3;
const MASK_PKEY: c_int = 1 << 4;
const MASK_PORT: c_int = 1 << 5;
const MASK_ADDRESS: c_int = 1 << 7;
const MASK_MTU: c_int = 1 << 8;
const MASK_TIMEOUT: c_int = 1 << 9;
const MASK_RETRIES: c_int = 1 << 10;
const MASK_RNR_RETRIES: c_int = 1 << 11;
const MASK_RECEIVE_PSN: c_int = 1 << 12;
const MASK_READS_OUT: c_int = 1 << 13;
const MASK_RNR_TIMER: c_int = 1 << 15;
const MASK_SEND_PSN: c_int = 1 << 16;
const MASK_READS_IN: c_int = 1 << 17;
const MASK_PEER: c_int = 1 << 20;
/// The mask of packet numbers and of the numbers of queue pairs, which have 24 bits.
const PSN_MASK: u32 = 0xff_ffff;
const HOPS_MAX: u8 = 64;
/// The delay before a retry if a receiver is not ready, 0.64 ms. Nothing here sends messages that need one.
const RNR_TIMER: u8 = 12;
/// The time after which an unacknowledged packet is retransmitted: 4.096 µs × 2^17, half a second (a gap is reported at once).
const TIMEOUT: u8 = 17;
/// The number of retransmissions: a peer that has vanished is noticed within about 4 s. Not 7, which the kernel's software device takes as
/// unlimited.
const RETRIES: u8 = 6;
const OPERATION_BIND: c_int = 8;
const FLAG_SIGNALLED: u32 = 1 << 1;
/// The longest time for binding a window, which involves only the local device and takes microseconds.
const BIND_MAX: Duration = Duration::from_secs(2);
const BIND_POLL: Duration = Duration::from_micros(20);

fn request(work: &Work, range: *mut ffi::Range) -> ffi::Request {
    ffi::Request {
        ranges: range,
        range_count: 1,
        operation: work.operation as c_int,
        flags: if work.signalled { FLAG_SIGNALLED } else { 0 },
        remote_addr: work.remote_addr,
        remote_key: work.remote_key,
        ..empty_request(work.id)
    }
}

fn empty_request(id: u64) -> ffi::Request {
    ffi::Request {
        id,
        next: ptr::null_mut(),
        ranges: ptr::null_mut(),
        range_count: 0,
        operation: 0,
        flags: 0,
        invalidate_key: 0,
        remote_addr: 0,
        remote_key: 0,
        _atomic: [0; 5],
        _xrc: 0,
        window: ptr::null_mut(),
        window_key: 0,
        bind_region: ptr::null_mut(),
        bind_addr: 0,
        bind_bytes: 0,
        bind_access: 0,
    }
}

fn status_result(status: c_int) -> std::result::Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the library returns a constant C string for any number.
    Err(unsafe { CStr::from_ptr((loaded().status_text)(status)) }.to_string_lossy().into_owned())
}

/// Checks a call's result: 0, or an error number, or -1 with the number in `errno`.
fn check(code: c_int, device: &str, what: &'static str) -> Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(failed(device, what)),
        code => Err(VerbsError::Failed { device: device.into(), what, source: io::Error::from_raw_os_error(code.abs()) }),
    }
}

/// The error that the last call left in `errno`.
fn failed(device: &str, what: &'static str) -> VerbsError {
    VerbsError::Failed { device: device.into(), what, source: io::Error::last_os_error() }
}

macro_rules! shared {
    ($($type:ty),*) => { $(
        // SAFETY: libibverbs locks the state that its objects share; see its thread safety in ibv_open_device(3) and the kernel's uverbs.
        unsafe impl Send for $type {}
        // SAFETY: as above.
        unsafe impl Sync for $type {}
    )* };
}

shared!(Context, Domain, Region, CompletionQueue, QueuePair, Window);
