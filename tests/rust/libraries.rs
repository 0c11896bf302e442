//! The libraries that users have, without a GPU: NVIDIA's NCCL and UCX. `tools/matrix.py` installs them from PyPI, and names their
//! files in MPI4JAX_LIBNCCL and MPI4JAX_LIBUCP.

use std::ffi::{CStr, c_int, c_void};
use std::mem::zeroed;
use std::ptr::{null, null_mut};

use _native::device::nccl::{self, Library, UniqueId};
use _native::dynlib::{Declared, Found, Name};
use _native::error::Cause;
use ucx_sys as ucx;

/// What an error says of a code.
fn words(library: &Library, code: c_int) -> String {
    let Err(Cause::Library { text, .. }) = library.check("a function", code) else { panic!("{code}") };
    text.into()
}

#[test]
#[ignore = "needs NVIDIA's library"]
fn nccl_has_every_function_that_is_called() {
    let library = Library::get().expect("a library with all of them, of a version that is new enough");
    assert!(words(library, nccl::sys::ncclResult_t::ncclInvalidArgument as c_int).contains("invalid"));
    assert!(!words(library, 12345).is_empty(), "a code that no header knows");
    assert!(library.check("a function", 0).is_ok());
    let mut id = UniqueId { internal: [0; 128] };
    // SAFETY: the functions that the headers declare under these names.
    unsafe {
        let start: unsafe fn() -> _ = nccl::sys::ncclGroupStart;
        let end: unsafe fn() -> _ = nccl::sys::ncclGroupEnd;
        let name: unsafe fn(_) -> _ = nccl::sys::ncclGetUniqueId;
        assert_eq!((start.at(library.ncclGroupStart))(), 0);
        assert_eq!((end.at(library.ncclGroupEnd))(), 0);
        // Without a driver it may refuse; the code is one that the header has.
        let code = (name.at(library.ncclGetUniqueId))(&mut id);
        assert_eq!(code == 0, id.internal.iter().any(|&byte| byte != 0), "{code}");
    }
}

#[test]
#[ignore = "needs UCX"]
fn ucx_has_every_function_that_is_called() {
    let name = Name { soname: "libucp.so.0", variable: "MPI4JAX_LIBUCP", needed: "1.11 of UCX" };
    let found = Found::open(name).expect("UCX");
    // SAFETY: addresses in UCX's library, which stays; all-zero is a value of the structs, whose masks name what is set.
    unsafe {
        let ucp = ucx::Functions::find(|name| found.address(name)).expect("every function");
        assert_eq!(CStr::from_ptr((ucp.ucs_status_string)(ucx::UCS_OK)), c"Success");
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        (ucp.ucp_get_version)(&mut major, &mut minor, &mut patch);
        assert!((major, minor) >= (1, 11), "{major}.{minor}.{patch}");

        // A message from a process to itself.
        let mut config = null_mut();
        assert_eq!((ucp.ucp_config_read)(null(), null(), &mut config), ucx::UCS_OK);
        let params = ucx::ucp_params_t {
            field_mask: ucx::UCP_PARAM_FIELD_FEATURES,
            features: ucx::UCP_FEATURE_TAG,
            ..zeroed()
        };
        let mut context = null_mut();
        assert_eq!((ucp.ucp_init_version)(major, minor, &params, config, &mut context), ucx::UCS_OK);
        (ucp.ucp_config_release)(config);
        let mut attributes =
            ucx::ucp_context_attr_t { field_mask: ucx::UCP_ATTR_FIELD_MEMORY_TYPES, ..zeroed() };
        assert_eq!((ucp.ucp_context_query)(context, &mut attributes), ucx::UCS_OK);
        assert_eq!(attributes.memory_types & 1, 1, "it reaches the memory of the host");
        let params = ucx::ucp_worker_params_t {
            field_mask: ucx::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: ucx::UCS_THREAD_MODE_SERIALIZED,
            ..zeroed()
        };
        let mut worker = null_mut();
        assert_eq!((ucp.ucp_worker_create)(context, &params, &mut worker), ucx::UCS_OK);
        let (mut address, mut length) = (null_mut(), 0);
        assert_eq!((ucp.ucp_worker_get_address)(worker, &mut address, &mut length), ucx::UCS_OK);
        let params =
            ucx::ucp_ep_params_t { field_mask: ucx::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, address, ..zeroed() };
        let mut endpoint = null_mut();
        assert_eq!((ucp.ucp_ep_create)(worker, &params, &mut endpoint), ucx::UCS_OK);
        (ucp.ucp_worker_release_address)(worker, address);

        let (sent, mut got, label) = (42_u64, 0_u64, 0xABCD);
        let kept = ucx::ucp_request_param_t { op_attr_mask: ucx::UCP_OP_ATTR_FLAG_NO_IMM_CMPL, ..zeroed() };
        let to = (&raw mut got).cast::<c_void>();
        let receiving = (ucp.ucp_tag_recv_nbx)(worker, to, size_of::<u64>(), label, u64::MAX, &kept);
        let from = (&raw const sent).cast::<c_void>();
        let sending = (ucp.ucp_tag_send_nbx)(endpoint, from, size_of::<u64>(), label, &zeroed());
        let mut received = ucx::ucp_tag_recv_info_t::default();
        while (ucp.ucp_tag_recv_request_test)(receiving, &mut received) == ucx::UCS_INPROGRESS {
            (ucp.ucp_worker_progress)(worker);
        }
        (ucp.ucp_request_free)(receiving);
        if !sending.is_null() {
            while (ucp.ucp_request_check_status)(sending) == ucx::UCS_INPROGRESS {
                (ucp.ucp_worker_progress)(worker);
            }
            (ucp.ucp_request_free)(sending);
        }
        assert_eq!((got, received.length, received.sender_tag), (42, size_of::<u64>(), label));
        let flushing = (ucp.ucp_worker_flush_nbx)(worker, &zeroed());
        assert!(flushing.is_null(), "nothing is under way");
    }
}
