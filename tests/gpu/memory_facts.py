"""How the memory that JAX allocates on a GPU can be shared by processes.

With one rank it prints what the driver says of an array. With two, rank 1 maps the array of rank 0
through a file descriptor, and copies from it. Uses no function of mpi4jax.
"""

import ctypes
import os
import sys
import time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import jax
import jax.numpy as jnp
from mpi4py import MPI

if jax.default_backend() != "gpu":
    sys.exit(77)
cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None, use_errno=True)
comm, n = MPI.COMM_WORLD, 64 << 20
x = jax.block_until_ready(jnp.full(n // 4, comm.rank + 1, jnp.float32))
pointer = x.unsafe_buffer_pointer()

# CUpointer_attribute of cuda.h.
LEGACY_IPC, RANGE_START, RANGE_SIZE, HANDLE_TYPES, RDMA = 10, 11, 12, 14, 15
FILE_DESCRIPTOR = 1  # of CUmemAllocationHandleType
PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls


class Access(ctypes.Structure):
    """CUmemAccessDesc: a device, and that it may read and write."""

    _fields_ = (("kind", c_int), ("device", c_int), ("flags", c_int))


def check(name, *arguments):
    if code := getattr(cuda, name)(*arguments):
        print(f"| {name}: error {code}", flush=True)
    return code


def attribute(which, kind=c_int):
    value = kind()
    code = cuda.cuPointerGetAttribute(byref(value), which, c_uint64(pointer))
    return value.value if code == 0 else f"error {code}"


device, context = c_int(), c_void_p()
check("cuInit", 0)
check("cuDeviceGet", byref(device), 0)
check("cuDevicePrimaryCtxRetain", byref(context), device)
check("cuCtxSetCurrent", context)
facts = {
    "JAX": jax.__version__,
    "legacy IPC": attribute(LEGACY_IPC),
    "types of handles": attribute(HANDLE_TYPES, c_uint64),
    "RDMA": attribute(RDMA),
    "cuIpcGetMemHandle": cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), c_uint64(pointer)),
}
print(f"| rank {comm.rank}: {facts}", flush=True)
start, length = attribute(RANGE_START, c_uint64), attribute(RANGE_SIZE, c_size_t)
handle, file = c_uint64(), c_int(-1)
exported = not check("cuMemRetainAllocationHandle", byref(handle), c_void_p(start)) and not check(
    "cuMemExportToShareableHandle", byref(file), handle, FILE_DESCRIPTOR, c_uint64(0)
)
theirs = comm.bcast((os.getpid(), file.value, length, pointer - start) if exported else None)
if comm.rank == 1 and theirs:
    pid, their_file, length, offset = theirs
    file = libc.syscall(PIDFD_GETFD, libc.syscall(PIDFD_OPEN, pid, 0), their_file, 0)
    if file < 0:
        print("| the file descriptor cannot be taken:", os.strerror(ctypes.get_errno()))
    imported, place, access = c_uint64(), c_uint64(), Access(1, device.value, 3)
    size = c_size_t(length)
    steps = (
        ("cuMemImportFromShareableHandle", byref(imported), c_void_p(file), FILE_DESCRIPTOR),
        ("cuMemAddressReserve", byref(place), size, c_size_t(0), c_uint64(0), c_uint64(0)),
    )
    if file >= 0 and not any(check(*step) for step in steps):
        check("cuMemMap", place, size, c_size_t(0), imported, c_uint64(0))
        check("cuMemSetAccess", place, size, byref(access), c_size_t(1))
        source, times = c_uint64(place.value + offset), 20
        began = time.perf_counter()
        for _ in range(times):
            check("cuMemcpyDtoD_v2", c_uint64(pointer), source, c_size_t(n))
        cuda.cuCtxSynchronize()
        rate = n * times / (time.perf_counter() - began) / 1e9
        print(f"| copied from rank 0: {rate:.0f} GB/s, its value {float(x[0])}, expected 1.0")
comm.Barrier()
