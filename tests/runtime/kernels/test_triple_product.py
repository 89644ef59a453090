"""A product of two secret matrices by a matrix triple: exact, and what is sent is hidden by A and B."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aero_compile.runtime.costs.building_blocks import Session
from aero_compile.runtime.costs.table import CostTable
from aero_compile.runtime.kernels.triples import TripleProduct
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.kernel_sides import run_both, split


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 7, 3), (1, 1, 1), (33, 64, 33), (2, 130, 1)])
def test_the_shares_add_up_to_the_product_of_any_words(
    lead: tuple[int, ...], rows: int, inner: int, columns: int
) -> None:
    draw = np.random.default_rng(inner)
    sizes = (*lead, rows, inner), (*lead, inner, columns)
    x, y, a, b = (draw.integers(2**64, size=size, dtype=np.uint64) for size in sizes * 2)
    values, randoms = [split(x, draw), split(y, draw)], [split(a, draw), split(b, draw)]
    products = split((a @ b).ravel(), draw)
    server, client = (
        {"left": randoms[0][rank].ravel(), "right": randoms[1][rank].ravel(), "product": products[rank]}
        for rank in (SERVER, CLIENT)
    )
    kernel, (mine, theirs) = TripleProduct(rows, inner, columns), zip(*values, strict=True)
    found, pair = run_both(kernel, (list(mine), list(theirs)), (server, client))

    np.testing.assert_array_equal(found[SERVER][0] + found[CLIENT][0], (x @ y).ravel())
    np.testing.assert_array_equal(kernel.together(draw, x.ravel(), y.ravel())[0], (x @ y).ravel())
    assert kernel.results(*sizes)[0].shape == (*lead, rows, columns)
    for rank in (SERVER, CLIENT):
        (sent,) = pair.sent[rank]
        hidden = [values[at][rank] - randoms[at][rank] for at in (0, 1)]
        np.testing.assert_array_equal(np.frombuffer(sent, np.uint64), np.concatenate([h.ravel() for h in hidden]))


def test_what_is_sent_is_what_is_billed() -> None:
    session = Session(CostTable.load())
    TripleProduct(3, 7, 5).bill(session, (2, 3, 7), (2, 7, 5))
    spent = session.bill()
    assert (spent.server_bytes, spent.client_bytes, spent.messages) == (8.0 * 112, 8.0 * 112, 2)


@pytest.mark.parametrize("shapes", [((3, 7), (5, 7)), ((3, 7),), ((1, 3, 7), (7, 5)), ((2, 3, 7), (1, 7, 5)), ((), ())])
def test_other_shapes_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="TripleProduct takes"):
        TripleProduct(3, 7, 5).results(*shapes)


@pytest.mark.parametrize("options", [(0, 1, 1), (1, -1, 1), (1, 1, True), (1, 1.0, 1)])
def test_other_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="options"):
        TripleProduct(*options).check()
