"""The demo of private text: its model, its two processes, and what it prints."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aero_compile.errors import InputError, PartyError
from benchmarks import demo, private_demo
from benchmarks.lib.two_networks import Host

for package in ("spu", "cryptography", "pydantic"):
    pytest.importorskip(package)

SMALL = demo.Settings(layers=1, heads=2, width=8, vocabulary=300, context=16, batch=2, held_out_tokens=64)


def few(name: str) -> Any:
    """A few made-up functions instead of the whole standard library."""
    import datasets

    from aero_compile.training.data import Documents

    texts = [f"def f_{i}(x):\n    return x + {i} * sum(range({i}))\n" * 5 for i in range(40)]
    return Documents(name, datasets.Dataset.from_dict({"text": texts}))


@pytest.mark.slow
def test_the_private_text_is_that_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(private_demo, "load_text", few)
    given = ["--output-dir", str(tmp_path / "run"), "--steps", "4", "--protocol", "semi2k", "--prompt", "def f"]
    args = private_demo.parser().parse_args([*given, "--max-tokens", "3"])
    assert private_demo.run(args, SMALL) == 0
    shown = capfdbinary.readouterr().out.decode()
    assert "the same text: yes" in shown
    assert "3 generated" in shown
    assert "in all" in shown
    monkeypatch.setattr(private_demo, "trained", lambda *given: pytest.fail("it is trained already"))
    too_long = private_demo.parser().parse_args([*given, "--max-tokens", "30"])
    with pytest.raises(InputError, match="1 to 16 fit"):
        private_demo.run(too_long, SMALL)


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(PartyError, match="there is no folder nowhere"),
        private_demo.serving(Host("127.0.0.1"), "nowhere", "--insecure-plain"),
    ):
        pass


INTERRUPTED = """
import signal, sys
from benchmarks import private_demo
from benchmarks.lib.two_networks import Host
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
sys.executable = sys.argv[1]
private_demo.chat(Host("127.0.0.1"))
"""


def test_an_interrupt_ends_the_client_too(tmp_path: Path, root: Path) -> None:
    """With a client that says its number and waits."""
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    waits.chmod(0o700)
    command = [sys.executable, "-c", INTERRUPTED, str(waits)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        client = int(demo.stdout.readline())
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=20)
    assert b"KeyboardInterrupt" in said
    assert not Path(f"/proc/{client}").exists()
