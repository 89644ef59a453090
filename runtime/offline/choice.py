"""The cheaper way to prepare products with a matrix of the server: SPU's product for each run, or by the batch."""

from __future__ import annotations

from collections.abc import Mapping

from aero_compile.runtime.costs import ciphertexts
from aero_compile.runtime.costs.prices import price, second_bytes
from aero_compile.runtime.costs.table import shipped
from aero_compile.runtime.kernels.column_encryption import ROWS
from aero_compile.runtime.offline.batch import Matrix

BATCHED = "BatchedProduct"
"""Name of a batch in the table of costs."""


def is_cheaper(matrix: Matrix, runs: Mapping[int, int]) -> bool:
    """True if batches for these runs, numbers of them by their rows, cost less than SPU's products for them.

    Costs are bytes, and seconds as bytes. Both parties decide alike, by the table that comes with the package.
    """
    rows = sum(count * times for count, times in runs.items())
    products = sum(times * product_price(matrix, count) for count, times in runs.items())
    return -(-rows // ROWS) * batch_price(matrix) < products


def product_price(matrix: Matrix, rows: int) -> float:
    """The bytes of SPU's product of so many rows with a matrix, and its seconds as bytes."""
    dims = ciphertexts.tiles(rows, matrix.inner, matrix.columns)
    return sum(price(ciphertexts.matmul(*each)) for each in dims)


def batch_price(matrix: Matrix) -> float:
    """The bytes of one batch, both ways, and its seconds as bytes."""
    return sum(matrix.sent) + batch_seconds(matrix) * second_bytes()


def batch_seconds(matrix: Matrix) -> float:
    """The seconds of one batch: a word of the columns that are encrypted and answered, and a multiplication, each."""
    call, word, multiplication = shipped().share_kernels[BATCHED]
    words, multiplications = matrix.work
    return call + word * words + multiplication * multiplications
