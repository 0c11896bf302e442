//! Host memory through the MPI library.
//!
//! The raw C functions rather than rsmpi's safe layer, which drops return codes and knows neither
//! `MPI_IN_PLACE` on run-time types nor counts beyond 32 bits.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write;
use std::mem::{MaybeUninit, size_of};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use mpi::ffi::{self, MPI_Comm, MPI_Datatype, MPI_Op, MPI_Request, MPI_Status};
use smallvec::SmallVec;

use super::{Arrived, Transport, arrive};
use crate::error::{Cause, Error};
use crate::ops::{
    self, Buffer, Builtin, Call, Class, Comm, Dtype, Envelope, Op, Reduced, Reduction, Wildcards, Wire,
};

unsafe extern "C" {
    // mpi_shim.c
    static mpi4jax_in_place: *mut c_void;
    static mpi4jax_vendor: *const c_char;
    static mpi4jax_version: *const c_char;
    fn mpi4jax_query_cuda_support() -> c_int;
}

/// The largest count handed to one MPI call.
static COUNT_LIMIT: AtomicUsize = AtomicUsize::new(c_int::MAX as usize);

/// Lowers the largest count handed to one MPI call, so that tests reach the code for large messages
/// with small ones. `None` restores the real limit.
pub fn set_count_limit(limit: Option<usize>) {
    let most = c_int::MAX as usize;
    COUNT_LIMIT.store(limit.unwrap_or(most).clamp(1, most), Ordering::Relaxed);
}

/// Host MPI.
#[derive(Clone, Copy, Debug)]
pub struct Mpi;

impl Transport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    #[inline]
    fn execute(&self, call: &Call) -> Result<(), Error> {
        run(call).map_err(|cause| Error { transport: Some(self.name()), ..call.site.error(cause) })
    }
}

/// An MPI handle from the integer that `Comm` and `Reduction` keep.
///
/// # Safety
/// `H` is one of MPI's handle types (a pointer or a 32-bit integer), `raw` is such a handle's value.
pub(crate) unsafe fn handle<H: Copy>(raw: usize) -> H {
    // SAFETY: the two arms copy exactly `size_of::<H>()` bytes, of which every pattern is a valid handle
    // to hold (if not to use).
    unsafe {
        if size_of::<H>() == size_of::<u32>() {
            std::mem::transmute_copy(&(raw as u32))
        } else {
            const { assert!(size_of::<H>() <= size_of::<usize>()) };
            std::mem::transmute_copy(&raw)
        }
    }
}

/// The integer for an MPI handle, as mpi4py gives it; the inverse of `handle`.
pub fn handle_value<H: Copy>(handle: H) -> usize {
    let mut raw = [0u8; size_of::<usize>()];
    // SAFETY: handles are plain data, no larger than a pointer.
    unsafe {
        const { assert!(size_of::<H>() == 4 || size_of::<H>() == size_of::<usize>()) };
        std::ptr::copy_nonoverlapping((&raw const handle).cast(), raw.as_mut_ptr(), size_of::<H>());
        if size_of::<H>() == 4 {
            raw.as_ptr().cast::<u32>().read_unaligned() as usize
        } else {
            usize::from_ne_bytes(raw)
        }
    }
}

#[inline]
pub(crate) fn check(function: &'static str, code: c_int) -> Result<(), Cause> {
    if code == 0 { Ok(()) } else { Err(failure(function, code)) }
}

#[cold]
fn failure(function: &'static str, code: c_int) -> Cause {
    let mut text = [0 as c_char; 1024];
    let mut length = 0;
    // SAFETY: the buffer is larger than MPI_MAX_ERROR_STRING of any MPI (256 or 512).
    let text = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into()
    };
    Cause::Mpi { function, code, text }
}

/// `count` elements as one argument pair of an MPI call: the one place that decides between a plain
/// count and a derived type.
struct Span {
    count: c_int,
    datatype: MPI_Datatype,
    derived: bool,
}

