"""Retraining in two processes, started as `torchrun` would start them, for several command lines in a row.

Most of the seconds are imports; so one pair of processes runs all command lines that a test compares.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def in_two_processes(*command_lines: Sequence[str]) -> None:
    """Run `aero-compile retrain` with each command line, in two processes; fails with what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, json.dumps([list(line) for line in command_lines])]
    both = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(text[-4000:] for text in printed)


def _run(command_lines: Sequence[Sequence[str]]) -> int:
    from accelerate.state import AcceleratorState

    from aero_compile.retrain import main

    for line in command_lines:
        AcceleratorState._reset_state(reset_partial_state=True)  # how weights are spread is decided once a process
        code = main(["--ddp-backend", "gloo", *line])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(_run(json.loads(sys.argv[1])))
