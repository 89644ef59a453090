"""What a program can tell of the rows of attention beside its results: entropies, and how far their scores spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, fx

from aero_compile.entropy import attention_entropy
from aero_compile.ir.attention_weights import attention_weights, row_shares
from aero_compile.score_spread import score_spread

Measure = Literal["entropies", "spreads"]
Measures = tuple[Measure, ...]


def measures_of(entropies: bool, spreads: bool) -> Measures:
    """What is asked for, in the order in which programs give it."""
    asked: dict[Measure, bool] = {"entropies": entropies, "spreads": spreads}
    return tuple(measure for measure, wanted in asked.items() if wanted)


def by_measure(measures: Measures, results: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Results of a program, all layers of one measure behind those of the other, by its name."""
    layers = len(results) // max(1, len(measures))
    return {measure: tuple(results[i * layers : (i + 1) * layers]) for i, measure in enumerate(measures)}


def measured(graph: fx.Graph, softmax: fx.Node, measure: Measure, static: bool = False) -> fx.Node:
    """The node that measures the rows `[…]` of `softmax`, a node of `graph`.

    Spreads are those of the scores that a private run takes exponentials of: 0 for attention weights that are no
    softmax, and for `static` ones, whose scores depend on no token.
    """
    if measure == "entropies":
        weights = softmax
        if softmax.target is attention_weights:  # their rows do not sum to one
            weights = graph.call_function(row_shares, (softmax,))
        return graph.call_function(attention_entropy, (weights,))
    if static or softmax.target is attention_weights:
        return graph.call_function(_zeros_by_row, (softmax,))
    return graph.call_function(score_spread, (softmax.args[0],))


def _zeros_by_row(probs: Tensor) -> Tensor:
    return probs.new_zeros(probs.shape[:-1])
