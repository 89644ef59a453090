"""Products by the batch, between two parties: shares add up, whatever fails is refused, and nothing is used twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aero_compile.errors import PartyError
from aero_compile.runtime.kernels.column_encryption import LARGEST_NORM, PACKED, ROWS, Weights, multiplied
from aero_compile.runtime.kernels.share_words import Words
from aero_compile.runtime.kernels.triples import PreparedProduct, TripleProduct
from aero_compile.runtime.offline import batch as module
from aero_compile.runtime.offline.batch import KEY_SENT, Batches, Matrix, matrix_of, rows_by_matrix, rows_of
from aero_compile.runtime.program.parts import KernelStep
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.kernel_sides import Pair, side_of

Weight = Callable[[Matrix], Weights]


def step(inner: int, columns: int, rows: tuple[int, ...] = (2, 3), name: str = "w", transposed: bool = False) -> Any:
    shape = (columns, inner) if transposed else (inner, columns)
    kernel = PreparedProduct(inner, transposed)
    return KernelStep("linear", "here", kernel, ((*rows, inner), shape), ("x", name), ("y",), (), preparation="p")


def weights_of(matrix: Matrix, bits: int = 16) -> Weights:
    draw = np.random.default_rng(matrix.inner)
    return draw.integers(-(2**bits), 2**bits, size=(matrix.inner, matrix.columns), dtype=np.int64)


def parties(folder: Path, pair: Pair, weight: Weight = weights_of) -> list[Batches]:
    def none(matrix: Matrix) -> Weights:
        raise AssertionError("the client has no weights")

    return [Batches(side_of(rank, pair), folder, 18, weight if rank == SERVER else none) for rank in (SERVER, CLIENT)]


def make(both: list[Batches], matrix: Matrix) -> None:
    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(each.make, matrix) for each in both]:
            run.result(timeout=60)


def off(rows: list[dict[str, Words] | None], matrix: Matrix) -> int:
    server, client = rows
    assert server is not None
    assert client is not None
    random = client["random"].reshape(-1, matrix.inner)
    found = (server["product"] + client["product"]).reshape(-1, matrix.columns)
    return int(np.abs((found - random @ weights_of(matrix).astype(np.uint64)).view(np.int64)).max())


@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (3, 130), (130, 3), (65, 1030), (64, 64)])
def test_shares_add_up_for_any_matrix(tmp_path: Path, inner: int, columns: int) -> None:
    """Sizes below, at and above those of blocks."""
    both, some = parties(tmp_path, Pair()), step(inner, columns)
    matrix = matrix_of(some)
    assert matrix == Matrix("w", False, inner, columns)
    make(both, matrix)
    for _ in range(3):
        taken = [each.take(some) for each in both]
        assert off(taken, matrix) < 2**13
        assert {*(taken[SERVER] or ())} == {"product"}, "R is the client's alone"


def test_one_batch_serves_programs_of_any_length(tmp_path: Path) -> None:
    """A forward and a token take rows of the same matrix; when they are used up there are none, at either party."""
    both = parties(tmp_path, Pair())
    text, token = step(5, 7, (1, 3000)), step(5, 7, (1, 1))
    matrix = matrix_of(text)
    assert matrix is not None
    make(both, matrix)
    assert off([each.take(text) for each in both], matrix) < 2**13
    assert off([each.take(token) for each in both], matrix) < 2**13
    assert [each.take(text) for each in both] == [None, None], "1,095 rows are left"
    assert {each.left(matrix) for each in both} == {ROWS - 3001}
    make(both, matrix)
    assert off([each.take(text) for each in both], matrix) < 2**13, "of two batches"


def test_matrices_do_not_share_rows_and_a_key_serves_them_all(tmp_path: Path) -> None:
    pair = Pair()
    both, one, other = parties(tmp_path, pair), step(4, 6), step(4, 6, name="v")
    for some in (one, other):
        matrix = matrix_of(some)
        assert matrix is not None
        make(both, matrix)
    for some in (one, other):
        matrix = matrix_of(some)
        assert matrix is not None
        assert off([each.take(some) for each in both], matrix) < 2**13
    sizes = [len(content) for content in pair.sent[CLIENT]]
    assert sizes.count(KEY_SENT) == 1, "the key is sent once"


def test_a_transposed_matrix_is_multiplied_as_it_is_read(tmp_path: Path) -> None:
    matrix = matrix_of(step(4, 6, transposed=True))
    assert matrix == Matrix("w", True, 4, 6)


def test_what_is_sent_is_what_the_bill_says(tmp_path: Path) -> None:
    pair, matrix = Pair(), Matrix("w", False, 70, 1100)
    make(parties(tmp_path, pair), matrix)
    server, client = matrix.sent
    assert sum(map(len, pair.sent[SERVER])) == server
    assert sum(map(len, pair.sent[CLIENT])) == client + KEY_SENT
    assert (len(pair.sent[SERVER]), len(pair.sent[CLIENT]) - 1) == matrix.messages


def test_a_matrix_that_is_too_large_is_left_to_spu(tmp_path: Path) -> None:
    some = step(3, 2)
    matrix = matrix_of(some)
    assert matrix is not None
    both = parties(tmp_path, Pair(), lambda matrix: np.full((3, 2), int(LARGEST_NORM), np.int64))
    make(both, matrix)
    assert [each.take(some) for each in both] == [None, None]


def test_steps_of_other_kinds_take_no_rows(tmp_path: Path) -> None:
    kernel = TripleProduct(2, 3, 4)
    other = KernelStep("matmul", "here", kernel, ((2, 3), (3, 4)), ("x", "y"), ("z",), (), preparation="p")
    assert matrix_of(other) is None
    assert parties(tmp_path, Pair())[0].take(other) is None


def test_rows_of_a_program_are_counted_by_matrix() -> None:
    class Program:
        steps = (step(4, 6, (1, 8)), step(4, 6, (1, 8), "v"), step(4, 6, (1, 2)))

    program: Any = Program
    assert [rows_of(each) for each in program.steps] == [8, 8, 2]
    assert rows_by_matrix(program) == {Matrix("w", False, 4, 6): 10, Matrix("v", False, 4, 6): 8}


class _Altered(Pair):
    """A link on which messages of one sender are altered on the way."""

    def __init__(self, sender: int, alter: Callable[[int, bytes], bytes | None]) -> None:
        super().__init__()
        self._sender, self._alter, self._count = sender, alter, 0
        self._late: list[bytes] = []

    def send_async(self, to: int, content: bytes) -> None:
        if 1 - to != self._sender:
            return super().send_async(to, content)
        self._count += 1
        altered = self._alter(self._count, content)
        if altered is None:
            self._late.append(content)
            return None
        super().send_async(to, altered)
        while self._late:
            super().send_async(to, self._late.pop())
        return None


def _fails(tmp_path: Path, link: Pair, matrix: Matrix, why: str) -> None:
    both = parties(tmp_path, link)

    def run(each: Batches) -> None:
        try:
            each.make(matrix)
        finally:
            link.end()

    with ThreadPoolExecutor(2) as pool:
        errors = [run.exception(timeout=60) for run in [pool.submit(run, each) for each in both]]
    assert any(isinstance(error, PartyError) and re.search(why, str(error)) for error in errors)
    assert min(each.left(matrix) for each in both) == 0, "what was interrupted adds no rows"


@pytest.mark.parametrize("sender", [SERVER, CLIENT])
def test_a_message_that_is_cut_off_is_refused(tmp_path: Path, sender: int) -> None:
    link = _Altered(sender, lambda count, content: content[:-8] if len(content) > 4000 else content)
    _fails(tmp_path, link, Matrix("w", False, 3, 2), "bytes for words of shape")


def test_answers_that_are_swapped_are_refused(tmp_path: Path) -> None:
    """The first of two blocks of columns of equal size comes after the second."""
    link = _Altered(SERVER, lambda count, content: None if count == 2 else content)
    _fails(tmp_path, link, Matrix("w", False, 3, 128), "answered with column 64 instead of 0")


def test_a_client_that_asks_for_another_block_is_refused(tmp_path: Path) -> None:
    def other(count: int, content: bytes) -> bytes:
        return (7).to_bytes(8, "little") if len(content) == 8 else content

    _fails(tmp_path, _Altered(CLIENT, other), Matrix("w", False, 3, 2), "did not ask for block 0")


def test_blocks_bound_what_is_worked_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(weights: Weights, limbs: Any, width: int) -> Words:
        seen.append(weights.shape[1])
        return multiplied(weights, limbs, width)

    monkeypatch.setattr(module, "multiplied", noted)
    pair = Pair()
    make(parties(tmp_path, pair), Matrix("w", False, 2, 2100))
    assert seen == [1024, 1024, 52]
    assert max(map(len, (*pair.sent[SERVER], *pair.sent[CLIENT]))) <= 64 * 8 * 2 * ROWS + 8
    assert PACKED < 2 * ROWS
