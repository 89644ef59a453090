"""Compute the logits of the last position only, and with them as little as possible.

Before → after, for x [B, T, d] between the blocks and the last block written with its residual additions:
    logits(x)                                    → logits(x[:, -1:]), [B, 1, V]
    x + ffn(norm(x))                             → x[:, -1:] + ffn(norm(x[:, -1:]))
    x + proj(softmax(q(x)·k(x)ᵀ + mask)·v(x))    → x[:, -1:] + proj(softmax(q(x[:, -1:])·k(x)ᵀ + mask[-1:])·v(x))

"Last" is the last entry of the token matrix, for any batch and length: with right padding that is padding. So the
model counts as a transformed one whose output is `logits[:, -1:]`; callers pad on the left, or not at all.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.graphs.rewriting import (
    SHAPE_ONLY,
    copy_place,
    insert_call,
    node_values,
    place,
    placeholder,
    sample_shape,
)
from aero_compile.graphs.trainable import TransformedModel
from aero_compile.inference.change import Change
from aero_compile.inference.positions import Axis, Cut, find_cut

aten = torch.ops.aten

NAME = "last-token"
POSITIONS = Axis(1)
"""Of the logits `[B, T, V]`."""


def last_token(model: TransformedModel) -> Change:
    """Let `model`, an inference copy, compute `logits[:, -1:]`, `[B, 1, V]`, instead of all logits.

    Going back from the logits, a node that works position by position is computed at the last one; keys, values and
    whatever else needs all positions stays whole, and one slice is taken on the border. The function is the same in
    exact arithmetic, for every batch and length, and other outputs of the graph (if there are any) stay whole.
    A model that returns one position already is left alone.
    """
    logits = _output(model).args[0][0]
    samples = _samples(model)
    if any(values[logits].shape[1] != length or length == 1 for length, values in samples):
        return Change(NAME, modified=False)
    _read_sizes_from_tokens(model, samples)
    samples = _samples(model)
    plan = _Plan(model, samples)
    done, left = plan.report()
    plan.carry_out()
    model.graph_changed()
    return Change(NAME, modified=True, done=done, left=left)


class _Plan:
    """What is computed at one position, and where slices are taken."""

    def __init__(self, model: TransformedModel, samples: _Samples) -> None:
        self.model = model
        self.samples = samples
        self.dependent = _dependent(model)
        self.wanted: dict[fx.Node, set[Axis | None]] = {}
        self.cuts: dict[fx.Node, Cut] = {}
        self.stopped: list[fx.Node] = []
        first, *others = _output(model).args[0]
        for node, axis in ((first, POSITIONS), *((other, None) for other in others)):
            if isinstance(node, fx.Node):
                self.wanted.setdefault(node, set()).add(axis)
        for node in reversed(model.graph.nodes):
            self._visit(node)
        for node in model.graph.nodes:  # a list cannot be sliced: what is taken out of it is
            if node.target is operator.getitem and node.args[0] not in self.cuts:
                self.cuts.pop(node, None)

    def _visit(self, node: fx.Node) -> None:
        wanted = self.wanted.get(node)
        if node.op in ("output", "placeholder") or not wanted:
            return
        cut = None
        if node in self.dependent and None not in wanted:
            cut = self._cut(node, wanted)
        if cut is not None:
            self.cuts[node] = cut
        for parent in node.all_input_nodes:
            self.wanted.setdefault(parent, set()).add(None if cut is None else cut.inputs.get(parent))

    def _cut(self, node: fx.Node, wanted: set[Axis | None]) -> Cut | None:
        """The same cut at every sample shape."""
        cuts = [find_cut(node, axis, values, n) for axis in wanted if axis for n, values in self.samples]
        if cuts[0] is None or any(cut != cuts[0] for cut in cuts):
            self.stopped.append(node)
            return None
        return cuts[0]

    # -- edits ---------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        graph, sliced = self.model.graph, {}

        def at_last(node: fx.Node, axis: Axis) -> fx.Node:
            if node in self.cuts:
                return node
            if (node, axis) not in sliced:
                sliced[node, axis] = self._slice(node, axis)
            return sliced[node, axis]

        for node in list(graph.nodes):
            if node in self.cuts:
                cut = self.cuts[node]
                taken = {parent: at_last(parent, axis) for parent, axis in cut.inputs.items()}
                swap = lambda each: taken.get(each, each)  # noqa: E731, B023
                node.args, node.kwargs = fx.map_arg((cut.args, node.kwargs), swap)
        output = _output(self.model)
        first, *others = output.args[0]
        output.args = ((at_last(first, POSITIONS), *others),)