impl Span {
    #[inline]
    fn new(count: usize, dtype: Dtype) -> Result<Self, Cause> {
        let limit = COUNT_LIMIT.load(Ordering::Relaxed);
        if count <= limit {
            return Ok(Self { count: count as c_int, datatype: dtype.mpi(), derived: false });
        }
        Self::derived(count, dtype, limit)
    }

    /// One element of a type that is `count` elements long.
    #[cold]
    fn derived(count: usize, dtype: Dtype, limit: usize) -> Result<Self, Cause> {
        let base = dtype.mpi();
        let (chunks, rest) = (count / limit, count % limit);
        // SAFETY: MPI copies the arrays and takes references to the types, so that the intermediate type
        // may be freed; it is freed on the error path too. A chunk is at most i32::MAX elements, and with
        // the real limit there are fewer than 2^32 / 16 chunks in an address space.
        unsafe {
            let mut chunk = MaybeUninit::<MPI_Datatype>::uninit();
            check("MPI_Type_contiguous", ffi::MPI_Type_contiguous(limit as c_int, base, chunk.as_mut_ptr()))?;
            let mut chunk = chunk.assume_init();
            let mut whole = MaybeUninit::<MPI_Datatype>::uninit();
            let made = check(
                "MPI_Type_create_struct",
                ffi::MPI_Type_create_struct(
                    2,
                    [chunks as c_int, rest as c_int].as_ptr(),
                    [0, (chunks * limit * dtype.size()) as ffi::MPI_Aint].as_ptr(),
                    [chunk, base].as_ptr(),
                    whole.as_mut_ptr(),
                ),
            );
            ffi::MPI_Type_free(&mut chunk);
            made?;
            let mut span = Self { count: 1, datatype: whole.assume_init(), derived: true };
            check("MPI_Type_commit", ffi::MPI_Type_commit(&mut span.datatype))?;
            Ok(span)
        }
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if self.derived {
            // SAFETY: made by `derived`, and MPI keeps it alive for communication that is under way.
            unsafe { ffi::MPI_Type_free(&mut self.datatype) };
        }
    }
}

/// Whether MPI calls us back to reduce, with pointers that the processor has to reach.
#[inline(always)]
pub(super) fn is_ours(builtin: Builtin, dtype: Dtype) -> bool {
    let floats = dtype.class() == Class::Float;
    match builtin {
        Builtin::Minloc | Builtin::Maxloc => true,
        // MPI leaves open what becomes of NaN. Where that depends on the order, as it does in practice,
        // ranks end with different results.
        Builtin::Max | Builtin::Min if floats => true,
        _ => dtype.reduced() == Reduced::ByUs,
    }
}

/// How MPI is to reduce.
struct Reducer {
    datatype: MPI_Datatype,
    op: MPI_Op,
    /// Elements in one item of `datatype`.
    width: usize,
}

impl Reducer {
    #[inline(always)]
    fn new(reduction: Option<Reduction>, dtype: Dtype) -> Result<Self, Cause> {
        let builtin = match reduction.ok_or(Cause::Reduction { expected: true })? {
            // SAFETY: registered as the handle of an MPI_Op.
            Reduction::User(op) => {
                return Ok(Self { datatype: dtype.mpi(), op: unsafe { handle(op) }, width: 1 });
            }
            Reduction::Builtin(builtin) => builtin,
        };
        if !builtin.allows(dtype) {
            return Err(Cause::UndefinedReduction { reduction: builtin.name(), dtype });
        }
        if is_ours(builtin, dtype) { Self::ours(builtin, dtype) } else { Self::native(builtin, dtype) }
    }

