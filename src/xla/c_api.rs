//! A mirror of the parts of `xla/ffi/api/c_api.h` that we use.
//!
//! The interface is a stable C ABI: every struct begins with its size, and a new field comes last with a
//! new API minor. XLA takes structs that are longer than its own. What changed between minors 1 (jaxlib 0.7) and 4 (jaxlib 0.11.2) and matters here:
//!
//! | minor | jaxlib | change |
//! | --- | --- | --- |
//! | 1 | 0.7, 0.8.0 | the deleter of a state is an argument of `State_Set` |
//! | 2 | 0.8.1 to 0.9.0 | the deleter belongs to the registered type; `state_type_id` in the metadata |
//! | 3 | 0.9.1 on | `State_Set` and `State_Get` take the stage |
//! | 4 | 0.11.2 | a fifth member in the handler bundle, which we never pass |

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

/// The major version, and the newest minor whose layout this file knows.
pub const API_MAJOR: c_int = 0;
pub const NEWEST_API_MINOR: c_int = 4;

/// From this minor on a type is registered with its deleter, and the metadata names the state's type.
pub const MINOR_TYPE_INFO: c_int = 2;
/// From this minor on states belong to a stage.
pub const MINOR_STATE_STAGE: c_int = 3;

pub const EXTENSION_METADATA: c_int = 1;

/// Codes of errors: XLA puts their names before the messages.
pub const ERROR_INVALID_ARGUMENT: c_int = 3;
pub const ERROR_FAILED_PRECONDITION: c_int = 9;
pub const ERROR_INTERNAL: c_int = 13;

pub const STAGE_INSTANTIATE: c_int = 0;

pub const TYPE_TOKEN: c_int = 17;

pub const ATTR_STRING: c_int = 4;

/// Opaque to us.
#[repr(C)]
pub struct FfiError {
    _opaque: [u8; 0],
}

/// Opaque to us.
#[repr(C)]
pub struct ExecutionContext {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct ExtensionBase {
    pub struct_size: usize,
    pub kind: c_int,
    pub next: *mut ExtensionBase,
}

#[repr(C)]
pub struct ApiVersion {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub major: c_int,
    pub minor: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ByteSpan {
    pub ptr: *const c_char,
    pub len: usize,
}

impl ByteSpan {
    /// # Safety
    /// The bytes outlive `'a`.
    pub unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: promised by the caller; an empty span may have no address.
        if self.len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len) } }
    }
}

#[repr(C)]
pub struct Buffer {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub dtype: c_int,
    pub data: *mut c_void,
    pub rank: i64,
    pub dims: *const i64,
}

/// Arguments and results have the same layout.
#[repr(C)]
pub struct Buffers {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *const c_int,
    pub buffers: *const *const Buffer,
}

#[repr(C)]
pub struct Attrs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *const c_int,
    pub names: *const *const ByteSpan,
    pub attrs: *const *const c_void,
}

#[repr(C)]
pub struct CallFrame {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub api: *const Api,
    pub ctx: *mut ExecutionContext,
    pub stage: c_int,
    pub args: Buffers,
    pub rets: Buffers,
    pub attrs: Attrs,
    /// For asynchronous handlers; the handlers of this package are synchronous.
    pub future: *mut c_void,
}

/// A handler for one stage.
pub type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut FfiError;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeId {
    pub id: i64,
}

/// `XLA_FFI_UNKNOWN_TYPE_ID`
pub const UNKNOWN_TYPE_ID: TypeId = TypeId { id: 0 };

#[repr(C)]
pub struct Deleter {
    pub deleter: unsafe extern "C" fn(*mut c_void),
}

pub type TypeInfo = Args<Deleter>;

// SAFETY: XLA only reads it.
unsafe impl Sync for TypeInfo {}

#[repr(C)]
pub struct Metadata {
    pub struct_size: usize,
    pub api_version: ApiVersion,
    pub traits: u32,
    /// Only from `MINOR_TYPE_INFO` on.
    pub state_type_id: TypeId,
}

#[repr(C)]
pub struct MetadataExtension {
    pub base: ExtensionBase,
    pub metadata: *mut Metadata,
}

/// The arguments of one of XLA's functions, after what all of them begin with.
#[repr(C)]
pub struct Args<T> {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub fields: T,
}

impl<T> Args<T> {
    pub const fn new(fields: T) -> Self {
        Self { struct_size: size_of::<Self>(), extension_start: null_mut(), fields }
    }
}

#[repr(C)]
pub struct ErrorCreate {
    pub message: *const c_char,
    pub code: c_int,
}

/// Minor 4 appends the code, which we do not read.
#[repr(C)]
pub struct ErrorGetMessage {
    pub error: *mut FfiError,
    pub message: *const c_char,
    pub code: c_int,
}

#[repr(C)]
pub struct ErrorDestroy {
    pub error: *mut FfiError,
}

#[repr(C)]
pub struct TypeRegister {
    pub name: ByteSpan,
    pub type_id: *mut TypeId,
    /// Read from `MINOR_TYPE_INFO` on.
    pub type_info: *const TypeInfo,
}

#[repr(C)]
pub struct StreamGet {
    pub ctx: *mut ExecutionContext,
    pub stream: *mut c_void,
}

