//! What XLA is to a handler: its interface, and a program with one custom call.

use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::ptr::{null, null_mut};

use _native::xla::c_api::{self, Api, ApiVersion, Args, Attrs, Buffer, Buffers, ByteSpan, CallFrame, TypeId};
use _native::xla::{execute, instantiate};

/// What XLA keeps for one custom call.
#[derive(Default)]
pub struct Context {
    state: usize,
    deleter: Option<unsafe extern "C" fn(*mut c_void)>,
}

pub const TYPE: i64 = 77;

/// Errors are strings; XLA's are opaque too.
unsafe extern "C" fn error_create(args: *mut Args<c_api::ErrorCreate>) -> *mut c_api::FfiError {
    unsafe { Box::into_raw(Box::new(CStr::from_ptr((*args).fields.message).to_owned())).cast() }
}

unsafe extern "C" fn error_get_message(args: *mut Args<c_api::ErrorGetMessage>) {
    unsafe { (*args).fields.message = (*(*args).fields.error.cast::<std::ffi::CString>()).as_ptr() }
}

unsafe extern "C" fn error_destroy(args: *mut Args<c_api::ErrorDestroy>) {
    unsafe { drop(Box::from_raw((*args).fields.error.cast::<std::ffi::CString>())) }
}

unsafe extern "C" fn type_register<const MINOR: c_int>(
    args: *mut Args<c_api::TypeRegister>,
) -> *mut c_api::FfiError {
    unsafe {
        // XLA takes structs that are longer than its own.
        let has_info = (*args).struct_size > offset_of!(Args<c_api::TypeRegister>, fields.type_info);
        assert!(has_info || MINOR < 2);
        assert_eq!((*args).fields.name.len, "mpi4jax_state".len());
        (*args).fields.type_id.write(TypeId { id: TYPE });
    }
    null_mut()
}

unsafe extern "C" fn state_set<const MINOR: c_int>(args: *mut c_void) -> *mut c_api::FfiError {
    unsafe {
        if MINOR >= 3 {
            let Args { struct_size, fields: args, .. } = &*args.cast::<Args<c_api::StagedState>>();
            assert_eq!((*struct_size, args.stage, (*args.type_id).id), (48, 0, TYPE));
            (*args.ctx.cast::<Context>()).state = args.state as usize;
        } else {
            let Args { struct_size, fields: args, .. } = &*args.cast::<Args<c_api::UnstagedState>>();
            assert_eq!((*struct_size, (*args.type_id).id), (48, TYPE));
            (*args.ctx.cast::<Context>()).state = args.state as usize;
            (*args.ctx.cast::<Context>()).deleter = (MINOR < 2).then_some(args.deleter);
        }
    }
    null_mut()
}

unsafe extern "C" fn state_get<const MINOR: c_int>(args: *mut c_void) -> *mut c_api::FfiError {
    unsafe {
        if MINOR >= 3 {
            let args = &mut (*args.cast::<Args<c_api::StagedState>>()).fields;
            args.state = (*args.ctx.cast::<Context>()).state as *mut c_void;
        } else {
            let args = &mut (*args.cast::<Args<c_api::UnstagedState>>()).fields;
            args.state = (*args.ctx.cast::<Context>()).state as *mut c_void;
        }
    }
    null_mut()
}

pub fn api<const MINOR: c_int>() -> Api {
    Api {
        struct_size: size_of::<Api>(),
        extension_start: null_mut(),
        version: ApiVersion { struct_size: 24, extension_start: null_mut(), major: 0, minor: MINOR },
        internal_api: null(),
        error_create,
        error_get_message,
        error_destroy,
        handler_register: 0,
        stream_get: 0,
        type_register: type_register::<MINOR>,
        execution_context_get: 0,
        state_set: state_set::<MINOR>,
        state_get: state_get::<MINOR>,
    }
}

/// A custom call in a compiled program.
pub struct Program {
    pub api: &'static Api,
    pub ctx: Box<Context>,
}

pub fn buffers(list: &[*const Buffer]) -> Buffers {
    Buffers {
        struct_size: 40,
        extension_start: null_mut(),
        size: list.len() as i64,
        types: null(),
        buffers: list.as_ptr(),
    }
}

pub fn no_attrs() -> Attrs {
    Attrs {
        struct_size: 48,
        extension_start: null_mut(),
        size: 0,
        types: null(),
        names: null(),
        attrs: null(),
    }
}

pub fn outcome(error: *mut c_api::FfiError) -> Result<(), String> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: made by `error_create`.
    Err(unsafe { Box::from_raw(error.cast::<std::ffi::CString>()) }.to_string_lossy().into_owned())
}

impl Program {
    pub fn frame(&mut self, stage: c_int, args: Buffers, rets: Buffers, attrs: Attrs) -> CallFrame {
        CallFrame {
            struct_size: size_of::<CallFrame>(),
            extension_start: null_mut(),
            api: self.api,
            ctx: (&raw mut *self.ctx).cast(),
            stage,
            args,
            rets,
            attrs,
            future: null_mut(),
        }
    }

    /// Compiles a call that is described so.
    pub fn new(api: &'static Api, description: &serde_json::Value) -> Result<Self, String> {
        let text = description.to_string();
        let span = |text: &str| ByteSpan { ptr: text.as_ptr().cast(), len: text.len() };
        let (name, value) = (span("call"), span(&text));
        let (name, value): (*const ByteSpan, *const c_void) = (&name, (&raw const value).cast());
        let attrs = Attrs { size: 1, types: &c_api::ATTR_STRING, names: &name, attrs: &value, ..no_attrs() };
        let mut program = Self { api, ctx: Box::default() };
        let mut frame = program.frame(c_api::STAGE_INSTANTIATE, buffers(&[]), buffers(&[]), attrs);
        // SAFETY: a frame as XLA makes them.
        outcome(unsafe { instantiate::<false>(&mut frame) }).map(|()| program)
    }

    pub fn execute(&mut self, args: &[*const Buffer], rets: &[*const Buffer]) -> Result<(), String> {
        let mut frame = self.frame(3, buffers(args), buffers(rets), no_attrs());
        // SAFETY: a frame as XLA makes them.
        outcome(unsafe { execute::<false>(&mut frame) })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Where the deleter belongs to the type, the state is leaked: this is a test.
        if let Some(deleter) = self.ctx.deleter {
            // SAFETY: as XLA deletes states.
            unsafe { deleter(self.ctx.state as *mut c_void) };
        }
    }
}

pub fn buffer<T>(dtype: c_int, data: &mut [T], dims: &[i64]) -> Buffer {
    Buffer {
        struct_size: 48,
        extension_start: null_mut(),
        dtype,
        data: data.as_mut_ptr().cast(),
        rank: dims.len() as i64,
        dims: dims.as_ptr(),
    }
}

pub const F32: c_int = 11;
pub const S32: c_int = 4;
