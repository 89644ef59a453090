"""Rows of a batch: each is given once, in order, and what was given is gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aero_compile.errors import PartyError
from aero_compile.runtime.kernels.column_encryption import ROWS
from aero_compile.runtime.offline.rows import Row, RowPool, empty_rows, out_of_memory


def _batch(folder: Path, number: int) -> Row:
    batch = empty_rows(folder, {"random": 2, "product": 3})
    for at, array in enumerate(batch.values()):
        array[:] = (np.arange(ROWS)[:, None] + ROWS * number) * 10 + at
    return batch


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 2 * ROWS), min_size=1, max_size=9))
def test_rows_are_given_once_and_in_order_across_batches(tmp_path: Path, counts: list[int]) -> None:
    pool = RowPool()
    batches = -(-sum(counts) // ROWS)
    for number in range(batches):
        pool.add(_batch(tmp_path, number))
    given_rows = 0
    for count in counts:
        rows = pool.take(count)
        wanted = np.arange(given_rows, given_rows + count, dtype=np.uint64) * 10
        assert (rows["random"] == wanted[:, None]).all()
        assert (rows["product"] == wanted[:, None] + 1).all()
        given_rows += count
        assert pool.left == batches * ROWS - given_rows
    with pytest.raises(ValueError, match=f"there are {pool.left} rows"):
        pool.take(pool.left + 1)


def test_rows_that_were_given_are_overwritten(tmp_path: Path) -> None:
    pool, batch = RowPool(), _batch(tmp_path, 1)
    pool.add(batch)
    kept = pool.take(5)
    assert (kept["product"] > 0).all()
    for array in batch.values():
        assert not array[:5].any()
        assert array[5:].all()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory by kind is told by Linux alone")
def test_rows_are_held_in_their_files_and_not_in_memory(tmp_path: Path) -> None:
    def in_memory() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem"))) * 1024

    before, batch = in_memory(), empty_rows(tmp_path, {"product": 1000})
    batch["product"][:] = 7
    held = in_memory()
    assert held - before > 0.9 * batch["product"].nbytes
    out_of_memory(batch)
    assert in_memory() - before < 0.1 * batch["product"].nbytes
    assert (batch["product"] == 7).all()
    pool = RowPool()
    pool.add(batch)
    pool.take(ROWS - 1)
    assert in_memory() - before < 0.1 * batch["product"].nbytes


def test_no_file_of_rows_has_a_name(tmp_path: Path) -> None:
    pool = RowPool()
    pool.add(_batch(tmp_path, 0))
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it would be a signal that ends the process, and those of other sessions."""

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PartyError, match=r"no room for 98,304 bytes of a batch's rows \(No space left"):
        empty_rows(tmp_path, {"product": 3})