/// Of `State_Set` and `State_Get` without a stage (before `MINOR_STATE_STAGE`).
#[repr(C)]
pub struct UnstagedState {
    pub ctx: *mut ExecutionContext,
    pub type_id: *mut TypeId,
    pub state: *mut c_void,
    /// Read by `State_Set` before `MINOR_TYPE_INFO`.
    pub deleter: unsafe extern "C" fn(*mut c_void),
}

/// Of `State_Set` and `State_Get` from `MINOR_STATE_STAGE` on.
#[repr(C)]
pub struct StagedState {
    pub ctx: *mut ExecutionContext,
    pub stage: c_int,
    pub type_id: *mut TypeId,
    pub state: *mut c_void,
}

type Function<T> = unsafe extern "C" fn(*mut Args<T>) -> *mut FfiError;

/// Takes `Args` of an `UnstagedState` or of a `StagedState`.
pub type StateFunction = unsafe extern "C" fn(*mut c_void) -> *mut FfiError;

pub type StreamFunction = Function<StreamGet>;

/// XLA's functions. Those that we do not call are addresses, and those after the last that we call are
/// left out.
#[repr(C)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub version: ApiVersion,
    pub internal_api: *const c_void,
    pub error_create: Function<ErrorCreate>,
    pub error_get_message: unsafe extern "C" fn(*mut Args<ErrorGetMessage>),
    pub error_destroy: unsafe extern "C" fn(*mut Args<ErrorDestroy>),
    pub handler_register: usize,
    /// A `StreamFunction`; null where there are no streams.
    pub stream_get: usize,
    pub type_register: Function<TypeRegister>,
    pub execution_context_get: usize,
    pub state_set: StateFunction,
    pub state_get: StateFunction,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// The numbers are what a C compiler says of jaxlib's header; `XLA_FFI_*_STRUCT_SIZE` is the offset
    /// of the last field plus its size.
    #[test]
    fn layouts_equal_the_headers() {
        assert_eq!(size_of::<ExtensionBase>(), 24);
        assert_eq!(offset_of!(ExtensionBase, next), 16);

        assert_eq!(size_of::<ApiVersion>(), 24);
        assert_eq!(offset_of!(ApiVersion, minor), 20);

        assert_eq!(size_of::<Buffer>(), 48);
        assert_eq!(offset_of!(Buffer, dtype), 16);
        assert_eq!(offset_of!(Buffer, data), 24);
        assert_eq!(offset_of!(Buffer, rank), 32);
        assert_eq!(offset_of!(Buffer, dims), 40);

        assert_eq!(size_of::<ByteSpan>(), 16);

        assert_eq!(size_of::<Buffers>(), 40);
        assert_eq!(offset_of!(Buffers, buffers), 32);
        assert_eq!(size_of::<Attrs>(), 48);
        assert_eq!(offset_of!(Attrs, attrs), 40);

        assert_eq!(offset_of!(CallFrame, api), 16);
        assert_eq!(offset_of!(CallFrame, ctx), 24);
        assert_eq!(offset_of!(CallFrame, stage), 32);
        assert_eq!(offset_of!(CallFrame, args), 40);
        assert_eq!(offset_of!(CallFrame, rets), 80);
        assert_eq!(offset_of!(CallFrame, attrs), 120);
        assert_eq!(offset_of!(CallFrame, future), 168);
        assert_eq!(size_of::<CallFrame>(), 176);

        assert_eq!(offset_of!(Metadata, api_version), 8);
        assert_eq!(offset_of!(Metadata, traits), 32);
        assert_eq!(offset_of!(Metadata, state_type_id), 40);
        assert_eq!(offset_of!(MetadataExtension, metadata), 24);

        assert_eq!(size_of::<TypeInfo>(), 24);
        assert_eq!(offset_of!(Args<TypeRegister>, fields.type_id), 32);
        assert_eq!(offset_of!(Args<TypeRegister>, fields.type_info), 40);

        assert_eq!(offset_of!(Args<StreamGet>, fields.stream), 24);
        assert_eq!(offset_of!(Args<UnstagedState>, fields.type_id), 24);
        assert_eq!(offset_of!(Args<UnstagedState>, fields.state), 32);
        assert_eq!(offset_of!(Args<UnstagedState>, fields.deleter), 40);
        assert_eq!(offset_of!(Args<StagedState>, fields.stage), 24);
        assert_eq!(offset_of!(Args<StagedState>, fields.type_id), 32);
        assert_eq!(offset_of!(Args<StagedState>, fields.state), 40);

        assert_eq!(offset_of!(Args<ErrorCreate>, fields.message), 16);
        assert_eq!(offset_of!(Args<ErrorCreate>, fields.code), 24);
        assert_eq!(offset_of!(Args<ErrorGetMessage>, fields.message), 24);
        assert_eq!(offset_of!(Args<ErrorDestroy>, fields.error), 16);

        assert_eq!(offset_of!(Api, version), 16);
        assert_eq!(offset_of!(Api, internal_api), 40);
        assert_eq!(offset_of!(Api, error_create), 48);
        assert_eq!(offset_of!(Api, error_destroy), 64);
        assert_eq!(offset_of!(Api, stream_get), 80);
        assert_eq!(offset_of!(Api, type_register), 88);
        assert_eq!(offset_of!(Api, state_set), 104);
        assert_eq!(offset_of!(Api, state_get), 112);
    }
}
