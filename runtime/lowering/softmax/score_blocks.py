"""Attention scores Q·Kᵀ in blocks: only those of which a mask leaves any entry are computed.

The scores are cut into strips of queries; each strip is multiplied with the keys that some query of it may look at.
Cheetah sends matrices as ciphertexts of 8192 coefficients, so small strips waste them, where heads do not fill them
together: the number of strips is that of the lowest price. A causal product of 12 heads with 64 channels stays whole up
to T = 64, and sends 25 % less at T = 128, 36 % less at T = 512. (Weights times values gain nothing: what strips save in
results they lose in values sent several times.)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.arithmetic.matrix_products import batched_product, heads_at_once, joined_price
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.operators import prepared as in_two_phases

MOST_STRIPS = 16

Strip = tuple[int, int, int, int]
"""First query, end of queries, first key, end of keys."""


def choose_strips(allowed: npt.NDArray[np.bool_], width: int, heads: int) -> tuple[Strip, ...]:
    """The cheapest strips for scores of which `allowed` [Q, K] are read, of vectors of `width` channels, of `heads`."""
    queries = allowed.shape[0]
    counts = range(1, min(MOST_STRIPS, queries) + 1)
    return min((_strips(allowed, count) for count in counts), key=lambda strips: _price(strips, width, heads))


def _strips(allowed: npt.NDArray[np.bool_], count: int) -> tuple[Strip, ...]:
    bounds = np.linspace(0, allowed.shape[0], count + 1).astype(int)
    found = []
    for first, end in pairwise(bounds):
        keys = np.flatnonzero(allowed[first:end].any(axis=0))
        if keys.size:
            found.append((int(first), int(end), int(keys[0]), int(keys[-1]) + 1))
    return tuple(found)


def _price(strips: tuple[Strip, ...], width: int, heads: int) -> float:
    sizes = [(heads, end - first, width, high - low) for first, end, low, high in strips]
    return sum(joined_price(*each, heads_at_once(*each)) for each in sizes)


def blocked_scores(queries: Any, keys: Any, strips: tuple[Strip, ...], prepared: bool = False) -> Any:
    """`queries` [..., Q, D] times `keys` [..., D, K] inside the strips, zero outside; `prepared`: in two phases."""
    multiply = in_two_phases.product if prepared else batched_product
    if len(strips) == 1 and strips[0] == (0, queries.shape[-2], 0, keys.shape[-1]):
        return multiply(queries, keys)
    made, at = [], 0
    for first, end, low, high in strips:
        block = multiply(queries[..., first:end, :], keys[..., low:high])
        before, after = (low, keys.shape[-1] - high), first - at
        padding = [(0, 0)] * (block.ndim - 2)
        made.append(jnp().pad(block, [*padding, (after, 0), before]))
        at = end
    if at < queries.shape[-2]:
        made.append(jnp().zeros((*made[0].shape[:-2], queries.shape[-2] - at, keys.shape[-1]), made[0].dtype))
    return jnp().concatenate(made, axis=-2)
