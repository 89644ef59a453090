"""Carry scalars of the server past the private computation, into weights, where they cost nothing.

Before → after (s, α, β one-element values of the server; the function is unchanged up to rounding):
    linear(β·x, W, b)            → linear(x, β·W, b)
    β·x + (1/α)·linear(y, W, b)  → β·(x + linear(y, W/(αβ), b/(αβ))), with β carried on
    c·((q·t⁻¹) @ k)              → (q·(c·t⁻¹)) @ k, c the 1/√d of the scores, t the server's temperatures

A product with β is thus put off along the residual stream until a weight takes it up. Without norms that is always
possible; a norm needs the product itself. Where carrying would not save products, the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from aero_compile.graphs.rewriting import VIEWS, tainted_nodes

aten = torch.ops.aten

LARGEST = 64.0
"""A carried scale beyond this, or below its inverse, is applied at once: values must fit the fixed point."""


def fold_scales(graph: fx.Graph, module: torch.nn.Module, tokens: str = "input_ids") -> fx.Graph:
    """Return a copy of ``graph`` with scalars folded, or ``graph`` itself if that saves no product."""
    copy = fx.Graph()
    outputs = copy.graph_copy(graph, {})
    copy.output(outputs)
    _Folding(copy, module, tokens).run()
    copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    copy.lint()
    return copy if _products(copy, tokens) < _products(graph, tokens) else graph


def _products(graph: fx.Graph, tokens: str) -> int:
    live = tainted_nodes(graph, tokens)
    return sum(node in live and node.target in (aten.mul.Tensor, aten.div.Tensor) for node in graph.nodes)


class _Folding:
    """One pass over the graph. ``owed[n]`` is the scale by which the value of ``n`` is still to be multiplied."""

    def __init__(self, graph: fx.Graph, module: torch.nn.Module, tokens: str) -> None:
        self.graph = graph
        self.module = module
        self.live = tainted_nodes(graph, tokens)
        self.owed: dict[fx.Node, tuple[fx.Node, float]] = {}
        self.known: dict[fx.Node, torch.Tensor | None] = {}
        self.hoisted: dict[fx.Node, fx.Node] = {}
        nodes: list[fx.Node] = list(graph.nodes)
        self.head = next(node for node in nodes if node.op not in ("get_attr", "placeholder"))

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.live and node.op != "placeholder":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.target is aten.mul.Tensor and self._fold_into_factor(node):
            return
        if node.target is aten.mul.Tensor and self._take(node):
            return
        owing = [parent for parent in node.all_input_nodes if parent in self.owed]
        if not owing:
            return
        if node.target is aten.linear.default and node.args[0] in self.owed:
            self._scale_weight(node, *self.owed[owing[0]], bias=False)
        elif node.op == "call_module" or node.target in VIEWS:
            self.owed[node] = self.owed[owing[0]]
        elif node.target is not aten.add.Tensor or node.kwargs or not self._add(node):
            for parent in owing:
                self._apply(node, parent)

    def _fold_into_factor(self, node: fx.Node) -> bool:
        """A public number times a product with one of the server's tensors: let the server multiply them."""
        product, number = node.args
        if not isinstance(product, fx.Node) or not isinstance(number, int | float):
            return False
        if product.target is not aten.matmul.default or len(product.users) != 1:
            return False
        scaled = product.args[0]
        if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor or len(scaled.users) != 1:
            return False
        factors = [parent for parent in scaled.all_input_nodes if parent not in self.live]
        if len(factors) != 1:
            return False
        with self.graph.inserting_before(scaled):
            folded = self.graph.call_function(aten.mul.Tensor, (factors[0], number))
        scaled.replace_input_with(factors[0], folded)
        node.replace_all_uses_with(product)
        self.graph.erase_node(node)
        return True

    def _take(self, node: fx.Node) -> bool:
        """A product with a scalar of the server: let the users of ``node`` owe it."""
        left, right = node.args
        for value, scalar in ((left, right), (right, left)):
            if not isinstance(value, fx.Node) or not isinstance(scalar, fx.Node) or scalar in self.live:
                continue
            number = self._value(scalar)
            if number is None or value not in self.live:
                return False
            scale, size = self._hoist(scalar), abs(float(number))
            if value in self.owed:
                before, earlier = self.owed[value]
                scale, size = self._call(aten.mul.Tensor, before, scale), size * earlier
            if not 1 / LARGEST <= size <= LARGEST:
                return False
            # an alias keeps the scaled value apart from other users of the value itself
            node.target, node.args = aten.alias.default, (value,)
            self.owed[node] = (scale, size)
            return True
        return False

    def _add(self, node: fx.Node) -> bool:
        """Put both terms on one scale: that of one term, if a linear layer can give the other the same."""
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return False
        for kept, other in ((left, right), (right, left)):
            linear = self._only_linear(other) if kept in self.owed else None
            if linear is None or kept not in self.live:
                continue
            scale, size = self.owed[kept]
            factor = self._call(aten.reciprocal.default, scale)
            if other in self.owed:
                factor = self._call(aten.mul.Tensor, factor, self.owed[other][0])
            self._scale_weight(linear, factor, 1.0, bias=True)
            self.owed[node] = (scale, size)
            return True
        return False

    def _only_linear(self, node: fx.Node) -> fx.Node | None:
        """The linear layer whose result ``node`` is, if nothing else reads it."""
        while len(node.users) == 1:
            if node.target is aten.linear.default:
                return node
            if node.op != "call_module" and node.target not in VIEWS:
                return None
            node = next(parent for parent in node.all_input_nodes if parent in self.live)
        return None

    def _scale_weight(self, linear: fx.Node, scale: fx.Node, _size: float, *, bias: bool) -> None:
        value, weight, *rest = linear.args
        with self.graph.inserting_before(linear):
            args: list[Any] = [value, self.graph.call_function(aten.mul.Tensor, (weight, scale))]
            for each in rest:
                scaled = bias and each is not None
                args.append(self.graph.call_function(aten.mul.Tensor, (each, scale)) if scaled else each)
        linear.args = tuple(args)

    def _apply(self, node: fx.Node, parent: fx.Node) -> None:
        """Do the product that ``parent`` owes, for ``node`` alone."""
        with self.graph.inserting_before(node):
            product = self.graph.call_function(aten.mul.Tensor, (parent, self.owed[parent][0]))
        product.meta = dict(parent.meta)
        node.replace_input_with(parent, product)

    # -- scalars of the server --------------------------------------------------------------------------

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        """Value of a one-element expression over parameters, or None if ``node`` is something else."""
        if node not in self.known:
            self.known[node] = None
            if node.op == "get_attr":
                value = self.module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                single = isinstance(value, torch.nn.Parameter) and value.numel() == 1
                self.known[node] = value.detach() if isinstance(value, torch.Tensor) and single else None
            elif node.op == "call_function" and node.all_input_nodes:
                inputs = {parent: self._value(parent) for parent in node.all_input_nodes}
                if all(value is not None for value in inputs.values()):
                    function: Callable[..., Any] = node.target  # type: ignore[assignment]
                    args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
                    with torch.no_grad():
                        self.known[node] = function(*args, **kwargs)
        return self.known[node]

    def _hoist(self, node: fx.Node) -> fx.Node:
        """The same expression at the head of the graph, where every linear layer can read it."""
        if node.op == "get_attr":
            return node
        if node not in self.hoisted:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._hoist)
            with self.graph.inserting_before(self.head):
                self.hoisted[node] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        return self.hoisted[node]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.head):
            return self.graph.call_function(target, args)
