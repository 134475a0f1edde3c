//! The proof that what [`ffi`] declares by hand is what libibverbs' header says: sizes, offsets and constants of each item that is used.
//!
//! Two witnesses: `rdma-sys`, which has bindgen read the header, and a C program that the compiler builds from the header. The second one
//! is there because `rdma-sys` itself declares by hand what has unions: requests, completions, addresses.
//!
//! `make test-rdma` runs this. The feature `rdma-abi` takes libclang and the header, and links libibverbs, which is why it is not on
//! anywhere else.

use super::*;
use std::{fmt::Write, fs, mem::offset_of, process::Command};

/// Something that the header declares, what the declaration here says, and what `rdma-sys` says.
struct Item {
    /// The C expression that has the value.
    name: String,
    ours: i64,
    bindings: i64,
}

/// The size of a field. The closure says which, and is not called.
fn size_of_field<S, F>(_field: impl FnOnce(*const S) -> *const F) -> i64 {
    size_of::<F>() as i64
}

/// Items for the places and sizes of fields: `OURS = HEADER's { FIELD = FIELD, … }`. A path through a union that has no name in C is given
/// as C has it with `as`. `whole` types are allocated here, so their size counts, too.
macro_rules! layouts {
    ($($ours:ident = $theirs:ident $($whole:ident)? { $($($field:ident).+ = $($their:ident).+ $(as $c:literal)?,)* })*) => {{
        let mut items = Vec::new();
        $(
            $(layouts!(@size $whole items, $ours, $theirs);)?
            $(
                let field = [$($c,)? stringify!($($their).+)][0].replace(' ', "");
                items.push(Item {
                    name: format!("offsetof(struct {}, {field})", stringify!($theirs)),
                    ours: offset_of!(ffi::$ours, $($field).+) as i64,
                    bindings: offset_of!(rdma_sys::$theirs, $($their).+) as i64,
                });
                items.push(Item {
                    name: format!("sizeof(((struct {} *)0)->{field})", stringify!($theirs)),
                    // SAFETY: the closures are not called.
                    ours: size_of_field(|whole: *const ffi::$ours| unsafe { &raw const (*whole).$($field).+ }),
                    // SAFETY: as above.
                    bindings: size_of_field(|whole: *const rdma_sys::$theirs| unsafe { &raw const (*whole).$($their).+ }),
                });
            )*
        )*
        items
    }};
    (@size whole $items:ident, $ours:ident, $theirs:ident) => {
        $items.push(Item {
            name: format!("sizeof(struct {})", stringify!($theirs)),
            ours: size_of::<ffi::$ours>() as i64,
            bindings: size_of::<rdma_sys::$theirs>() as i64,
        });
    };
}

/// Items for constants: `OURS = ENUMERATION::NAME`; a `flags` enumeration is a type of its own in the bindings.
macro_rules! constants {
    ($($ours:expr => $kind:ident $of:ident::$name:ident,)*) => {
        vec![$(Item {
            name: stringify!($name).into(),
            ours: i64::from($ours),
            bindings: constants!(@value $kind rdma_sys::$of::$name),
        },)*]
    };
    (@value number $value:path) => { i64::from($value) };
    (@value flags $value:path) => { i64::from($value.0) };
}

