//! How MPI reduces: by itself, or by calling us back.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use mpi::ffi::{self, MPI_Datatype, MPI_Op};

use super::span::count_limit;
use crate::call::{PreparedReduction, Site};
use crate::error::Cause;
use crate::mpilib::{check, handle, handle_value, in_place};
use crate::ops::{self, Buffer, Builtin, Class, Dtype, Reduction};

/// Whether MPI calls us back to reduce, with pointers that the processor has to reach.
pub fn is_ours(builtin: Builtin, dtype: Dtype) -> bool {
    match (builtin, dtype.class()) {
        (Builtin::Minloc | Builtin::Maxloc, _) => true,
        // MPI leaves open what becomes of NaN, zeros of both signs, and denormals.
        (Builtin::Max | Builtin::Min, Class::Float | Class::Half) => true,
        (Builtin::Sum | Builtin::Prod, Class::Half) => true,
        // Open MPI's saturate.
        (Builtin::Sum | Builtin::Prod, Class::Integer) => dtype.size() <= 2,
        _ => false,
    }
}

/// Whether an item is two elements, a value and an index.
fn has_pairs(builtin: Builtin) -> bool {
    matches!(builtin, Builtin::Minloc | Builtin::Maxloc)
}

/// How MPI is to reduce.
pub struct Reducer {
    pub datatype: MPI_Datatype,
    pub op: MPI_Op,
    /// Elements in one item of `datatype`.
    width: usize,
}

impl Reducer {
    /// The reducer of a site, whose operands have this type. Found at its first run.
    #[inline(always)]
    pub fn of(site: &Site, dtype: Dtype) -> Result<Self, Cause> {
        match site.reducer.get() {
            // SAFETY: handles of `new`.
            Some(it) if it.of == dtype => {
                Ok(unsafe { Self { datatype: handle(it.datatype), op: handle(it.op), width: it.width } })
            }
            _ => Self::prepare(site, dtype),
        }
    }

    #[cold]
    fn prepare(site: &Site, dtype: Dtype) -> Result<Self, Cause> {
        let new = Self::new(site.reduction, dtype)?;
        let (datatype, op) = (handle_value(new.datatype), handle_value(new.op));
        let _ = site.reducer.set(PreparedReduction { of: dtype, datatype, op, width: new.width });
        Ok(new)
    }

    fn new(reduction: Option<Reduction>, dtype: Dtype) -> Result<Self, Cause> {
        let builtin = match reduction {
            None => return Err(Cause::Reduction { expected: true }),
            // SAFETY: registered as the handle of an MPI_Op.
            Some(Reduction::User(user)) => {
                return Ok(Self { datatype: dtype.mpi(), op: unsafe { handle(user.handle) }, width: 1 });
            }
            Some(Reduction::Builtin(builtin)) => builtin,
        };
        if !builtin.allows(dtype) {
            return Err(Cause::UndefinedReduction { reduction: builtin.name(), dtype: dtype.name() });
        }
        if is_ours(builtin, dtype) { Self::ours(builtin, dtype) } else { Self::native(builtin, dtype) }
    }

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

    /// A reduction of `ops::combine`.
    fn ours(builtin: Builtin, dtype: Dtype) -> Result<Self, Cause> {
        let (datatype, op) = Self::known(builtin, dtype)?;
        let width = if has_pairs(builtin) { 2 } else { 1 };
        // SAFETY: handles of `make`, which are never freed.
        Ok(unsafe { Self { datatype: handle(datatype), op: handle(op), width } })
    }

    /// The type and the operation of one, made known to MPI when it is first needed.
    fn known(builtin: Builtin, dtype: Dtype) -> Result<(usize, usize), Cause> {
        static KNOWN: [[OnceLock<(usize, usize)>; Builtin::ALL.len()]; Dtype::ALL.len()] =
            [const { [const { OnceLock::new() }; Builtin::ALL.len()] }; Dtype::ALL.len()];

        let slot = &KNOWN[dtype as usize][builtin as usize];
        if let Some(&known) = slot.get() {
            return Ok(known);
        }
        let made = Self::make(builtin, dtype)?;
        // Of two threads that come here, one forgets what it has made.
        Ok(*slot.get_or_init(|| made))
    }

    #[cold]
    fn make(builtin: Builtin, dtype: Dtype) -> Result<(usize, usize), Cause> {
        let function = ops::combine(builtin, dtype)
            .ok_or_else(|| Cause::UndefinedReduction { reduction: builtin.name(), dtype: dtype.name() })?;
        let mut item = dtype.mpi();
        // SAFETY: a `Combine` is an MPI_User_function, but for the type of the argument that it ignores.
        unsafe {
            let function = std::mem::transmute::<ops::Combine, UserFunction>(function);
            let mut op = MaybeUninit::<MPI_Op>::uninit();
            check("MPI_Op_create", ffi::MPI_Op_create(Some(function), 1, op.as_mut_ptr()))?;
            if has_pairs(builtin) {
                check("MPI_Type_contiguous", ffi::MPI_Type_contiguous(2, dtype.mpi(), &mut item))?;
                check("MPI_Type_commit", ffi::MPI_Type_commit(&mut item))?;
            }
            Ok((handle_value(item), handle_value(op.assume_init())))
        }
    }

    /// Whether [`Self::in_pieces`] makes one piece of so much.
    #[inline]
    pub fn takes_whole(&self, buffer: &Buffer) -> bool {
        buffer.count() / self.width <= count_limit()
    }

    /// So many elements for each rank, in items.
    pub fn items(&self, elements: &[u64]) -> Result<Box<[c_int]>, Cause> {
        let items = |&count: &u64| match count.is_multiple_of(self.width as u64) {
            true => Ok((count as usize / self.width) as c_int),
            false => Err(Cause::Pairs { count: count as usize }),
        };
        elements.iter().map(items).collect()
    }

    /// Calls `step(from, to, items)` for pieces of at most the count limit: reductions act item by item, and MPI's
    /// predefined ones take no derived types. `from` may be `MPI_IN_PLACE`, `to` null.
    ///
    /// # Safety
    /// Both hold as much as `buffer`, where they are places.
    #[inline(always)]
    pub unsafe fn in_pieces(
        &self,
        buffer: &Buffer,
        (from, to): (*mut c_void, *mut u8),
        mut step: impl FnMut(*mut c_void, *mut c_void, c_int) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        if self.width == 1 && buffer.count() <= count_limit() {
            return step(from, to.cast(), buffer.count() as c_int);
        }
        // SAFETY: promised by the caller.
        unsafe { self.in_several(buffer, (from, to), &mut step) }
    }

    /// See `in_pieces`.
    #[inline(never)]
    unsafe fn in_several(
        &self,
        buffer: &Buffer,
        (from, to): (*mut c_void, *mut u8),
        step: &mut dyn FnMut(*mut c_void, *mut c_void, c_int) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let limit = count_limit();
        if !buffer.count().is_multiple_of(self.width) {
            return Err(Cause::Pairs { count: buffer.count() });
        }
        let items = buffer.count() / self.width;
        let mut start = 0;
        // At least once, so that ranks with nothing to reduce take part.
        loop {
            let count = limit.min(items - start);
            let at = start * self.width * buffer.dtype().size();
            // SAFETY: promised by the caller.
            let (from, to) = unsafe {
                let from = if from == in_place() { from } else { from.byte_add(at) };
                (from, if to.is_null() { to } else { to.add(at) })
            };
            step(from, to.cast(), count as c_int)?;
            start += count;
            if start >= items {
                return Ok(());
            }
        }
    }
}

type UserFunction = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut MPI_Datatype);
