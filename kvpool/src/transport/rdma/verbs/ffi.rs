//! The part of libibverbs' ABI that is used here (version 1, unchanged since 2006), declared by hand and resolved at run time.
//!
//! Structures are those of `infiniband/verbs.h`, only up to the last used field where the library allocates them. Fields that are only part
//! of the layout begin with an underscore. Sizes are checked below.

use std::{
    ffi::{c_char, c_int, c_void},
    mem::offset_of,
    sync::OnceLock,
};

/// A device, allocated by the library, and only passed back to it.
pub(super) enum Device {}
/// A protection domain, allocated by the library, and only passed back to it.
pub(super) enum Domain {}

#[repr(C)]
pub(super) struct Context {
    _device: *mut Device,
    pub(super) ops: ContextOps,
}

/// Calls of the device's driver, in the order of `struct ibv_context_ops`.
#[repr(C)]
pub(super) struct ContextOps {
    _0_to_6: [*const c_void; 7],
    pub(super) alloc_window: Option<unsafe extern "C" fn(*mut Domain, c_int) -> *mut Window>,
    _bind_window: *const c_void,
    pub(super) dealloc_window: Option<unsafe extern "C" fn(*mut Window) -> c_int>,
    _create_cq: *const c_void,
    pub(super) poll: unsafe extern "C" fn(*mut Queue, c_int, *mut Completion) -> c_int,
    pub(super) request_notify: unsafe extern "C" fn(*mut Queue, c_int) -> c_int,
    _13_to_24: [*const c_void; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut Pair, *mut Request, *mut *mut Request) -> c_int,
}

#[repr(C)]
pub(super) struct Channel {
    _context: *mut Context,
    pub(super) fd: c_int,
}

/// A completion queue.
#[repr(C)]
pub(super) struct Queue {
    pub(super) context: *mut Context,
}

/// A queue pair.
#[repr(C)]
pub(super) struct Pair {
    pub(super) context: *mut Context,
    _qp_context: *mut c_void,
    _domain: *mut Domain,
    _send_cq: *mut Queue,
    _recv_cq: *mut Queue,
    _srq: *mut c_void,
    _handle: u32,
    pub(super) number: u32,
}

#[repr(C)]
pub(super) struct Region {
    _context: *mut Context,
    _domain: *mut Domain,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
}

/// A memory window.
#[repr(C)]
pub(super) struct Window {
    pub(super) context: *mut Context,
    _domain: *mut Domain,
    pub(super) remote_key: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Capacities {
    pub(super) send_requests: u32,
    pub(super) receive_requests: u32,
    pub(super) send_ranges: u32,
    pub(super) receive_ranges: u32,
    pub(super) inline_bytes: u32,
}

#[repr(C)]
pub(super) struct PairInit {
    pub(super) context: *mut c_void,
    pub(super) send_queue: *mut Queue,
    pub(super) receive_queue: *mut Queue,
    pub(super) shared_receive_queue: *mut c_void,
    pub(super) capacities: Capacities,
    pub(super) kind: c_int,
    pub(super) signal_all: c_int,
}

#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct Address {
    pub(super) gid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) gid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) _pad: u8,
    pub(super) lid: u16,
    pub(super) service_level: u8,
    pub(super) source_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PairAttributes {
    pub(super) state: c_int,
    pub(super) current_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) migration_state: c_int,
    pub(super) qkey: u32,
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) peer: u32,
    pub(super) access: u32,
    pub(super) capacities: Capacities,
    pub(super) address: Address,
    pub(super) alternate: Address,
    pub(super) pkey_index: u16,
    pub(super) alternate_pkey_index: u16,
    pub(super) notify_drained: u8,
    pub(super) draining: u8,
    pub(super) reads_out: u8,
    pub(super) reads_in: u8,
    pub(super) rnr_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) alternate_port: u8,
    pub(super) alternate_timeout: u8,
    pub(super) rate_limit: u32,
}

/// A range of local memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) addr: u64,
    pub(super) bytes: u32,
    pub(super) local_key: u32,
}

/// A work request. The unions of the original are laid out for WRITE, READ and the binding of windows.
#[repr(C)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) next: *mut Request,
    pub(super) ranges: *mut Range,
    pub(super) range_count: c_int,
    pub(super) operation: c_int,
    pub(super) flags: u32,
    pub(super) invalidate_key: u32,
    pub(super) remote_addr: u64,
    pub(super) remote_key: u32,
    pub(super) _atomic: [u32; 5],
    pub(super) _xrc: u64,
    pub(super) window: *mut Window,
    pub(super) window_key: u32,
    pub(super) bind_region: *mut Region,
    pub(super) bind_addr: u64,
    pub(super) bind_bytes: u64,
    pub(super) bind_access: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: c_int,
    _opcode: c_int,
    pub(super) vendor_error: u32,
    _bytes: u32,
    _imm: u32,
    pub(super) pair: u32,
    _rest: [u32; 4],
}

#[repr(C)]
pub(super) struct DeviceAttributes {
    _firmware: [u8; 64],
    _guids_and_sizes: [u64; 4],
    _vendor: [u32; 3],
    _pairs_max: c_int,
    pub(super) requests_max: c_int,
    pub(super) capabilities: u32,
    _max_1: [c_int; 6],
    /// The most READs that a peer may have in progress here.
    pub(super) reads_in_max: c_int,
    _max_2: [c_int; 2],
    pub(super) reads_out_max: c_int,
    _max_3: [c_int; 16],
    _rest: [u8; 8],
}

