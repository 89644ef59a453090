"""Make every expression over weights one weight: `aero_compile.ir.fold_weights`, as an inference pass.

Before → after (V, g, α, W parameters):
    linear(x, V·g/‖V‖)  → linear(x, W')
    linear(x, W/σ(W))   → linear(x, W')
    (1/α)·y             → a·y
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aero_compile.graph_pass import GraphPass, PassResult
from aero_compile.ir.fold_weights import fold_in_place
from aero_compile.model import TransformedModel


@dataclass(frozen=True)
class FoldExpressions(GraphPass):
    """Replace what is computed from weights alone by its value, computed in float64 and rounded once."""

    name: ClassVar[str] = "fold-expressions"
    preserves_numerics: ClassVar[bool] = True
    for_inference: ClassVar[bool] = True

    def call(self, model: TransformedModel) -> PassResult:
        count = fold_in_place(model, in_double=True)
        done = (f"{count} expressions over weights became weights",) if count else ()
        return PassResult(model, bool(count), done)
