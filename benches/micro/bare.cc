// What XLA's part of an operation costs: handlers that only call MPI_Allreduce on COMM_WORLD. See bare.py.

#include <mpi.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error allreduce(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
    MPI_Allreduce(x.untyped_data(), y->untyped_data(), (int)x.element_count(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return ffi::Error::Success();
}

static ffi::Error nothing(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(bare_allreduce, allreduce,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(bare_nothing, nothing,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