fn fields() -> Vec<Item> {
    layouts! {
        Context = ibv_context {
            ops.alloc_window = ops.alloc_mw,
            ops.dealloc_window = ops.dealloc_mw,
            ops.poll = ops.poll_cq,
            ops.request_notify = ops.req_notify_cq,
            ops.post_send = ops.post_send,
        }
        Channel = ibv_comp_channel { fd = fd, }
        Queue = ibv_cq { context = context, }
        Pair = ibv_qp { context = context, number = qp_num, }
        Region = ibv_mr { local_key = lkey, remote_key = rkey, }
        Window = ibv_mw { context = context, remote_key = rkey, }
        Capacities = ibv_qp_cap whole {
            send_requests = max_send_wr,
            receive_requests = max_recv_wr,
            send_ranges = max_send_sge,
            receive_ranges = max_recv_sge,
            inline_bytes = max_inline_data,
        }
        PairInit = ibv_qp_init_attr whole {
            context = qp_context,
            send_queue = send_cq,
            receive_queue = recv_cq,
            shared_receive_queue = srq,
            capacities = cap,
            kind = qp_type,
            signal_all = sq_sig_all,
        }
        Address = ibv_ah_attr whole {
            gid = grh.dgid,
            flow_label = grh.flow_label,
            gid_index = grh.sgid_index,
            hop_limit = grh.hop_limit,
            traffic_class = grh.traffic_class,
            lid = dlid,
            service_level = sl,
            source_path_bits = src_path_bits,
            static_rate = static_rate,
            is_global = is_global,
            port = port_num,
        }
        PairAttributes = ibv_qp_attr whole {
            state = qp_state,
            current_state = cur_qp_state,
            path_mtu = path_mtu,
            migration_state = path_mig_state,
            qkey = qkey,
            receive_psn = rq_psn,
            send_psn = sq_psn,
            peer = dest_qp_num,
            access = qp_access_flags,
            capacities = cap,
            address = ah_attr,
            alternate = alt_ah_attr,
            pkey_index = pkey_index,
            alternate_pkey_index = alt_pkey_index,
            notify_drained = en_sqd_async_notify,
            draining = sq_draining,
            reads_out = max_rd_atomic,
            reads_in = max_dest_rd_atomic,
            rnr_timer = min_rnr_timer,
            port = port_num,
            timeout = timeout,
            retries = retry_cnt,
            rnr_retries = rnr_retry,
            alternate_port = alt_port_num,
            alternate_timeout = alt_timeout,
            rate_limit = rate_limit,
        }
        Range = ibv_sge whole { addr = addr, bytes = length, local_key = lkey, }
        Request = ibv_send_wr whole {
            id = wr_id,
            next = next,
            ranges = sg_list,
            range_count = num_sge,
            operation = opcode,
            flags = send_flags,
            invalidate_key = imm_data_invalidated_rkey_union.invalidated_rkey as "invalidate_rkey",
            remote_addr = wr.rdma.remote_addr,
            remote_key = wr.rdma.rkey,
            window = bind_mw_tso_union.bind_mw.mw as "bind_mw.mw",
            window_key = bind_mw_tso_union.bind_mw.rkey as "bind_mw.rkey",
            bind_region = bind_mw_tso_union.bind_mw.bind_info.mr as "bind_mw.bind_info.mr",
            bind_addr = bind_mw_tso_union.bind_mw.bind_info.addr as "bind_mw.bind_info.addr",
            bind_bytes = bind_mw_tso_union.bind_mw.bind_info.length as "bind_mw.bind_info.length",
            bind_access = bind_mw_tso_union.bind_mw.bind_info.mw_access_flags as "bind_mw.bind_info.mw_access_flags",
        }
        Completion = ibv_wc whole { id = wr_id, status = status, vendor_error = vendor_err, pair = qp_num, }
        DeviceAttributes = ibv_device_attr whole {
            requests_max = max_qp_wr,
            capabilities = device_cap_flags,
            reads_in_max = max_qp_rd_atom,
            reads_out_max = max_qp_init_rd_atom,
        }
        PortAttributes = ibv_port_attr {
            state = state,
            mtu_max = max_mtu,
            mtu = active_mtu,
            gids = gid_tbl_len,
            lid = lid,
            link_layer = link_layer,
        }
    }
}

