"""A network that carries two megabytes a second, for jobs of Open MPI on one host."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

# TCP carries messages by writev; it is called again with the rest.
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST = 40000, PAUSE = 20000 };

ssize_t writev(int file, const struct iovec *parts, int count) {
    static ssize_t (*next)(int, const struct iovec *, int);
    if (!next)
        next = (ssize_t (*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    for (int i = 0; i < count; i++)
        if (parts[i].iov_len > MOST) {
            struct iovec part = {parts[i].iov_base, MOST};
            if (i > 0)
                return next(file, parts, i);
            usleep(PAUSE);
            return next(file, &part, 1);
        }
    return next(file, parts, count);
}
"""


@functools.cache
def library() -> Path | None:
    """The file of the library that is preloaded; None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    file = Path(tempfile.mkdtemp()) / "libslow.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file), "-ldl"]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return file


def environment(preloaded: str = "") -> dict[str, str]:
    """Variables of a job whose messages take that way. Skips the test without a compiler."""
    if library() is None:
        pytest.skip("there is no C compiler")
    return {
        "LD_PRELOAD": f"{library()} {preloaded}".strip(),
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
    }