    #[inline(always)]
    fn native(builtin: Builtin, dtype: Dtype) -> Result<Self, Cause> {
        // MPI's logical type has the logical operations only; on values 0 and 1 the integer ones do the rest.
        let logical = matches!(builtin, Builtin::Land | Builtin::Lor | Builtin::Lxor);
        // SAFETY: constants of the MPI shim, written once by its loader.
        unsafe {
            let datatype =
                if dtype.class() == Class::Bool && !logical { ffi::RSMPI_UINT8_T } else { dtype.mpi() };
            let op = match builtin {
                Builtin::Sum => ffi::RSMPI_SUM,
                Builtin::Prod => ffi::RSMPI_PROD,
                Builtin::Max => ffi::RSMPI_MAX,
                Builtin::Min => ffi::RSMPI_MIN,
                Builtin::Land => ffi::RSMPI_LAND,
                Builtin::Lor => ffi::RSMPI_LOR,
                Builtin::Lxor => ffi::RSMPI_LXOR,
                Builtin::Band => ffi::RSMPI_BAND,
                Builtin::Bor => ffi::RSMPI_BOR,
                Builtin::Bxor => ffi::RSMPI_BXOR,
                // MPI's own are for C structs of a value and an int, which no JAX array is made of.
                Builtin::Minloc | Builtin::Maxloc => return Self::ours(builtin, dtype),
            };
            Ok(Self { datatype, op, width: 1 })
        }
    }

    /// A reduction of `ops::combine`, made known to MPI when it is first needed.
    fn ours(builtin: Builtin, dtype: Dtype) -> Result<Self, Cause> {
        static OPS: [[OnceLock<usize>; Builtin::ALL.len()]; Dtype::ALL.len()] =
            [const { [const { OnceLock::new() }; Builtin::ALL.len()] }; Dtype::ALL.len()];

        let pairs = matches!(builtin, Builtin::Minloc | Builtin::Maxloc);
        let (datatype, width) = if pairs { (pair(dtype)?, 2) } else { (dtype.mpi(), 1) };
        let slot = &OPS[dtype as usize][builtin as usize];
        if let Some(&op) = slot.get() {
            // SAFETY: stored below.
            return Ok(Self { datatype, op: unsafe { handle(op) }, width });
        }
        let function = ops::combine(builtin, dtype)
            .ok_or(Cause::UndefinedReduction { reduction: builtin.name(), dtype })?;
        // SAFETY: a `Combine` is an MPI_User_function, but for the type of the argument that it ignores. Two
        // threads may both come here; then one of the two equal MPI_Ops is forgotten.
        unsafe {
            let function = std::mem::transmute::<ops::Combine, UserFunction>(function);
            let mut op = MaybeUninit::<MPI_Op>::uninit();
            check("MPI_Op_create", ffi::MPI_Op_create(Some(function), 1, op.as_mut_ptr()))?;
            Ok(Self { datatype, op: handle(*slot.get_or_init(|| handle_value(op.assume_init()))), width })
        }
    }

    /// Calls `step(offset in bytes, items)` for pieces of at most the count limit: reductions act item by
    /// item, and MPI's predefined ones take no derived types.
    #[inline]
    fn in_pieces(
        &self,
        buffer: &Buffer,
        mut step: impl FnMut(usize, c_int) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let limit = COUNT_LIMIT.load(Ordering::Relaxed);
        if self.width == 1 && buffer.count <= limit {
            return step(0, buffer.count as c_int);
        }
        if !buffer.count.is_multiple_of(self.width) {
            return Err(Cause::Pairs { count: buffer.count });
        }
        let items = buffer.count / self.width;
        let mut start = 0;
        // At least once, so that ranks with nothing to reduce take part.
        loop {
            let count = limit.min(items - start);
            step(start * self.width * buffer.dtype.size(), count as c_int)?;
            start += count;
            if start >= items {
                return Ok(());
            }
        }
    }
}

type UserFunction = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut MPI_Datatype);

