"""The cheaper way to prepare products with a matrix of the server: SPU's product for each run, or by the batch."""

from __future__ import annotations

from aero_compile.runtime.arithmetic import ciphertexts
from aero_compile.runtime.arithmetic.prices import price, second_bytes
from aero_compile.runtime.costs.table import shipped
from aero_compile.runtime.kernels.column_encryption import ROWS
from aero_compile.runtime.offline.batch import Matrix

BATCHED = "BatchedProduct"
"""Name of a batch in the table of costs."""


def is_cheaper(matrix: Matrix, rows: int, runs: int) -> bool:
    """True if batches for `runs` runs of so many `rows` each cost less than SPU's products for them.

    Costs are bytes, and seconds as bytes. Both parties decide alike, by the table that comes with the package.
    """
    products = sum(price(ciphertexts.matmul(*dims)) for dims in ciphertexts.tiles(rows, matrix.inner, matrix.columns))
    return -(-rows * runs // ROWS) * batch_price(matrix) < runs * products


def batch_price(matrix: Matrix) -> float:
    """The bytes of one batch, both ways, and its seconds as bytes."""
    return sum(matrix.sent) + batch_seconds(matrix) * second_bytes()


def batch_seconds(matrix: Matrix) -> float:
    """The seconds of one batch: a word of the columns that are encrypted and answered, and a multiplication, each."""
    call, word, multiplication = shipped().share_kernels[BATCHED]
    words, multiplications = matrix.work
    return call + word * words + multiplication * multiplications