/// The result of `ibv_query_port`; some versions of the library have more fields than others, but none more than fit here.
#[repr(C)]
pub(super) struct PortAttributes {
    pub(super) state: c_int,
    pub(super) mtu_max: c_int,
    pub(super) mtu: c_int,
    pub(super) gids: c_int,
    _flags_to_counts: [u32; 4],
    _pkeys: u16,
    pub(super) lid: u16,
    _sm_lid: u16,
    _lmc_to_speed: [u8; 8],
    pub(super) link_layer: u8,
    _room: [u8; 64],
}

const _: () = {
    assert!(size_of::<Request>() == 128 && size_of::<Completion>() == 48 && size_of::<Address>() == 32);
    assert!(size_of::<PairAttributes>() == 144 && size_of::<PairInit>() == 64 && size_of::<DeviceAttributes>() == 232);
    assert!(offset_of!(PortAttributes, lid) == 34 && offset_of!(PortAttributes, link_layer) == 46);
    assert!(offset_of!(DeviceAttributes, requests_max) == 112 && offset_of!(DeviceAttributes, reads_in_max) == 144);
    assert!(offset_of!(DeviceAttributes, reads_out_max) == 156 && offset_of!(PairAttributes, pkey_index) == 120);
    assert!(offset_of!(Request, window) == 80 && offset_of!(Request, bind_access) == 120 && offset_of!(Request, remote_key) == 48);
    assert!(offset_of!(Completion, pair) == 28 && offset_of!(Pair, number) == 52 && offset_of!(Region, local_key) == 36);
    assert!(offset_of!(Context, ops.poll) == 96 && offset_of!(Context, ops.post_send) == 208);
};

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions.
        #[cfg_attr(not(feature = "rdma"), allow(dead_code, reason = "there is nothing to load"))]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            #[cfg(feature = "rdma")]
            fn load() -> Result<Self, String> {
                // SAFETY: libibverbs' initializers have no effect on the rest of a program. It is never unloaded.
                let library = unsafe { libloading::Library::new("libibverbs.so.1") }.map_err(|error| error.to_string())?;
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                Ok(Self {
                    // SAFETY: each has had this signature since version 1.1 of the ABI, which lookups without a version find.
                    $($field: *unsafe { library.get($symbol) }.map_err(|error| error.to_string())?,)*
                })
            }
        }
    };
}

functions! {
    device_list = b"ibv_get_device_list\0": fn(*mut c_int) -> *mut *mut Device;
    free_device_list = b"ibv_free_device_list\0": fn(*mut *mut Device);
    device_name = b"ibv_get_device_name\0": fn(*mut Device) -> *const c_char;
    open_device = b"ibv_open_device\0": fn(*mut Device) -> *mut Context;
    close_device = b"ibv_close_device\0": fn(*mut Context) -> c_int;
    query_device = b"ibv_query_device\0": fn(*mut Context, *mut DeviceAttributes) -> c_int;
    query_port = b"ibv_query_port\0": fn(*mut Context, u8, *mut PortAttributes) -> c_int;
    query_gid = b"ibv_query_gid\0": fn(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    alloc_domain = b"ibv_alloc_pd\0": fn(*mut Context) -> *mut Domain;
    dealloc_domain = b"ibv_dealloc_pd\0": fn(*mut Domain) -> c_int;
    register = b"ibv_reg_mr\0": fn(*mut Domain, *mut c_void, usize, c_int) -> *mut Region;
    deregister = b"ibv_dereg_mr\0": fn(*mut Region) -> c_int;
    create_channel = b"ibv_create_comp_channel\0": fn(*mut Context) -> *mut Channel;
    destroy_channel = b"ibv_destroy_comp_channel\0": fn(*mut Channel) -> c_int;
    create_queue = b"ibv_create_cq\0": fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Queue;
    destroy_queue = b"ibv_destroy_cq\0": fn(*mut Queue) -> c_int;
    get_event = b"ibv_get_cq_event\0": fn(*mut Channel, *mut *mut Queue, *mut *mut c_void) -> c_int;
    ack_events = b"ibv_ack_cq_events\0": fn(*mut Queue, u32);
    create_pair = b"ibv_create_qp\0": fn(*mut Domain, *mut PairInit) -> *mut Pair;
    modify_pair = b"ibv_modify_qp\0": fn(*mut Pair, *mut PairAttributes, c_int) -> c_int;
    destroy_pair = b"ibv_destroy_qp\0": fn(*mut Pair) -> c_int;
    status_text = b"ibv_wc_status_str\0": fn(c_int) -> *const c_char;
}

#[cfg(not(feature = "rdma"))]
impl Functions {
    fn load() -> Result<Self, String> {
        Err("this program was built without the feature `rdma`".into())
    }
}

/// The library's functions, loaded at the first call. `Err` if it is not on this machine, or too old.
pub(super) fn functions() -> Result<&'static Functions, &'static str> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    FUNCTIONS.get_or_init(Functions::load).as_ref().map_err(String::as_str)
}