/// Two adjacent elements, a value and an index.
fn pair(dtype: Dtype) -> Result<MPI_Datatype, Cause> {
    static PAIRS: [OnceLock<usize>; Dtype::ALL.len()] = [const { OnceLock::new() }; Dtype::ALL.len()];
    let slot = &PAIRS[dtype as usize];
    if let Some(&pair) = slot.get() {
        // SAFETY: stored below.
        return Ok(unsafe { handle(pair) });
    }
    // SAFETY: makes a type that is never freed.
    unsafe {
        let mut pair = MaybeUninit::<MPI_Datatype>::uninit();
        check("MPI_Type_contiguous", ffi::MPI_Type_contiguous(2, dtype.mpi(), pair.as_mut_ptr()))?;
        let mut pair = pair.assume_init();
        check("MPI_Type_commit", ffi::MPI_Type_commit(&mut pair))?;
        Ok(handle(*slot.get_or_init(|| handle_value(pair))))
    }
}

fn in_place() -> *mut c_void {
    // SAFETY: a constant of our shim.
    unsafe { mpi4jax_in_place }
}

/// The send argument of a collective whose send and receive buffers are equally large: where they are
/// one buffer, MPI wants to be told.
#[inline]
fn send_or_in_place(send: &Buffer, recv: &Buffer) -> *mut c_void {
    if send.data == recv.data && recv.count > 0 { in_place() } else { send.data.cast() }
}

/// The send argument of a collective that puts this rank's block at its place in `recv`: if the two
/// overlap, the block is moved there first.
fn send_or_moved(send: &Buffer, recv: &Buffer, rank: i32) -> *mut c_void {
    if !send.overlaps(recv) {
        return send.data.cast();
    }
    // SAFETY: `recv` holds one block of `send`'s size per rank; memmove semantics.
    unsafe { std::ptr::copy(send.data, recv.data.add(rank as usize * send.bytes()), send.bytes()) };
    in_place()
}

/// A communicator with the same ranks in the order of `key`. Every rank comes here at its first call, which
/// is collective; `made` keeps it.
fn split(comm: &Comm, made: &OnceLock<usize>, key: i32) -> Result<MPI_Comm, Cause> {
    if let Some(&made) = made.get() {
        // SAFETY: stored below.
        return Ok(unsafe { handle(made) });
    }
    // SAFETY: the handle was registered as a communicator's.
    unsafe {
        let mut new = MaybeUninit::<MPI_Comm>::uninit();
        check("MPI_Comm_split", ffi::MPI_Comm_split(handle(comm.handle), 0, key, new.as_mut_ptr()))?;
        let new = new.assume_init();
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(new, ffi::RSMPI_ERRORS_RETURN))?;
        Ok(handle(*made.get_or_init(|| handle_value(new))))
    }
}

/// The ranks in reverse order, for suffix scans.
fn reversed(comm: &Comm) -> Result<MPI_Comm, Cause> {
    split(comm, &comm.reversed, comm.size - comm.rank)
}

/// The same ranks, with messages of their own, for halo exchanges. Not a duplicate: that would have the
/// attributes of its owner's libraries too.
fn private(comm: &Comm) -> Result<MPI_Comm, Cause> {
    split(comm, &comm.private, comm.rank)
}

/// Frees what was made from a communicator that is being freed, which is as collective.
pub fn free_made(comm: &Comm) {
    // SAFETY: constants of the library.
    let for_ever = unsafe { [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] }.map(handle_value);
    if for_ever.contains(&comm.handle) {
        return; // MPI_Finalize is deleting its attributes
    }
    for made in [&comm.reversed, &comm.private].into_iter().filter_map(OnceLock::get) {
        // SAFETY: made by `split`; nothing uses it after its owner was marked as freed.
        unsafe { ffi::MPI_Comm_free(&mut handle(*made)) };
    }
}

/// Messages that travel at once.
struct Messages {
    comm: MPI_Comm,
    /// Of the receives, with the source and the bytes that are expected; then of the sends.
    receives: SmallVec<[(i32, usize); 32]>,
    requests: SmallVec<[MPI_Request; 64]>,
}

