"""Products whose secret work is done before the tokens are known.

A product of two secrets opens both factors, less random words, 16 bytes each both ways; a square one of them; a product
of what one party each knows 8 bytes by each; a number for a whole row is opened once. What was prepared in SPU costs
what SPU's own product would: 143 bytes for a square or of two owned factors, 221 of two shares. So forms of functions
are chosen by the bytes of both phases together, as in one phase, where they differ by the secret work alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ring import truncated
from aero_compile.runtime.arithmetic.row_products import OWNED_BYTES, SHARED_BYTES, scaling_price
from aero_compile.runtime.arithmetic.row_squares import square_strips
from aero_compile.runtime.costs.prices import element_seconds, second_bytes
from aero_compile.runtime.kernels.kernel import call_kernel
from aero_compile.runtime.kernels.opened_rows import ScaledRows, SquaredRows
from aero_compile.runtime.kernels.prepared_squares import PreparedSquares
from aero_compile.runtime.kernels.triples import BatchedElements, TripleElements


def product_of_owned(servers: Any, clients: Any, by: int | None = None) -> Any:
    """`servers` times `clients`, two JAX arrays of one shape that only the server and only the client know.

    `by`: as of `truncated`.
    """
    (found,) = call_kernel(BatchedElements(True), servers[..., None], clients)
    return truncated(found.reshape(clients.shape), by)


def product_of_rows(x: Any, numbers: Any) -> Any:
    """Rows of x [R, w] times `numbers` [R], both secret."""
    kind = TripleElements if scales_by_matrices(*x.shape) else BatchedElements
    (found,) = call_kernel(kind(False, x.shape[1]), x, numbers)
    return truncated(found)


def product_of_elements(x: Any, y: Any) -> Any:
    """x · y for two JAX arrays of floats of one shape, both secret."""
    (found,) = call_kernel(BatchedElements(False), x.reshape((*x.shape, 1)), y)
    return truncated(found.reshape(y.shape))


def square_of_elements(x: Any) -> Any:
    """x² for a JAX array of floats."""
    (found,) = call_kernel(PreparedSquares(), x)
    return truncated(found)


def squared_rows(x: Any, gain: float) -> tuple[Any, Any]:
    """gain · Σ x² of each row of a secret [R, w]: [R], |Σ x²| < 2^(62 - 2f); and x as `scaled_opened` takes it.

    One product does for a small `gain`, of which steps on shares hold as many bits as of a large one.
    """
    by_matrices = square_strips(*x.shape)[1] < _price(x.size, OWNED_BYTES, "product_one_way")
    sums, opened = call_kernel(SquaredRows(x.shape[1], by_matrices), x)
    return truncated(sums) * np.float32(gain), opened


def scaled_opened(opened: Any, numbers: Any, doublings: int = 0) -> Any:
    """Rows that `squared_rows` has opened [R, w], times secret `numbers` [R] and 2^`doublings`."""
    kernel = ScaledRows(opened.shape[1], scales_by_matrices(*opened.shape))
    (found,) = call_kernel(kernel, numbers, opened)
    for _ in range(doublings):  # before the truncation: nothing is lost
        found = found + found
    return truncated(found)


def scales_by_matrices(rows: int, width: int, owned: bool = False) -> bool:
    """True if random rows [rows, width] times one number each are cheaper prepared by matrices.

    `owned`: the numbers are the server's, and the rows the client's.
    """
    sent, rate = (OWNED_BYTES, "product_one_way") if owned else (SHARED_BYTES, "product_both_ways_2")
    return scaling_price(rows, width, owned) < _price(rows * width, sent, rate)


def _price(size: int, sent: int, rate: str) -> float:
    """The price in bytes of `size` products of elements in a batch, whose ciphertexts other kernels fill."""
    return size * (sent + element_seconds(rate) * second_bytes())
