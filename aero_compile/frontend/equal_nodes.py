"""Compute once what a model computes twice: `w[..., 40:]` taken twice is one value.

Before → after:
    f(x), …, f(x)  → one f(x), for every op that draws no random numbers

Analyses follow values by the node that makes them: a gate that is cut out twice would look like two.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from aero_compile.ir.dataflow import draws, live_values
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel


def merge_equal(model: TransformedModel) -> None:
    """Let everything that reads a hidden value read the first node of `model`'s graph that computes it."""
    live, _ = live_values(model)
    first: dict[Any, fx.Node] = {}
    for node in list(model.graph.nodes):
        if node not in live or node.op != "call_function" or draws(node.target):
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        known = first.setdefault(key, node)
        if known is not node:
            Rewriter(node).replace(known)