impl Messages {
    fn new(comm: &Comm) -> Result<Self, Cause> {
        Ok(Self { comm: private(comm)?, receives: SmallVec::new(), requests: SmallVec::new() })
    }

    /// Starts a message of so many bytes.
    fn start(
        &mut self,
        name: &'static str,
        bytes: usize,
        start: impl FnOnce(MPI_Comm, c_int, MPI_Datatype, *mut MPI_Request) -> c_int,
    ) -> Result<(), Cause> {
        let span = Span::new(bytes, Dtype::Uint8)?;
        let mut request = MaybeUninit::uninit();
        check(name, start(self.comm, span.count, span.datatype, request.as_mut_ptr()))?;
        // SAFETY: written by a call that succeeded.
        self.requests.push(unsafe { request.assume_init() });
        Ok(())
    }
}

impl Wire for Messages {
    unsafe fn receive(&mut self, peer: i32, tag: i32, into: *mut u8, bytes: usize) -> Result<(), Cause> {
        self.receives.push((peer, bytes));
        // SAFETY: promised by the caller.
        self.start("MPI_Irecv", bytes, |comm, n, t, request| unsafe {
            ffi::MPI_Irecv(into.cast(), n, t, peer, tag, comm, request)
        })
    }

    unsafe fn send(&mut self, peer: i32, tag: i32, from: *mut u8, bytes: usize) -> Result<(), Cause> {
        // SAFETY: promised by the caller.
        self.start("MPI_Isend", bytes, |comm, n, t, request| unsafe {
            ffi::MPI_Isend(from.cast(), n, t, peer, tag, comm, request)
        })
    }

    fn wait(&mut self) -> Result<(), Cause> {
        for (i, request) in self.requests.iter_mut().enumerate() {
            let mut status = MaybeUninit::<MPI_Status>::zeroed();
            // SAFETY: a request that is under way.
            unsafe { check("MPI_Wait", ffi::MPI_Wait(request, status.as_mut_ptr()))? };
            let Some(&(peer, bytes)) = self.receives.get(i) else { continue };
            let mut count: ffi::MPI_Count = 0;
            // SAFETY: the status of a receive of bytes.
            unsafe {
                let code = ffi::MPI_Get_elements_x(status.as_ptr(), Dtype::Uint8.mpi(), &mut count);
                check("MPI_Get_elements_x", code)?;
            }
            if count as usize != bytes {
                return Err(Cause::Ghosts { received: count as usize, source_rank: peer, expected: bytes });
            }
        }
        Ok(())
    }
}

/// What MPI says of a message that it has received.
fn finish_receive(call: &Call, status: &MPI_Status) -> Result<(), Cause> {
    if call.status != 0 {
        // SAFETY: Python keeps the MPI_Status at this address alive as long as the program.
        unsafe { (call.status as *mut MPI_Status).write(*status) };
    }
    let Some(recv) = &call.recv else { return Ok(()) };
    let mut count: c_int = 0;
    // SAFETY: `status` was filled by a receive of this type.
    unsafe { check("MPI_Get_count", ffi::MPI_Get_count(status, recv.dtype.mpi(), &mut count))? };
    let count = if count >= 0 && recv.count <= c_int::MAX as usize {
        count as usize
    } else {
        // More than an int counts.
        let mut elements: ffi::MPI_Count = 0;
        // SAFETY: as above.
        let code = unsafe { ffi::MPI_Get_elements_x(status, recv.dtype.mpi(), &mut elements) };
        check("MPI_Get_elements_x", code)?;
        elements.max(0) as usize
    };
    arrive(call, &Arrived { source: status.MPI_SOURCE, tag: status.MPI_TAG, count })
}

static TAG_LIMIT: AtomicI32 = AtomicI32::new(i32::MAX);

