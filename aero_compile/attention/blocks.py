"""Attention in blocks of query rows, whose scores the backward pass computes again unless they are few.

What is held is one block of scores, `[…, rows, keys]`, and gradients of keys and values: memory grows with T, not T².
Dropout draws block by block: other numbers than over the whole matrix, and the same ones for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aero_compile.attention.block_graph import Block
from aero_compile.attention.plain import fused
from aero_compile.attention.regions import Axes
from aero_compile.attention.row_measures import Measures

BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
"""Scores of a block, about."""

_FEWEST, _MOST = 16, 256
"""Rows of a block."""

KEPT = 2**21
"""Scores of a layer that are held for the backward pass, if one block has all: so few cost less memory than time."""


@dataclass(frozen=True)
class Plain:
    """Causal attention without anything else: where among the inputs q, kᵀ and v are, and the factor of the scores.

    `longest`: up to how many positions that is known.
    """

    query: int
    key: int
    value: int
    scale: float
    longest: int


@dataclass(frozen=True)
class Plan:
    """How one region is computed.

    Attributes:
        block: its function of a block of rows.
        axes: of its inputs.
        query, key: which inputs tell how many rows and keys there are.
        result: the dimension of the weighted sum that runs over queries.
        measures: what is measured of the rows.
        causal: whether no row sees keys behind its own, so that blocks need no more.
        plain: the fused form, if there is one.
    """

    block: Block
    axes: tuple[Axes, ...]
    query: int
    key: int
    result: int
    measures: Measures
    causal: bool
    plain: Plain | None


def attention_function(plan: Plan) -> Callable[..., tuple[Tensor, ...]]:
    """The function (*inputs, *dropouts) → (weighted sum, each measure of the rows) that a program calls."""

    def attention(*values: Any) -> tuple[Tensor, ...]:
        inputs, dropouts = values[: len(plan.axes)], values[len(plan.axes) :]
        drawn = any(module.training and module.p > 0 for module in dropouts)
        plain = None if "spreads" in plan.measures else plan.plain
        if plain is not None and not drawn and inputs[plain.query].shape[-2] <= plain.longest:
            q, k, v = inputs[plain.query], inputs[plain.key].transpose(-2, -1), inputs[plain.value]
            return fused(q, k, v, plain.scale, "entropies" in plan.measures)
        return _by_blocks(plan, inputs, dropouts, drawn)

    return attention


def _by_blocks(plan: Plan, inputs: Sequence[Any], dropouts: Sequence[nn.Module], drawn: bool) -> tuple[Tensor, ...]:
    query, key = inputs[plan.query], inputs[plan.key]
    rows, keys = query.shape[_dim(plan.axes[plan.query].rows)], key.shape[_dim(plan.axes[plan.key].keys)]
    of_row = query.numel() // (rows * query.shape[-1]) * keys
    size = max(_FEWEST, min(_MOST, BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS["cuda"]) // of_row))
    held = size >= rows and rows * of_row <= KEPT
    found = []
    for first in range(0, rows, size):
        count = min(size, rows - first)
        seen = first + count if plan.causal and rows == keys else keys
        cut = [_cut(value, axes, first, count, seen) for value, axes in zip(inputs, plan.axes, strict=True)]
        arguments = (first, count, seen, *cut, *dropouts)
        if torch.is_grad_enabled() and not held:
            found.append(checkpoint(plan.block, *arguments, use_reentrant=False, preserve_rng_state=drawn))
        else:
            found.append(plan.block(*arguments))
    dims = (plan.result, *(-1 for _ in plan.measures))
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), dims, strict=True))


def _cut(value: Any, axes: Axes, first: int, count: int, seen: int) -> Any:
    """The part of an input that a block needs."""
    if axes.rows is not None:
        value = value.narrow(axes.rows, first, count)
    return value if axes.keys is None else value.narrow(axes.keys, 0, seen)


def _dim(dim: int | None) -> int:
    assert dim is not None
    return dim
