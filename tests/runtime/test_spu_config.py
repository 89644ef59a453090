"""The configuration that the compiler and both parties use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aero_compile.runtime import spu_config
from aero_compile.runtime.spu_config import SpuLog, runtime_config

pytest.importorskip("spu")


def test_answers_of_products_keep_their_margin() -> None:
    """With the option one ciphertext in 10⁶ is garbage (docs/inference.md): too rare for a test to wait for."""
    assert not runtime_config("cheetah", 64, 18).cheetah_2pc_config.enable_mul_lsb_error


LINES = "Link details: total send bytes 3, recv bytes 5, send actions 7, recv actions 11\n"


def test_the_log_of_a_long_session_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is forgotten, and nothing that comes then is lost: SPU's own file is opened to append."""
    monkeypatch.setattr(spu_config, "MOST_LOGGED", 5 * len(LINES))
    options: list[Any] = []

    def set_up(given: Any) -> None:
        options.append(given)
        Path(given.system_log_path).touch()

    logging = SimpleNamespace(LogOptions=SimpleNamespace, setup_logging=set_up)
    log = SpuLog(SimpleNamespace(libspu=SimpleNamespace(logging=logging)), tmp_path / "spu.log")
    assert options[0].max_log_file_size > 2**40  # no other file takes its place
    sizes = []
    with (tmp_path / "spu.log").open("a") as file:
        for count in (2, 1, 4, 1, 0, 3):
            file.write(count * LINES)
            file.flush()
            assert log.read()["records"] == count
            sizes.append((tmp_path / "spu.log").stat().st_size // len(LINES))
    assert sizes == [2, 3, 0, 1, 1, 4]
