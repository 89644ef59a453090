"""Compute once what a model computes twice: `w[..., 40:]` taken twice is one value.

Before → after:
    f(x), …, f(x)  → one f(x), for every op that draws no random numbers and is neither a norm nor a softmax

Analyses follow values by the node that makes them: a gate that is cut out twice would look like two. It runs after the
norms were recognized: two norms of one value share their statistics, and stay two.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from aero_compile.frontend.factors import group_factors
from aero_compile.frontend.recognize import recognize
from aero_compile.ir.dataflow import draws, live_values
from aero_compile.ir.ops import NORMS, SOFTMAXES
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel


def recognize_merged(model: TransformedModel) -> None:
    """Merge equal values, and recognize what stands together since."""
    if merge_equal(model):
        model.graph_changed()
        group_factors(model)
        model.graph_changed()
        recognize(model)


def merge_equal(model: TransformedModel) -> int:
    """Let what reads a hidden value read the first node of the graph that computes it; returns how many are gone."""
    live, _ = live_values(model)
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(model.graph.nodes):
        if node not in live or node.op != "call_function" or draws(node.target) or node.target in NORMS | SOFTMAXES:
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        known = first.setdefault(key, node)
        if known is not node:
            Rewriter(node).replace(known)
            merged += 1
    return merged
