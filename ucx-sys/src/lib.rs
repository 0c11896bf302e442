//! The part of `ucp/api/ucp.h` that mpi4jax uses, as it is in UCX 1.11 to 1.22, with the header's names. Nothing is linked: who
//! has found the library gives the addresses of its functions.
//!
//! Structs are passed by pointer with a mask of the fields that are set, so that a newer library with more
//! fields reads no further than we wrote. Result codes are integers.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};

pub type ucs_status_t = c_int;
pub const UCS_OK: ucs_status_t = 0;
pub const UCS_INPROGRESS: ucs_status_t = 1;
/// Pointers from here to -1, seen as integers, are error codes.
pub const UCS_ERR_LAST: isize = -100;

pub const UCP_FEATURE_TAG: u64 = 1;
pub const UCP_PARAM_FIELD_FEATURES: u64 = 1;
pub const UCP_PARAM_FIELD_ESTIMATED_NUM_EPS: u64 = 1 << 6;
pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;
pub const UCS_THREAD_MODE_SERIALIZED: c_int = 1;
pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
pub const UCP_ATTR_FIELD_MEMORY_TYPES: u64 = 1 << 2;
pub const UCS_MEMORY_TYPE_CUDA_BIT: u64 = 1 << 1;
pub const UCS_MEMORY_TYPE_ROCM_BIT: u64 = 1 << 3;
/// With it a receive that has ended at once has a request too, and so can be asked what it received.
pub const UCP_OP_ATTR_FLAG_NO_IMM_CMPL: u32 = 1 << 16;

#[repr(C)]
pub struct ucp_params_t {
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

/// With space for the fields of newer versions, which are not asked for.
#[repr(C)]
pub struct ucp_context_attr_t {
    pub field_mask: u64,
    pub request_size: usize,
    pub thread_mode: c_int,
    pub memory_types: u64,
    pub rest: [u64; 32],
}

/// With space for the fields of newer versions, which are not set.
#[repr(C)]
pub struct ucp_worker_params_t {
    pub field_mask: u64,
    pub thread_mode: c_int,
    pub rest: [u64; 48],
}

/// With space for the fields of newer versions, as above.
#[repr(C)]
pub struct ucp_ep_params_t {
    pub field_mask: u64,
    pub address: *const c_void,
    pub rest: [u64; 32],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_request_param_t {
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

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ucp_tag_recv_info_t {
    pub sender_tag: u64,
    pub length: usize,
}

pub type ucp_context_h = *mut c_void;
pub type ucp_worker_h = *mut c_void;
pub type ucp_ep_h = *mut c_void;
pub type ucp_config = *mut c_void;
/// Null, an error code, or a request.
pub type ucs_status_ptr_t = *mut c_void;

macro_rules! functions {
    ($($function:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of libucp, and of libucs, which it loads.
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(pub $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// The names of the functions.
            pub const NAMES: &[&str] = &[$(stringify!($function)),*];

            /// Those at the addresses that `find` gives for their names; its error, if one is missing.
            ///
            /// # Safety
            /// `find` gives the addresses of UCX's functions of these names, in a library that stays loaded.
            pub unsafe fn find<E>(mut find: impl FnMut(&str) -> Result<*const c_void, E>) -> Result<Self, E> {
                Ok(Self {
                    // SAFETY: promised by the caller. A pointer to a function is as large as any other one.
                    $($function: unsafe {
                        std::mem::transmute::<*const c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                            find(stringify!($function))?,
                        )
                    },)*
                })
            }
        }
    };
}

// `ucp_init` is an inline function of the header around `ucp_init_version`.
functions! {
    ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
    ucp_config_read(*const c_char, *const c_char, *mut ucp_config) -> ucs_status_t;
    ucp_config_release(ucp_config);
    ucp_init_version(c_uint, c_uint, *const ucp_params_t, ucp_config, *mut ucp_context_h) -> ucs_status_t;
    ucp_context_query(ucp_context_h, *mut ucp_context_attr_t) -> ucs_status_t;
    ucp_worker_create(ucp_context_h, *const ucp_worker_params_t, *mut ucp_worker_h) -> ucs_status_t;
    ucp_worker_get_address(ucp_worker_h, *mut *mut c_void, *mut usize) -> ucs_status_t;
    ucp_worker_release_address(ucp_worker_h, *mut c_void);
    ucp_worker_progress(ucp_worker_h) -> c_uint;
    ucp_worker_flush_nbx(ucp_worker_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_create(ucp_worker_h, *const ucp_ep_params_t, *mut ucp_ep_h) -> ucs_status_t;
    ucp_tag_send_nbx(ucp_ep_h, *const c_void, usize, u64, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_tag_recv_nbx(ucp_worker_h, *mut c_void, usize, u64, u64, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_tag_recv_request_test(*mut c_void, *mut ucp_tag_recv_info_t) -> ucs_status_t;
    ucp_request_check_status(*mut c_void) -> ucs_status_t;
    ucp_request_free(*mut c_void);
    ucs_status_string(ucs_status_t) -> *const c_char;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// The numbers are what a C compiler says of the header of UCX 1.13.
    #[test]
    fn layouts_equal_the_headers() {
        assert_eq!(size_of::<ucp_params_t>(), 80);
        assert_eq!(offset_of!(ucp_params_t, mt_workers_shared), 48);
        assert_eq!(offset_of!(ucp_params_t, estimated_num_eps), 56);
        assert_eq!(offset_of!(ucp_context_attr_t, memory_types), 24);
        assert_eq!(offset_of!(ucp_worker_params_t, thread_mode), 8);
        assert_eq!(offset_of!(ucp_ep_params_t, address), 8);
        assert_eq!(size_of::<ucp_request_param_t>(), 72);
        assert_eq!(offset_of!(ucp_request_param_t, request), 8);
        assert_eq!(offset_of!(ucp_request_param_t, memory_type), 48);
        assert_eq!(offset_of!(ucp_request_param_t, recv_info), 56);
        assert_eq!(size_of::<ucp_tag_recv_info_t>(), 16);
    }
}
