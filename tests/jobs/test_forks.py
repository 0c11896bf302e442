"""What stands for a rank has the files that its launcher opened for it (tests/forks)."""

import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "forks" / "client.py"

# A POSIX shell knows descriptors of one digit only. The server's own have the same numbers.
NUMBERS = range(3, 10)
OPEN_THEM = "".join(f"exec {n}>&1; " for n in NUMBERS) + 'exec "$@"'
PROGRAM = f"""
import gc, os
gc.collect()
for number in {list(NUMBERS)}: os.write(number, str(number).encode())
"""


def test_descriptors_stay_open(fork_server):
    client = [sys.executable, "-I", "-S", CLIENT, fork_server, "-c", PROGRAM]
    result = subprocess.run(
        ["sh", "-c", OPEN_THEM, "sh", *client], capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("3456789", "")