/// Python has asked MPI for the largest tag.
pub fn set_tag_limit(limit: i32) {
    TAG_LIMIT.store(limit, Ordering::Relaxed);
}

pub fn wildcards() -> Wildcards {
    // SAFETY: constants of the MPI shim, written once by its loader.
    unsafe {
        Wildcards {
            source: ffi::RSMPI_ANY_SOURCE,
            tag: ffi::RSMPI_ANY_TAG,
            proc_null: ffi::RSMPI_PROC_NULL,
            tag_limit: TAG_LIMIT.load(Ordering::Relaxed),
        }
    }
}

#[cold]
fn missing(what: &'static str) -> Cause {
    Cause::Buffers { what, expected: 1, actual: 0 }
}

#[inline]
fn run(call: &Call) -> Result<(), Cause> {
    let Call { site, envelope, .. } = call;
    let send = || call.send.as_ref().ok_or_else(|| missing("operand"));
    let recv = || call.recv.as_ref().ok_or_else(|| missing("result"));
    let name = site.op.mpi_name();
    let ranks = site.comm.size as usize;
    // SAFETY (for all calls below): the handle is a registered communicator's, which is not freed; the
    // buffers were checked against the operation by `Call::new`; counts and types come from `Span`.
    unsafe {
        let comm: MPI_Comm = handle(site.comm.handle);
        match site.op {
            Op::Allgather => {
                let (send, recv) = (send()?, recv()?);
                let span = Span::new(send.count, send.dtype)?;
                let from = send_or_moved(send, recv, site.comm.rank);
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Allgather(from, n, t, recv.data.cast(), n, t, comm))
            }
            Op::Allreduce => {
                let (send, recv) = (send()?, recv()?);
                let by = Reducer::new(site.reduction, send.dtype)?;
                let from = send_or_in_place(send, recv);
                by.in_pieces(recv, |at, n| {
                    let from = if from == in_place() { from } else { from.byte_add(at) };
                    check(
                        name,
                        ffi::MPI_Allreduce(from, recv.data.add(at).cast(), n, by.datatype, by.op, comm),
                    )
                })
            }
            Op::Alltoall => {
                let (send, recv) = (send()?, recv()?);
                let span = Span::new(send.count / ranks, send.dtype)?;
                let from = send_or_in_place(send, recv);
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Alltoall(from, n, t, recv.data.cast(), n, t, comm))
            }
            Op::Barrier => check(name, ffi::MPI_Barrier(comm)),
            Op::Bcast => {
                let buffer = if site.is_root() { send()? } else { recv()? };
                let span = Span::new(buffer.count, buffer.dtype)?;
                check(name, ffi::MPI_Bcast(buffer.data.cast(), span.count, span.datatype, site.root, comm))
            }
            Op::Gather => {
                let send = send()?;
                let span = Span::new(send.count, send.dtype)?;
                let (from, to) = if site.is_root() {
                    let recv = recv()?;
                    (send_or_moved(send, recv, site.comm.rank), recv.data)
                } else {
                    (send.data.cast(), std::ptr::null_mut())
                };
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Gather(from, n, t, to.cast(), n, t, site.root, comm))
            }
            Op::HaloExchange => {
                let halo = site.halo.as_ref().ok_or_else(|| missing("halo"))?;
                halo.exchange(call, site.comm.rank, &mut Messages::new(site.comm)?)
            }
            Op::Recv => {
                let recv = recv()?;
                let span = Span::new(recv.count, recv.dtype)?;
                let mut status = MaybeUninit::<MPI_Status>::zeroed();
                let (n, t) = (span.count, span.datatype);
                let Envelope { source, recvtag, .. } = *envelope;
                let code = ffi::MPI_Recv(recv.data.cast(), n, t, source, recvtag, comm, status.as_mut_ptr());
                check(name, code)?;
                finish_receive(call, status.assume_init_ref())
            }
            Op::Reduce => {
                let send = send()?;
                let by = Reducer::new(site.reduction, send.dtype)?;
                let (from, to) = if site.is_root() {
                    let recv = recv()?;
                    (send_or_in_place(send, recv), recv.data)
                } else {
                    (send.data.cast(), std::ptr::null_mut())
                };
                by.in_pieces(send, |at, n| {
                    let from = if from == in_place() { from } else { from.byte_add(at) };
                    let to = if to.is_null() { to } else { to.add(at) };
                    check(name, ffi::MPI_Reduce(from, to.cast(), n, by.datatype, by.op, site.root, comm))
                })
            }
            Op::Scan => {
                let (send, recv) = (send()?, recv()?);
                let by = Reducer::new(site.reduction, send.dtype)?;
                let from = send_or_in_place(send, recv);
                let comm = if site.reverse { reversed(site.comm)? } else { comm };
                by.in_pieces(recv, |at, n| {
                    let from = if from == in_place() { from } else { from.byte_add(at) };
                    check(name, ffi::MPI_Scan(from, recv.data.add(at).cast(), n, by.datatype, by.op, comm))
                })
            }
            Op::Scatter => {
                let recv = recv()?;
                let span = Span::new(recv.count, recv.dtype)?;
                let (n, t) = (span.count, span.datatype);
                let from = if site.is_root() { send()?.data } else { std::ptr::null_mut() };
                let aliased = site.is_root() && send()?.overlaps(recv);
                let to = if aliased { in_place() } else { recv.data.cast() };
                check(name, ffi::MPI_Scatter(from.cast(), n, t, to, n, t, site.root, comm))?;
                if aliased {
                    // The root's own block was left in its place.
                    std::ptr::copy(from.add(site.root as usize * recv.bytes()), recv.data, recv.bytes());
                }
                Ok(())
            }
            Op::Send => {
                let send = send()?;
                let span = Span::new(send.count, send.dtype)?;
                let (n, t) = (span.count, span.datatype);
                check(name, ffi::MPI_Send(send.data.cast(), n, t, envelope.dest, envelope.sendtag, comm))
            }
            Op::Sendrecv => {
                let (send, recv) = (send()?, recv()?);
                let (out, into) = (Span::new(send.count, send.dtype)?, Span::new(recv.count, recv.dtype)?);
                // MPI forbids that the two share memory, and they may differ in size.
                let copy =
                    send.overlaps(recv).then(|| std::slice::from_raw_parts(send.data, send.bytes()).to_vec());
                let from = copy.as_ref().map_or(send.data.cast_const(), |copy| copy.as_ptr());
                let mut status = MaybeUninit::<MPI_Status>::zeroed();
                let code = ffi::MPI_Sendrecv(
                    from.cast(),
                    out.count,
                    out.datatype,
                    envelope.dest,
                    envelope.sendtag,
                    recv.data.cast(),
                    into.count,
                    into.datatype,
                    envelope.source,
                    envelope.recvtag,
                    comm,
                    status.as_mut_ptr(),
                );
                check(name, code)?;
                finish_receive(call, status.assume_init_ref())
            }
        }
    }
}

