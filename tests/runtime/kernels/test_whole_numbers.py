"""Numbers called whole: the same words at each party, and the same product once it is scaled down."""

from __future__ import annotations

import numpy as np
import pytest

from aero_compile.runtime.kernels.local_kernels import WholeNumbers
from aero_compile.runtime.roles import CLIENT, SERVER


def test_a_party_hands_on_its_own_share() -> None:
    share = np.random.default_rng(0).integers(0, 2**64, 6, np.uint64)
    for rank in (SERVER, CLIENT):
        (found,) = WholeNumbers(18).of_share(rank, share)
        np.testing.assert_array_equal(found, share)
    (result,) = WholeNumbers(18).results((2, 3))
    assert (result.shape, result.dtype, result.owner) == ((2, 3), "int32", None)


def test_in_the_clear_it_is_the_number_of_units() -> None:
    jnp = pytest.importorskip("jax.numpy")
    (found,) = WholeNumbers(10).plain(jnp.asarray([0.0, 1.0, -2.5, 2.0**-10]))
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1024, -2560, 1]


def test_other_arguments_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="one argument"):
        WholeNumbers(18).results((2,), (2,))
    for bits in (0, 29, 18.0, True):
        with pytest.raises(ValueError, match="fraction bits"):
            WholeNumbers(bits).check()  # type: ignore[arg-type]
