"""Threads of a C library, which sleep in one way or another, or compute, and call Python back."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = r"""
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

typedef void (*callback)(void);
struct job { callback f; int seconds; int how; };

static void *run(void *argument) {
    struct job job = *(struct job *)argument;
    struct timespec end;
    struct itimerspec timer = {{0, 0}, {job.seconds, 0}};
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += job.seconds;
    if (job.how == 0) {
        pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
        pthread_mutex_lock(&mutex);
        while (pthread_cond_timedwait(&condition, &mutex, &end) == 0) {}
        pthread_mutex_unlock(&mutex);
    } else if (job.how == 1) {
        int set = epoll_create1(0), file = timerfd_create(CLOCK_MONOTONIC, 0);
        struct epoll_event event = {.events = EPOLLIN};
        timerfd_settime(file, 0, &timer, 0);
        epoll_ctl(set, EPOLL_CTL_ADD, file, &event);
        epoll_wait(set, &event, 1, -1);
    } else if (job.how == 2) {
        poll(0, 0, 1000 * job.seconds);
    } else if (job.how == 3) {
        sem_t semaphore;
        sem_init(&semaphore, 0, 0);
        while (sem_timedwait(&semaphore, &end) == 0) {}
    } else if (job.how == 4) {
        struct timespec now;
        do clock_gettime(CLOCK_REALTIME, &now); while (now.tv_sec < end.tv_sec);
    } else {
        sleep(job.seconds);
    }
    job.f();
    return 0;
}

void call_later(callback f, int seconds, int how) {
    struct job *job = malloc(sizeof *job);
    pthread_t thread;
    *job = (struct job){f, seconds, how};
    pthread_create(&thread, 0, run, job);
}
"""
WAYS = ("condition", "epoll", "poll", "semaphore", "compute", "sleep")

# `call_later(f, seconds, how)` has a thread of the library call `f`; `LIBRARY` is its file.
PRELUDE = """\
import ctypes
kept = []
def call_later(f, seconds, how):
    kept.append(ctypes.CFUNCTYPE(None)(f))
    ctypes.CDLL(LIBRARY).call_later(kept[-1], seconds, how)
"""


@functools.cache
def library() -> Path | None:
    """The file of the library; None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    file = Path(tempfile.mkdtemp()) / "libcallslater.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-x", "c", "-", "-o", str(file)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return file


def prelude() -> str:
    """What a program begins with. Skips the test where there is no compiler."""
    if library() is None:
        pytest.skip("there is no C compiler")
    return f"LIBRARY = {str(library())!r}\n{PRELUDE}"
