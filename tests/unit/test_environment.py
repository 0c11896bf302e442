"""Environment variables: all are checked at import, and empty is unset."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpi4jax._job import job, settings, watch

PAGE = Path(__file__).parents[2] / "docs" / "environment.md"


def test_the_page_lists_all_variables():
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall("MPI4JAX_[A-Z_]+", line.split("|")[1])}
    assert {n for n in named if not n.startswith("MPI4JAX_BUILD_")} == set(settings.RULES)


@pytest.mark.parametrize("name", settings.RULES)
def test_empty_is_unset(name, monkeypatch):
    for value in ("", "  "):
        monkeypatch.setenv(name, value)
        assert settings.check(name) == ""
        assert not settings.switch(name)
    settings.check_all()
    assert watch.seconds("MPI4JAX_TIMEOUT") == math.inf
    assert watch.seconds("MPI4JAX_REPORT_AFTER", 30.0) == 30
    monkeypatch.setenv("MPI4JAX_REPORT_AFTER", "0")
    assert watch.seconds("MPI4JAX_REPORT_AFTER", 30.0) == math.inf


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MPI4JAX_ABORT", "maybe", "one of 0, false, off, no, 1, true, on, yes"),
        ("MPI4JAX_CHECK", "x", "one of samples, 0"),
        ("MPI4JAX_DEADLOCK_AFTER", "-1", "a number of seconds, 0 to never abort"),
        ("MPI4JAX_DEBUG", "2", "one of 0"),
        ("MPI4JAX_NOTOKEN", "token", "one of 0"),
        ("MPI4JAX_ON_TIMEOUT", "end", "one of abort, continue"),
        ("MPI4JAX_REPORT_AFTER", "soon", "a number of seconds, 0 for no lines"),
        ("MPI4JAX_TIMEOUT", "inf", "a number of seconds, 0 for no timeout"),
        ("MPI4JAX_TIMEOUT", "-1", "a number of seconds"),
        ("MPI4JAX_USE_HIP_MPI", "y", "one of 0, 1"),
    ],
)
def test_wrong_values_are_refused(name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {words}")) as error:
        settings.check_all()
    assert repr(value) in str(error.value)


def test_a_timeline_that_cannot_be_written_is_an_error_of_the_import(tmp_path):
    (tmp_path / "trace.0.json").mkdir()
    environment = {**os.environ, "MPI4JAX_TRACE": str(tmp_path / "trace.json")}
    command = [sys.executable, "-c", "import mpi4jax"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "environment variable MPI4JAX_TRACE must be a file that can be written, got" in last
    assert f"{tmp_path}/trace.0.json: Is a directory" in last


@pytest.mark.parametrize(
    ("value", "is_on"), [("1", True), ("On", True), ("no", False), ("0", False)]
)
def test_a_switch_is_on_or_off_in_any_word(value, is_on, monkeypatch):
    monkeypatch.setenv("MPI4JAX_NOTOKEN", value)
    assert settings.switch("MPI4JAX_NOTOKEN") is is_on


def test_a_variable_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("MPI4JAX_TIME_OUT", "60")
    monkeypatch.setenv("MPI4JAX_BUILD_MPI", "mpich")
    words = [line for line in settings.check_all() if "TIME_OUT" in line or "BUILD" in line]
    expected = "environment variable MPI4JAX_TIME_OUT means nothing to mpi4jax"
    assert words == [f"{expected}: did you mean MPI4JAX_TIMEOUT?"]


def test_what_must_be_equal_is_equal_where_it_means_the_same(monkeypatch):
    names = ("MPI4JAX_CHECK", "MPI4JAX_TRANSPORT", "MPI4JAX_USE_CUDA_MPI", "MPI4JAX_WAIT")

    def meanings(**values: str) -> dict[str, str]:
        for name in names:
            monkeypatch.setenv(name, values.get(name, ""))
        return {name: meaning for name, meaning, _ in watch.shared_settings()}

    unset = meanings()
    assert set(unset) <= set(names)
    assert unset == meanings(MPI4JAX_WAIT="poll") != meanings(MPI4JAX_WAIT="sleep")
    assert meanings(MPI4JAX_WAIT="SLEEP") == meanings(MPI4JAX_WAIT="sleep")
    for value in ("samples", "0"):
        assert meanings(MPI4JAX_CHECK=value) == unset
    for value in ("mpi", "staged", "cuda-mpi"):
        assert meanings(MPI4JAX_TRANSPORT=value) == unset, "their messages meet"
    for value in ("0", "1"):
        assert meanings(MPI4JAX_USE_CUDA_MPI=value) == unset
    for value in ("1", "Yes"):
        assert meanings(MPI4JAX_CHECK=value)["MPI4JAX_CHECK"] == "1"
    for value in ("auto", "ucx", "nccl"):
        assert meanings(MPI4JAX_TRANSPORT=value)["MPI4JAX_TRANSPORT"] == value
    assert ("MPI4JAX_TRANSPORT", "nccl", "nccl") in watch.shared_settings(), "as it was written"


@pytest.mark.parametrize(
    ("env", "size", "words"),
    [
        ({}, 1, ""),
        ({"SLURM_NTASKS": "3"}, 1, "3 ranks (SLURM_NTASKS), but MPI has 1 rank:"),
        ({"SLURM_NTASKS": "3", "SLURM_PROCID": "1"}, 1, ""),  # rank 0 says it
        ({"SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}, 1, ""),  # a batch script
        ({"SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, 1, "3 ranks"),
        ({"SLURM_NTASKS": "3"}, 3, ""),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 2, "4 ranks (PMI_SIZE), but MPI has 2 ranks:"),
        ({"FLUX_JOB_SIZE": "2"}, 1, "2 ranks (FLUX_JOB_SIZE)"),
        ({"PALS_LOCAL_SIZE": "2"}, 1, "2 ranks (PALS_LOCAL_SIZE)"),
    ],
)
def test_a_launcher_that_has_started_more_ranks(env, size, words, monkeypatch):
    for name in {*sum(job._LAUNCHED, ()), "SLURM_JOB_ID", "SLURM_STEP_ID"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = job.missing_ranks(size)
    assert words in found
    assert bool(words) == bool(found)
