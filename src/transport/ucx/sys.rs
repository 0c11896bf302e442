//! The part of `ucp/api/ucp.h` that we use, as it is in UCX 1.11 to 1.22.
//!
//! Structs are passed by pointer with a mask of the fields that are set, so that a newer library with more
//! fields reads no further than we wrote. Result codes are integers.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::dynlib::{Name, function_table};

pub const LIBRARY: Name = Name { soname: "libucp.so.0", variable: "MPI4JAX_LIBUCP", needed: "1.11 of UCX" };

/// Older ones lack parts of the interface, or fields where we write them.
pub const OLDEST: (c_uint, c_uint) = (1, 11);

/// `ucs_status_t`
pub type Status = c_int;
pub const OK: Status = 0;
pub const IN_PROGRESS: Status = 1;
/// Pointers from here to -1, seen as integers, are error codes.
pub const LAST_ERROR: isize = -100;

pub const FEATURE_TAG: u64 = 1;
pub const PARAMS_FEATURES: u64 = 1;
pub const PARAMS_ENDPOINTS: u64 = 1 << 6;
pub const WORKER_THREAD_MODE: u64 = 1;
pub const THREAD_MODE_SERIALIZED: c_int = 1;
pub const ENDPOINT_ADDRESS: u64 = 1;
pub const ATTRIBUTES_MEMORY_TYPES: u64 = 1 << 2;
pub const MEMORY_TYPE_CUDA: u64 = 1 << 1;
/// With it a receive that has ended at once has a request too, and so can be asked what it received.
pub const NO_IMMEDIATE_COMPLETION: u32 = 1 << 16;

/// `ucp_params_t`
#[repr(C)]
pub struct Params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
}

/// `ucp_context_attr_t`, with room for the fields of newer versions, which are not asked for.
#[repr(C)]
pub struct Attributes {
    pub field_mask: u64,
    pub request_size: usize,
    pub thread_mode: c_int,
    pub memory_types: u64,
    pub rest: [u64; 32],
}

/// `ucp_worker_params_t`, with room for the fields of newer versions, which are not set.
#[repr(C)]
pub struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_int,
    pub rest: [u64; 48],
}

/// `ucp_ep_params_t`, with room likewise.
#[repr(C)]
pub struct EndpointParams {
    pub field_mask: u64,
    pub address: *const c_void,
    pub rest: [u64; 32],
}

/// `ucp_request_param_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RequestParam {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub callback: *const c_void,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_int,
    pub recv_info: *mut c_void,
    pub memh: *mut c_void,
}

/// `ucp_tag_recv_info_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    pub sender_tag: u64,
    pub length: usize,
}

pub type Context = *mut c_void;
pub type Worker = *mut c_void;
pub type Endpoint = *mut c_void;
pub type Config = *mut c_void;
/// Null, an error code, or a request.
pub type StatusPtr = *mut c_void;

function_table! {
    /// libucp's functions. `ucp_init` is an inline function of the header around `ucp_init_version`.
    Ucp {
        ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
        ucp_config_read(*const c_char, *const c_char, *mut Config) -> Status;
        ucp_config_release(Config);
        ucp_init_version(c_uint, c_uint, *const Params, Config, *mut Context) -> Status;
        ucp_context_query(Context, *mut Attributes) -> Status;
        ucp_worker_create(Context, *const WorkerParams, *mut Worker) -> Status;
        ucp_worker_get_address(Worker, *mut *mut c_void, *mut usize) -> Status;
        ucp_worker_release_address(Worker, *mut c_void);
        ucp_worker_progress(Worker) -> c_uint;
        ucp_worker_flush_nbx(Worker, *const RequestParam) -> StatusPtr;
        ucp_ep_create(Worker, *const EndpointParams, *mut Endpoint) -> Status;
        ucp_tag_send_nbx(Endpoint, *const c_void, usize, u64, *const RequestParam) -> StatusPtr;
        ucp_tag_recv_nbx(Worker, *mut c_void, usize, u64, u64, *const RequestParam) -> StatusPtr;
        ucp_tag_recv_request_test(*mut c_void, *mut Received) -> Status;
        ucp_request_check_status(*mut c_void) -> Status;
        ucp_request_free(*mut c_void);
        ucs_status_string(Status) -> *const c_char;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// The numbers are what a C compiler says of the header of UCX 1.13.
    #[test]
    fn layouts_equal_the_headers() {
        assert_eq!(size_of::<Params>(), 80);
        assert_eq!(offset_of!(Params, mt_workers_shared), 48);
        assert_eq!(offset_of!(Params, estimated_num_eps), 56);
        assert_eq!(offset_of!(Attributes, memory_types), 24);
        assert_eq!(offset_of!(WorkerParams, thread_mode), 8);
        assert_eq!(offset_of!(EndpointParams, address), 8);
        assert_eq!(size_of::<RequestParam>(), 72);
        assert_eq!(offset_of!(RequestParam, request), 8);
        assert_eq!(offset_of!(RequestParam, memory_type), 48);
        assert_eq!(offset_of!(RequestParam, recv_info), 56);
        assert_eq!(size_of::<Received>(), 16);
    }
}