/// Makes a communicator return error codes if it would otherwise end the job without a word from us. A
/// handler that its owner chose is left alone.
///
/// # Safety
/// `comm` is the handle of a live communicator, MPI is initialised.
pub unsafe fn prepare_comm(comm: usize) -> Result<(), Error> {
    // SAFETY: promised by the caller.
    unsafe {
        let comm: MPI_Comm = handle(comm);
        let mut current = MaybeUninit::uninit();
        check("MPI_Comm_get_errhandler", ffi::MPI_Comm_get_errhandler(comm, current.as_mut_ptr()))?;
        let mut current = current.assume_init();
        let fatal = current == ffi::RSMPI_ERRORS_ARE_FATAL;
        check("MPI_Errhandler_free", ffi::MPI_Errhandler_free(&mut current))?;
        if fatal {
            check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
        }
    }
    Ok(())
}

/// Prints a fatal error and ends the job: the other ranks wait for this one.
#[cold]
pub fn abort(comm: &Comm, code: i32, why: &str) -> ! {
    let code = if code == 0 { 1 } else { code };
    let mut stderr = std::io::stderr().lock();
    // One write, so that ranks that fail together do not mix their lines.
    let _ = stderr.write_all(format!("r{} | {why}\n", comm.rank).as_bytes());
    let _ = stderr.flush();
    // SAFETY: the handle is a registered communicator's.
    unsafe { ffi::MPI_Abort(handle(comm.handle), code) };
    std::process::abort()
}

