"""Batches of element products: every step once, bounded, and costs that add up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aero_compile.runtime.kernels.kernel import Kernel
from aero_compile.runtime.kernels.prepared_squares import PreparedSquares
from aero_compile.runtime.kernels.triple_elements import BatchedElements
from aero_compile.runtime.kernels.whole_numbers import WholeNumbers
from aero_compile.runtime.offline import batches as module
from aero_compile.runtime.offline.batches import Batch, batches
from aero_compile.runtime.program_parts import KernelStep, Step
from aero_compile.runtime.roles import SERVER
from tests.support.budgets import few


def _step(kernel: Kernel, *shapes: tuple[int, ...]) -> KernelStep:
    return KernelStep("op", "here", kernel, shapes, ("in",), ("out",), ())


def _steps(kinds: list[tuple[int, int]]) -> list[Any]:
    made = (
        lambda size: _step(PreparedSquares(), (size,)),
        lambda size: _step(BatchedElements(True), (size, 1), (size,)),
        lambda size: _step(BatchedElements(False, 1), (size, 1), (size,)),
        lambda size: _step(WholeNumbers(18), (size,)),
        lambda size: Step("op", "here", "code", (), (), ()),
    )
    return [made[kind](size) for kind, size in kinds]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=20), st.integers(1, 60))
@few(max_examples=60)
def test_every_step_with_triples_is_in_one_batch(kinds: list[tuple[int, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST", most)
        found = batches(_steps(kinds))
    for crossed, of_kind in ((True, (0, 1)), (False, (2,))):
        mine = [batch for batch in found if batch.crossed is crossed]
        wanted = [(at, size) for at, (kind, size) in enumerate(kinds) if kind in of_kind]
        assert [pair for batch in mine for pair in zip(batch.steps, batch.sizes, strict=True)] == wanted
        assert all(batch.size <= most or len(batch.steps) == 1 for batch in mine)
        for first, second in pairwise(mine):
            assert first.size + second.sizes[0] > most, "no more of them than needed"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(0, 10**9), st.integers(0, 99))
@few(max_examples=60)
def test_what_a_batch_cost_is_divided_among_its_steps(sizes: list[int], sent: int, messages: int) -> None:
    batch = Batch(True, tuple(range(len(sizes))), tuple(sizes))
    whole = {"op": "op", "seconds": 2.5, "send_bytes": sent, "send_actions": messages, "records": 1, "kinds": [{}]}
    rows = batch.divided([{**whole, "at": at} for at in batch.steps])
    assert [row["at"] for row in rows] == list(batch.steps)
    assert sum(row["send_bytes"] for row in rows) == sent
    assert sum(row["seconds"] for row in rows) == pytest.approx(2.5)
    for row, size in zip(rows, sizes, strict=True):
        assert abs(row["send_bytes"] - sent * size / batch.size) <= 1
        assert type(row["send_bytes"]) is int
    assert [row["send_actions"] for row in rows] == [messages, *[0] * (len(sizes) - 1)]
    assert [len(row["kinds"]) for row in rows] == [1, *[0] * (len(sizes) - 1)]


def test_few_elements_take_stored_triples() -> None:
    assert Batch(True, (0,), (3499,)).owners == (None, None)
    assert Batch(True, (0, 1), (3499, 1)).owners == (SERVER, None)
    assert Batch(False, (0,), (10**6,)).owners == (None, None)
