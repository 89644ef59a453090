"""Carry frozen norms, and other affine maps of single tokens, into the linear layers that read them.

Before → after (g, c of the server, [d] or one number; the function is unchanged up to rounding):
    linear(x·g, W, b)         → linear(x, W·diag(g), b)
    linear(x + c, W, b)       → linear(x, W, b + W·c)
    linear(x − mean(x), W, b) → linear(x, W − rowmean(W), b)

A frozen LayerNorm, (x − mean(x))·(γ/σ̄) + β, is such a chain: what it costs in private, a product for each element, goes
away. It stays where something else reads it, too, or where its gains are too large or too small for the fixed point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aero_compile.graphs.rewriting import SHAPE_ONLY, tainted_nodes, weight_value

aten = torch.ops.aten

LARGEST, SMALLEST = 64.0, 1 / 16
"""Largest gain of a chain that is folded, and how small it may be: weights lose the bits that a gain takes away."""


def fold_norms(graph: fx.Graph, module: Any, tokens: str = "input_ids") -> fx.Graph:
    """Return a copy of `graph` with chains of affine maps in front of linear layers folded into these."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    folding = _Folding(copy, module, tokens)
    for node in reversed(list(copy.nodes)):
        folding.visit(node)
    copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    copy.lint()
    return copy


@dataclass(frozen=True)
class _Step:
    """One affine map, `node` = its `source` times `factor`, plus `term`, or minus its mean."""

    node: fx.Node
    source: fx.Node
    kind: str
    other: Any = None


class _Folding:
    def __init__(self, graph: fx.Graph, module: Any, tokens: str) -> None:
        self.module = module
        self.live = tainted_nodes(graph, tokens)
        self.constant: set[fx.Node] = set()
        for node in graph.nodes:
            inside = node.op == "get_attr" or (node.op == "call_function" and bool(node.all_input_nodes))
            if inside and self.constant.issuperset(node.all_input_nodes):
                self.constant.add(node)
        self.known: dict[fx.Node, Any] = {}

    def visit(self, node: fx.Node) -> None:
        """Fold the chain that ends in `node`, if linear layers are all that reads it."""
        if node not in self.live or self._step(node) is None:
            return
        linears = self._linear_readers(node)
        steps = self._chain(node) if linears else []
        if steps:
            for linear in linears:
                self._fold(linear, steps)
            node.replace_all_uses_with(steps[-1].source)

    def _linear_readers(self, node: fx.Node) -> list[fx.Node]:
        """The linear layers that read `node`, or a reshaped form of it; none if anything else does."""
        found: list[fx.Node] = []
        for user in node.users:
            if user.target in SHAPE_ONLY:
                continue
            if user.target is aten.linear.default and user.args[0] is node:
                inner = [user]
            elif user.target is aten.reshape.default and self._keeps_rows(user):
                inner = self._linear_readers(user)
            else:
                inner = []
            if not inner:
                return []
            found += inner
        return found

    def _keeps_rows(self, view: fx.Node) -> bool:
        """Whether a reshape of an affine map's result has the same rows: its last size is that of the map's vectors."""
        step = self._step(view.all_input_nodes[0])
        size = view.args[1][-1]  # type: ignore[index]
        vectors = [self._value(step.other)] if step is not None and isinstance(step.other, fx.Node) else []
        return any(vector.dim() == 1 and vector.shape[0] == size != 1 for vector in vectors)

    def _chain(self, node: fx.Node) -> list[_Step]:
        steps: list[_Step] = []
        gain = torch.ones(1, dtype=torch.float64)
        while (step := self._step(node)) is not None:
            if step.kind in ("mul", "div"):
                value = torch.as_tensor(self._value(step.other)).abs().double().cpu()
                gain = gain * value if step.kind == "mul" else gain / value
            steps.append(step)
            node = step.source
            inside = {step.node, *(user for user in node.users if user.target is aten.mean.dim)}
            if not set(node.users) <= inside:
                break
        return steps if SMALLEST <= float(gain.max()) <= LARGEST else []

    def _step(self, node: fx.Node) -> _Step | None:
        if node.kwargs or node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor):
            return None
        left, right = node.args
        kind = {aten.mul.Tensor: "mul", aten.div.Tensor: "div", aten.add.Tensor: "add"}.get(node.target, "sub")
        if kind in ("mul", "add") and right in self.live:
            left, right = right, left
        if left not in self.live or not isinstance(left, fx.Node):
            return None
        if kind == "sub" and isinstance(right, fx.Node) and right.target is aten.mean.dim:
            whole = right.args[0] is left and tuple(right.args[1:]) == ([-1], True) and set(right.users) == {node}
            return _Step(node, left, "center") if whole else None
        return _Step(node, left, kind, right) if self._is_row(right) else None

    def _is_row(self, value: Any) -> bool:
        """Whether it is a number, or a vector of the server that has one number for each channel or one for all."""
        if not isinstance(value, fx.Node):
            return isinstance(value, int | float)
        return value in self.constant and value not in self.live and self._value(value).dim() <= 1

    def _value(self, value: Any) -> Any:
        return weight_value(self.module, value, self.known) if isinstance(value, fx.Node) else value

    def _fold(self, linear: fx.Node, steps: list[_Step]) -> None:
        _, weight, *rest = linear.args
        bias = rest[0] if rest else None

        def call(target: Any, *args: Any) -> fx.Node:
            with linear.graph.inserting_before(linear):
                return linear.graph.call_function(target, args)

        for step in steps:
            if step.kind == "center":
                weight = call(aten.sub.Tensor, weight, call(aten.mean.dim, weight, [1], True))
            elif step.kind in ("mul", "div"):
                weight = call(aten.mul.Tensor if step.kind == "mul" else aten.div.Tensor, weight, step.other)
            else:
                moved = call(aten.sum.dim_IntList, call(aten.mul.Tensor, weight, step.other), [1])
                if bias is not None:
                    moved = call(aten.add.Tensor if step.kind == "add" else aten.sub.Tensor, bias, moved)
                bias = moved if bias is not None or step.kind == "add" else call(aten.neg.default, moved)
        linear.args = (linear.args[0], weight, bias)
