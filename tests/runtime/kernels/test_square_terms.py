"""The terms of sums of squares: right for every split of every row, and each a function of one share alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aero_compile.runtime.kernels.local_kernels import SquareTerms
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.budgets import few


@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 9))
@few(max_examples=40)
def test_terms_add_up_to_the_squares(data: st.DataObject, rows: int, width: int) -> None:
    """Against Python's integers, for splits that wrap in every way."""
    count = rows * width
    numbers = data.draw(st.lists(st.integers(-(2**31), 2**31), min_size=count, max_size=count))
    ends = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1])
    shares = data.draw(st.lists(st.integers(0, 2**64 - 1) | ends, min_size=count, max_size=count))
    theirs = np.array(shares, np.uint64)
    own = np.array([number % 2**64 for number in numbers], np.uint64) - theirs
    kernel = SquareTerms(width, 18)
    server, client = kernel.of_share(SERVER, own), kernel.of_share(CLIENT, theirs)
    x0, x1, alone = (one + other for one, other in zip(server, client, strict=True))
    products = (x0 * x1).reshape((rows, width)).sum(axis=1, dtype=np.uint64)
    wanted = [sum(each**2 for each in numbers[at * width : (at + 1) * width]) % 2**64 for at in range(rows)]
    assert (alone + products + products).tolist() == wanted


def test_a_party_holds_its_own_share_and_nothing_of_the_other() -> None:
    kernel, share = SquareTerms(3, 18), np.random.default_rng(0).integers(0, 2**64, 6, np.uint64)
    for rank, own in ((SERVER, 0), (CLIENT, 1)):
        found = kernel.of_share(rank, share)
        assert np.array_equal(found[own], share)
        assert not found[1 - own].any()
        assert [len(each) for each in found] == [6, 6, 2]
    assert [each.owner for each in kernel.results((2, 3))] == [SERVER, CLIENT, None]


def test_in_the_clear_the_sums_are_all_there_is() -> None:
    jnp = pytest.importorskip("jax.numpy")
    whole, zeros, sums = SquareTerms(2, 18).plain(jnp.asarray([[1.0, 2.0], [3.0, -4.0]]))
    assert not whole.any()
    assert not zeros.any()
    assert (sums * 2.0**-18).tolist() == [5.0, 25.0]


def test_other_arguments_and_options_are_refused() -> None:
    found = SquareTerms(3, 18).results((2, 3))
    assert [(each.shape, each.dtype) for each in found] == [((2, 3), "int32"), ((2, 3), "float32"), ((2,), "float32")]
    for shapes in (((3,),), ((1, 2, 3),), ((2, 4),), ((2, 3), (2, 3))):
        with pytest.raises(ValueError, match="takes rows"):
            SquareTerms(3, 18).results(*shapes)
    for options in ((0, 18), (True, 18), (3, 0), (3, 29), (3, 18.0), (3, True)):
        with pytest.raises(ValueError, match="SquareTerms takes"):
            SquareTerms(*options).check()