/// The MPI that this library was built for and runs with.
#[derive(Debug)]
pub struct MpiInfo {
    pub vendor: String,
    pub version: String,
    pub library_version: String,
    pub thread_level: &'static str,
    /// Whether it takes pointers to the memory of a GPU.
    pub cuda_aware: &'static str,
    pub sizeof_comm: usize,
    pub sizeof_datatype: usize,
    pub sizeof_op: usize,
    pub sizeof_status: usize,
}

pub fn info() -> Result<MpiInfo, Error> {
    let mut version = [0 as c_char; 8192 + 1];
    let mut length = 0;
    let mut level = 0;
    // SAFETY: the buffer holds MPI_MAX_LIBRARY_VERSION_STRING of any MPI (256 to 8192) and a nul; the
    // strings are constants of our shim; both functions may be called at any time, except that the thread
    // level is asked for between MPI_Init and MPI_Finalize.
    unsafe {
        check("MPI_Get_library_version", ffi::MPI_Get_library_version(version.as_mut_ptr(), &mut length))?;
        let (mut initialized, mut finalized) = (0, 0);
        check("MPI_Initialized", ffi::MPI_Initialized(&mut initialized))?;
        check("MPI_Finalized", ffi::MPI_Finalized(&mut finalized))?;
        let thread_level = if initialized == 0 || finalized != 0 {
            "none"
        } else {
            check("MPI_Query_thread", ffi::MPI_Query_thread(&mut level))?;
            let levels = [
                (ffi::RSMPI_THREAD_SINGLE, "single"),
                (ffi::RSMPI_THREAD_FUNNELED, "funneled"),
                (ffi::RSMPI_THREAD_SERIALIZED, "serialized"),
                (ffi::RSMPI_THREAD_MULTIPLE, "multiple"),
            ];
            levels.iter().find(|(value, _)| *value == level).map_or("unknown", |(_, name)| name)
        };
        let cuda_aware = match thread_level {
            "none" => "unknown",
            _ => match cuda_support() {
                CudaSupport::Yes => "yes",
                CudaSupport::No => "no",
                CudaSupport::Unknown => "unknown",
            },
        };
        let string = |text| CStr::from_ptr(text).to_string_lossy().trim().to_owned();
        Ok(MpiInfo {
            vendor: string(mpi4jax_vendor),
            version: string(mpi4jax_version),
            library_version: string(version.as_ptr()),
            thread_level,
            cuda_aware,
            sizeof_comm: size_of::<MPI_Comm>(),
            sizeof_datatype: size_of::<MPI_Datatype>(),
            sizeof_op: size_of::<MPI_Op>(),
            sizeof_status: size_of::<MPI_Status>(),
        })
    }
}

/// Whether the MPI library takes pointers to the memory of a GPU, as far as it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaSupport {
    Yes,
    No,
    /// It has no `MPIX_Query_cuda_support`.
    Unknown,
}

/// MPICH can tell only after `MPI_Init`.
pub fn cuda_support() -> CudaSupport {
    // SAFETY: takes nothing, and is absent-safe (see the shim).
    match unsafe { mpi4jax_query_cuda_support() } {
        0 => CudaSupport::No,
        1 => CudaSupport::Yes,
        _ => CudaSupport::Unknown,
    }
}
