"""Which ops a block holds: one row for ops that stand in the same places."""

from __future__ import annotations

from typing import Any

import torch

from aero_compile.ir.ops import CHOICES, NORMS, SCALES, SPLITS, SUMS, VIEWS, of_form

aten = torch.ops.aten

BRANCH_OPS = SCALES | of_form("negation")
POWERS = of_form("power")
BOUNDS = frozenset({aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default})
PARTS = of_form("part", "slice", "select")

_ROWS: tuple[tuple[frozenset[Any], bool, bool, bool], ...] = (
    # between the linear layers of an FFN, between its result and the stream, in norms and what replaces them
    (VIEWS | NORMS | SUMS | BRANCH_OPS | {aten.tanh.default}, True, True, True),
    (frozenset({aten.mean.dim}), True, False, True),
    (SPLITS | CHOICES | POWERS | PARTS, True, False, False),
    (of_form("activation", "prelu", "function", "extreme", "vector_norm", "cat"), True, False, False),
)

IN_FFNS, AFTER_BLOCKS, IN_NORMS = (frozenset().union(*(row[0] for row in _ROWS if row[place])) for place in (1, 2, 3))
