"""Whether MPI takes pointers to a GPU's memory: run as a program, because it may crash.

It sends a message from one buffer on the GPU to another, and ends with 0 if the message came.
"""

import ctypes
import os
import sys

from mpi4py import MPI


def main(count: int = 1 << 16) -> bool:
    cuda = ctypes.CDLL(os.environ.get("MPI4JAX_LIBCUDA") or "libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)

    sent = bytes(i % 251 for i in range(count))
    pointers = []
    for _ in range(2):
        pointer = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(count))
        pointers.append(pointer)
    call("cuMemcpyHtoDAsync_v2", pointers[0], sent, ctypes.c_size_t(count), None)
    call("cuStreamSynchronize", None)

    one, other = (MPI.memory.fromaddress(pointer.value, count) for pointer in pointers)
    MPI.COMM_SELF.Sendrecv([one, MPI.BYTE], 0, 0, [other, MPI.BYTE], 0, 0)

    received = ctypes.create_string_buffer(count)
    call("cuMemcpyDtoHAsync_v2", received, pointers[1], ctypes.c_size_t(count), None)
    call("cuStreamSynchronize", None)
    return received.raw == sent


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
