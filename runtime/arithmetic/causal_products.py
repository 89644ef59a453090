"""Products of the rows of a text with the cached rows up to their own number, for all rows at once.

Half of such a product is never read. A strip of rows needs the cached rows up to its own end alone, so several strips
exchange less than one; each waits for the one before, and leaves its last ciphertexts emptier.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.matrix_products import SHARES, batched_product, heads_at_once, joined_price
from aero_compile.runtime.costs.prices import cached_by_worth
from aero_compile.runtime.lazy_jax import jnp

MOST_STRIPS = 4
"""More exchange little less."""


def products_before(left: Any, right: Any, keys: bool) -> Any:
    """Integers left [heads, T, repeats, inner] times right [heads, T, width], both secret, rows up to their own number.

    Args:
        left: rows of queries, whose inner size is the width, or of weights, whose inner size is T; of these, what lies
            after the own number counts as zero.
        right: the cached rows.
        keys: True for queries.

    Returns:
        [heads, T·repeats, T] for queries, in which what lies after the own number means nothing, and
        [heads, T·repeats, width] for weights.
    """
    heads, count, repeats, _ = left.shape
    if not keys:
        left = jnp().where(np.tri(count, dtype=bool)[:, None], left, 0)
    found = []
    for begin, end in _bounds(count, causal_strips(heads, count, repeats, right.shape[2], keys)):
        rows, before = left[:, begin:end], right[:, :end]
        if keys:
            made = batched_product(_flat(rows), jnp().swapaxes(before, 1, 2))
            made = jnp().pad(made, ((0, 0), (0, 0), (0, count - end))) if end < count else made
        else:
            made = batched_product(_flat(rows[..., :end]), before)
        found.append(made)
    return found[0] if len(found) == 1 else jnp().concatenate(found, axis=1)


@cached_by_worth
def causal_strips(heads: int, count: int, repeats: int, width: int, keys: bool) -> int:
    """Return into how many strips of rows a product is best cut."""

    def price(strips: int) -> float:
        total = 0.0
        for begin, end in _bounds(count, strips):
            sizes = (heads, (end - begin) * repeats, *((width, end) if keys else (end, width)))
            total += joined_price(*sizes, heads_at_once(*sizes, SHARES), SHARES)
        return total

    return min(range(1, min(MOST_STRIPS, count) + 1), key=price)


def _bounds(count: int, strips: int) -> list[tuple[int, int]]:
    """First row of each strip, and the one after its last."""
    ends = [count * at // strips for at in range(strips + 1)]
    return list(pairwise(ends))


def _flat(rows: Any) -> Any:
    heads, count, repeats, inner = rows.shape
    return rows.reshape((heads, count * repeats, inner))
