"""Compute values of the residual stream anew, each as one sum and in a basis of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from aero_compile.analysis.affine import by_rows, times
from aero_compile.analysis.residual_stream import Basis, Hub, ResidualStream, Term
from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten


class StreamRewriting:
    """Rewrites hubs of a stream, one after the other in graph order; `finish` lets everything read the new ones.

    Args:
        stream: whose hubs, found before the first edit.
        prefix: new weights are called `<prefix>.<number of the hub>.<what>`.
        bases: R and R⁻¹ of each hub whose basis is not the model's own; such hubs, and those that are computed from
            them, must all be rewritten.
    """

    def __init__(self, stream: ResidualStream, prefix: str, bases: Mapping[fx.Node, Basis]) -> None:
        self.stream = stream
        self.model = stream.model
        self.prefix = prefix
        self.bases = bases
        self.new: dict[fx.Node, fx.Node] = {}
        self.numbers = {node: number for number, node in enumerate(stream.hubs)}
        self.count = 0

    def rewrite(self, hub: Hub, parent: fx.Node | None = None) -> None:
        """Compute `hub` as one sum. The basis is such that `parent`, if given, enters as it is."""
        terms, constant = self.stream.form(hub)
        one = torch.ones_like(constant[0])
        matrix = self.bases[hub.node][0] if hub.node in self.bases else one
        pieces: list[fx.Node] = []
        for term in terms:
            coefficient = times(term.coefficient, matrix)
            if term.leaf is parent:
                coefficient = one
            elif term.leaf in self.bases and term.leaf is not hub.node:
                coefficient = times(self.bases[term.leaf][1], coefficient)
            pieces.append(self._viewed(self._product(term.leaf, coefficient, hub), term, hub))
        constant = times(constant, matrix)
        if constant.any():
            pieces.append(self._stored("constant", constant, hub))
        total = pieces[0]
        for piece in pieces[1:]:
            total = Rewriter(hub.node).call(aten.add.Tensor, total, piece)
        self.new[hub.node] = total

    def finish(self) -> None:
        """Let everything read the hubs that were rewritten, linear layers with weights for their bases."""
        for old, new in self.new.items():
            if old in self.bases:
                self._turn_readers(self.stream.hubs[old], self.bases[old][1])
            if new is not old:
                old.replace_all_uses_with(new)
        self.model.graph_changed()

    def _product(self, leaf: fx.Node, coefficient: Tensor, hub: Hub) -> fx.Node:
        value, rewriter = self.new.get(leaf, leaf), Rewriter(hub.node)
        if coefficient.dim() == 0 and float(coefficient) == 1:
            return value
        if self.stream.is_looked_up(leaf, hub):
            table = by_rows(self.stream.affine.constant(leaf.args[0]), coefficient)
            value = rewriter.copy(leaf, {})
            value.args = (self._stored("embedding", table, hub), *leaf.args[1:])
            return value
        if coefficient.dim():
            return rewriter.call(aten.linear.default, value, self._stored("weight", coefficient.T, hub))
        public = self.stream.is_public(hub) and hub.node not in self.bases and leaf not in self.bases
        factor: Any = float(coefficient) if public else self._stored("scale", coefficient.reshape(1), hub)
        return rewriter.call(aten.mul.Tensor, value, factor)

    def _viewed(self, value: fx.Node, term: Term, hub: Hub) -> fx.Node:
        """`value` with its rows where the hub has them."""
        values, width = self.stream.values, self.stream.width(hub.node)
        views = [view for view in term.views if view.target is not aten.alias.default]
        if not term.moves:
            same = values[term.leaf].shape[:-1] == values[hub.node].shape[:-1] or term.leaf not in self.stream.live
            views = [] if same else views[-1:] if views[-1].target is aten.reshape.default else views
        for view in views:
            args: Any = view.args[1:]
            if view.target in (aten.reshape.default, aten.expand.default):
                args = ([*args[0][:-1], width],)
            value = Rewriter(hub.node).call(view.target, value, *args)
        return value

    def _turn_readers(self, hub: Hub, inverse: Tensor) -> None:
        for reader in hub.readers:
            weight = self.stream.affine.constant(reader.args[1])
            turned = by_rows(weight, inverse.T if inverse.dim() else inverse)
            reader.args = (reader.args[0], self._stored("reader", turned, hub), *reader.args[2:])

    def _stored(self, what: str, value: Tensor, hub: Hub) -> fx.Node:
        """A node that reads a new weight of the server, in the model's dtype."""
        name = f"{self.prefix}.{self.numbers[hub.node]}.{what}_{self.count}"
        self.count += 1
        dtype = self.stream.values[hub.node].dtype
        self.model.add_tensor(name, nn.Parameter(value.to(dtype).contiguous(), requires_grad=False))
        return Rewriter(hub.node).parameter(name)
