"""The cheaper way to prepare products: by the batch for many rows, by SPU's product for few."""

from __future__ import annotations

import pytest

from aero_compile.runtime.kernels.column_encryption import ROWS
from aero_compile.runtime.offline.batch import Matrix
from aero_compile.runtime.offline.choice import batch_price, is_cheaper, product_price

SQUARE = Matrix("w", False, 768, 768)


def test_a_batch_is_for_many_rows() -> None:
    assert is_cheaper(SQUARE, {128: 32})
    assert is_cheaper(SQUARE, {1: 400}), "a product for one row costs nearly what one for a hundred does"
    assert not is_cheaper(SQUARE, {128: 1})
    assert not is_cheaper(SQUARE, {1: 1})
    assert not is_cheaper(SQUARE, {})
    assert not is_cheaper(SQUARE, {128: 0})


@pytest.mark.parametrize("matrix", [SQUARE, Matrix("head", True, 768, 50257), Matrix("up", False, 768, 3072)])
def test_the_choice_changes_once(matrix: Matrix) -> None:
    """Up to some number of runs SPU's products, from there to a whole batch the batch."""
    chosen = [is_cheaper(matrix, {128: runs}) for runs in range(1, 33)]
    assert chosen == sorted(chosen)
    assert chosen[-1]


def test_rows_beyond_a_batch_take_another() -> None:
    full, more = {ROWS: 1}, {ROWS + 1: 1}
    assert is_cheaper(SQUARE, full)
    prices = [product_price(SQUARE, rows) for rows in (ROWS, ROWS + 1)]
    assert is_cheaper(SQUARE, more) == (2 * batch_price(SQUARE) < prices[1])
