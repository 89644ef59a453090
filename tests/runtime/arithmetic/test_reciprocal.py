"""1/S for the sums of a softmax: how far off, for any number of entries, and that it is cheaper than SPU's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from aero_compile.runtime.arithmetic.reciprocal import LEAST_SUM, RECIPROCAL_ERROR, reciprocal_of_sums
from tests.runtime.two_parties import bytes_of, in_two_parties

pytest.importorskip("jax")


def sums(most: int) -> npt.NDArray[np.float64]:
    """From the least to the largest, powers of two and their neighbours among them."""
    powers = 2.0 ** np.arange(most.bit_length())
    near = np.concatenate([powers * (1 + shift) for shift in (-1e-4, 0, 1e-4)])
    values = np.concatenate([np.geomspace(LEAST_SUM + 0.005, 1.01 * most, 400), near[near <= most]])
    return np.asarray(values[None])


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 31, 32, 33, 1000, 1024])
def test_in_exact_arithmetic(most: int) -> None:
    import jax

    x = sums(most)
    with jax.experimental.enable_x64():  # type: ignore[no-untyped-call, unused-ignore]
        found = np.asarray(reciprocal_of_sums(jax.numpy.asarray(x), most))
    assert np.abs(found * x - 1).max() < RECIPROCAL_ERROR / 3


@pytest.mark.parametrize("protocol", ["semi2k", "cheetah"])
@pytest.mark.parametrize("most", [1, 2, 33, 128])
def test_in_spu(most: int, protocol: str) -> None:
    pytest.importorskip("spu")
    x = sums(most)
    error = np.abs(in_two_parties(lambda v: reciprocal_of_sums(v, most), x, protocol) - 1 / x)
    assert (error <= RECIPROCAL_ERROR / x + 2.0**-17).all()


@pytest.mark.parametrize("rows", [128, 1536])
def test_is_cheaper_than_the_general_one(rows: int) -> None:
    pytest.importorskip("spu")
    assert bytes_of(lambda x: reciprocal_of_sums(x, 128), 1, rows) < 0.65 * bytes_of(lambda x: 1 / x, 1, rows)
