"""A prepared product with a matrix of the server: exact, and the client sends nothing but values that R hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aero_compile.runtime.costs.building_blocks import Session
from aero_compile.runtime.costs.table import CostTable
from aero_compile.runtime.kernels.triples import PreparedProduct
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.kernel_sides import run_both, split

SHAPES = [((5, 7), 3), ((2, 3, 96), 40), ((1, 1), 1), ((130,), 9), ((2, 2, 2, 5), 1)]


def any_words(draw: np.random.Generator, *shape: int) -> Any:
    return draw.integers(2**64, size=shape, dtype=np.uint64)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("shape", "columns"), SHAPES)
def test_the_shares_add_up_to_the_product_of_any_words(shape: tuple[int, ...], columns: int, transposed: bool) -> None:
    draw = np.random.default_rng(columns)
    x, random = any_words(draw, *shape), any_words(draw, *shape)
    weight = draw.integers(-(2**25), 2**25, (shape[-1], columns)).view(np.uint64)
    held = np.ascontiguousarray(weight.T) if transposed else weight
    kernel, (mine, theirs) = PreparedProduct(shape[-1], transposed), split(x, draw)
    shares = split((random.reshape(-1, shape[-1]) @ weight).ravel(), draw)
    prepared = {"product": shares[SERVER]}, {"product": shares[CLIENT], "random": random.ravel()}
    found, pair = run_both(kernel, ([mine, held], [theirs, np.zeros_like(held)]), prepared)

    wanted = (x.reshape(-1, shape[-1]) @ weight).ravel()
    np.testing.assert_array_equal(found[SERVER][0] + found[CLIENT][0], wanted)
    np.testing.assert_array_equal(kernel.together(draw, x.ravel(), held.ravel())[0], wanted)
    assert kernel.results(shape, held.shape)[0].shape == (*shape[:-1], columns)

    assert pair.sent[SERVER] == []
    (sent,) = pair.sent[CLIENT]
    np.testing.assert_array_equal(np.frombuffer(sent, np.uint64), (theirs - random).ravel())
    np.testing.assert_array_equal(found[CLIENT][0], shares[CLIENT])


def test_what_is_sent_is_what_is_billed() -> None:
    session = Session(CostTable.load())
    PreparedProduct(7, True).bill(session, (2, 3, 7), (5, 7))
    spent = session.bill()
    assert (spent.server_bytes, spent.client_bytes, spent.messages) == (0.0, 8.0 * 42, 1)


@pytest.mark.parametrize("shapes", [((3, 4), (5, 7)), ((3, 7), (7, 5)), ((3, 7),), ((3, 7), (7,)), ((), (5, 7))])
def test_other_shapes_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="PreparedProduct takes"):
        PreparedProduct(7, True).results(*shapes)


@pytest.mark.parametrize("options", [(0, True), (-1, False), (True, False), (7.0, False), (7, 1)])
def test_other_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="options"):
        PreparedProduct(*options).check()
