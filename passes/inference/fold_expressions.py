"""Make every expression over weights one weight: `aero_compile.ir.fold_weights`, as an inference pass.

Before → after (V, g, α, W parameters):
    linear(x, V·g/‖V‖)  → linear(x, W')
    linear(x, W/σ(W))   → linear(x, W')
    (1/α)·y             → a·y
"""

from __future__ import annotations

from aero_compile.ir.fold_weights import fold_in_place
from aero_compile.model import TransformedModel
from aero_compile.passes.inference.change import Change


def fold_expressions(model: TransformedModel) -> Change:
    """Replace what is computed from weights alone by its value, computed in float64 and rounded once."""
    count = fold_in_place(model, in_double=True)
    done = (f"{count} expressions over weights became weights",) if count else ()
    return Change("fold-expressions", bool(count), done)
