"""The configuration that the compiler and both parties use."""

from __future__ import annotations

import pytest

from aero_compile.runtime.spu_config import runtime_config

pytest.importorskip("spu")


def test_answers_of_products_keep_their_margin() -> None:
    """With the option one ciphertext in 10⁶ is garbage (docs/inference.md): too rare for a test to wait for."""
    assert not runtime_config("cheetah", 64, 18).cheetah_2pc_config.enable_mul_lsb_error