fn numbers() -> Vec<Item> {
    constants! {
        Access::LOCAL.0 => flags ibv_access_flags::IBV_ACCESS_LOCAL_WRITE,
        Access::REMOTE_WRITE.0 => flags ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
        Access::REMOTE_READ.0 => flags ibv_access_flags::IBV_ACCESS_REMOTE_READ,
        Access::WINDOWS.0 => flags ibv_access_flags::IBV_ACCESS_MW_BIND,
        WINDOWS_2B => flags ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        PORT_ACTIVE => number ibv_port_state::IBV_PORT_ACTIVE,
        // The encoding in which MTUs are kept, from 1 to 5.
        1 => number ibv_mtu::IBV_MTU_256,
        5 => number ibv_mtu::IBV_MTU_4096,
        Operation::Write as i32 => number ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Operation::Read as i32 => number ibv_wr_opcode::IBV_WR_RDMA_READ,
        OPERATION_BIND => number ibv_wr_opcode::IBV_WR_BIND_MW,
        FLAG_SIGNALLED => flags ibv_send_flags::IBV_SEND_SIGNALED,
        RELIABLE => number ibv_qp_type::IBV_QPT_RC,
        WINDOW_TYPE_2 => number ibv_mw_type::IBV_MW_TYPE_2,
        STATE_INIT => number ibv_qp_state::IBV_QPS_INIT,
        STATE_RECEIVING => number ibv_qp_state::IBV_QPS_RTR,
        STATE_SENDING => number ibv_qp_state::IBV_QPS_RTS,
        STATE_ERROR => number ibv_qp_state::IBV_QPS_ERR,
        MASK_STATE => flags ibv_qp_attr_mask::IBV_QP_STATE,
        MASK_ACCESS => flags ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS,
        MASK_PKEY => flags ibv_qp_attr_mask::IBV_QP_PKEY_INDEX,
        MASK_PORT => flags ibv_qp_attr_mask::IBV_QP_PORT,
        MASK_ADDRESS => flags ibv_qp_attr_mask::IBV_QP_AV,
        MASK_MTU => flags ibv_qp_attr_mask::IBV_QP_PATH_MTU,
        MASK_TIMEOUT => flags ibv_qp_attr_mask::IBV_QP_TIMEOUT,
        MASK_RETRIES => flags ibv_qp_attr_mask::IBV_QP_RETRY_CNT,
        MASK_RNR_RETRIES => flags ibv_qp_attr_mask::IBV_QP_RNR_RETRY,
        MASK_RECEIVE_PSN => flags ibv_qp_attr_mask::IBV_QP_RQ_PSN,
        MASK_READS_OUT => flags ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC,
        MASK_RNR_TIMER => flags ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER,
        MASK_SEND_PSN => flags ibv_qp_attr_mask::IBV_QP_SQ_PSN,
        MASK_READS_IN => flags ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC,
        MASK_PEER => flags ibv_qp_attr_mask::IBV_QP_DEST_QPN,
        // A completion without an error.
        0 => number ibv_wc_status::IBV_WC_SUCCESS,
    }
}

/// The values of C expressions, as the compiler has them from the header.
fn compiled(names: &[&str]) -> Vec<i64> {
    let dir = tempfile::tempdir().unwrap();
    let mut source = String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n");
    names.iter().for_each(|name| writeln!(source, "    printf(\"%lld\\n\", (long long)({name}));").unwrap());
    source.push_str("    return 0;\n}\n");
    let (code, program) = (dir.path().join("abi.c"), dir.path().join("abi"));
    fs::write(&code, source).unwrap();
    let built = Command::new("cc").arg(&code).arg("-o").arg(&program).status().expect("there is a C compiler");
    assert!(built.success(), "an item is not in the header");
    let said = Command::new(&program).output().unwrap();
    String::from_utf8(said.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn what_is_declared_by_hand_is_what_the_header_says() {
    let items: Vec<Item> = fields().into_iter().chain(numbers()).collect();
    let names: Vec<&str> = items.iter().map(|item| item.name.as_str()).collect();
    let header = compiled(&names);
    assert_eq!(header.len(), items.len());
    for (Item { name, ours, bindings }, header) in items.iter().zip(&header) {
        assert_eq!(ours, header, "{name}: declared here, and in the header");
        assert_eq!(bindings, header, "{name}: by rdma-sys, and in the header");
    }
    println!("{} sizes, offsets and constants are the header's", items.len());
}

/// Constants that have no place in the bindings: the link layer is an enumeration without a name, and the size of a port's attributes is a bound.
#[test]
fn there_is_room_for_what_the_library_writes() {
    let header = compiled(&["IBV_LINK_LAYER_ETHERNET", "sizeof(struct ibv_port_attr)"]);
    assert_eq!(header[0], i64::from(LINK_ETHERNET));
    assert!(size_of::<ffi::PortAttributes>() as i64 >= header[1]);
}
