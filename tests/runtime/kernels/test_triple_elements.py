"""Products of elements by triples: exact for any words, and what is sent is hidden by A and B."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aero_compile.runtime.costs.building_blocks import Session
from aero_compile.runtime.costs.table import CostTable
from aero_compile.runtime.kernels.triples import TripleElements
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.kernel_sides import run_both, split


@pytest.mark.parametrize(("rows", "width"), [((1,), 1), ((3, 5), 1), ((2, 1, 7), 9), ((1,), 70)])
def test_the_shares_add_up_to_the_product_of_any_words(rows: tuple[int, ...], width: int) -> None:
    draw = np.random.default_rng(0)
    x, a = (draw.integers(2**64, size=(*rows, width), dtype=np.uint64) for _ in range(2))
    y, b = (draw.integers(2**64, size=rows, dtype=np.uint64) for _ in range(2))
    pieces = [split(each.ravel(), draw) for each in (x, y, a, b, a * b[..., None])]
    held = [[piece[rank] for piece in pieces] for rank in (SERVER, CLIENT)]
    server, client = (dict(zip(("left", "right", "product"), each[2:], strict=True)) for each in held)
    kernel, wanted = TripleElements(False, width), (x * y[..., None]).ravel()
    found, pair = run_both(kernel, (held[SERVER][:2], held[CLIENT][:2]), (server, client))
    np.testing.assert_array_equal(found[SERVER][0] + found[CLIENT][0], wanted)
    np.testing.assert_array_equal(kernel.together(draw, x, y)[0], wanted)
    for rank in (SERVER, CLIENT):
        (sent,) = pair.sent[rank]
        hidden = np.concatenate([held[rank][0] - held[rank][2], held[rank][1] - held[rank][3]])
        np.testing.assert_array_equal(np.frombuffer(sent, np.uint64), hidden)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1, 70)])
def test_what_one_party_each_knows_takes_half(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(1)
    x, y, a, b = (draw.integers(2**64, size=shape, dtype=np.uint64) for _ in range(4))
    products, none = split((a * b).ravel(), draw), np.zeros(shape, np.uint64)
    server, client = {"left": a.ravel(), "product": products[SERVER]}, {"right": b.ravel(), "product": products[CLIENT]}
    found, pair = run_both(TripleElements(True), ([x, none], [none, y]), (server, client))
    np.testing.assert_array_equal(found[SERVER][0] + found[CLIENT][0], (x * y).ravel())
    for rank, hidden in ((SERVER, x - a), (CLIENT, y - b)):
        (sent,) = pair.sent[rank]
        assert sent == hidden.tobytes()


@pytest.mark.parametrize(("kernel", "words"), [(TripleElements(True), 21), (TripleElements(False, 5), 6 * 21)])
def test_what_is_sent_is_what_is_billed(kernel: TripleElements, words: int) -> None:
    session = Session(CostTable.load())
    kernel.bill(session, (3, 7, kernel.width), (3, 7))
    spent = session.bill()
    assert (spent.server_bytes, spent.client_bytes, spent.messages) == (8.0 * words, 8.0 * words, 2)


@pytest.mark.parametrize("shapes", [((3, 7), (7, 3)), ((3, 7),), ((3, 7), (3, 7)), ((3, 4), (3,)), ((), ())])
def test_other_shapes_are_refused(shapes: Any) -> None:
    with pytest.raises(ValueError, match="TripleElements takes"):
        TripleElements(False, 5).results(*shapes)


@pytest.mark.parametrize("options", [(1, 1), (False, 0), (False, True), (True, 2)])
def test_other_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="TripleElements"):
        TripleElements(*options).check()
