"""What starts the jobs of the tests looks at other processes, which end while it looks."""

import os

import mpirun


def test_a_process_that_has_ended_meanwhile(monkeypatch):
    here = os.listdir("/proc")
    ended = "4194305"  # above the largest process number of Linux
    monkeypatch.setattr(mpirun.os, "listdir", lambda path: [*here, ended])
    assert ended in [process.name for process in mpirun.processes()]
    assert os.getpid() in mpirun._job(os.getppid())


def test_a_system_without_proc(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(mpirun.os, "listdir", missing)
    assert mpirun.processes() == []
