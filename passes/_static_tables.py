"""Probabilities that follow from the mask and from tables, and their product with values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from aero_compile.analysis.position_slicing import find_size, insert_size
from aero_compile.errors import UnsupportedGraphError
from aero_compile.ir.custom_ops import MASKED_BELOW, masked
from aero_compile.ir.dataflow import live_inputs, placeholder
from aero_compile.ir.graph_model import place
from aero_compile.ir.ops import VIEWS
from aero_compile.passes._head_cutter import HeadCutter

aten = torch.ops.aten

Call = Callable[..., fx.Node]
Pattern = Callable[[Call, HeadCutter, tuple[int, ...]], fx.Node | None]
"""Makes the scores of some heads, laid out so that their mask's shape takes them; None for zeros everywhere."""


def zeros(call: Call, cutter: HeadCutter, places: tuple[int, ...]) -> fx.Node | None:
    """All positions alike."""
    return None


def by_position(call: Call, cutter: HeadCutter, places: tuple[int, ...], name: str) -> fx.Node:
    """The scores in the tensor `name`, `[H, T_max, T_max]`."""
    length = call(aten.sym_size.int, _tokens(cutter), 1)
    rows = call(aten.slice.Tensor, cutter.rewriter.parameter(name), 1, 0, length)
    return _laid_out(call, cutter, call(aten.slice.Tensor, rows, 2, 0, length), places)


def by_distance(call: Call, cutter: HeadCutter, places: tuple[int, ...], name: str) -> fx.Node:
    """The scores in the tensor `name`, `[H, T_max]`, by how many positions a key is behind its query."""
    device = next(cutter.model.parameters()).device
    positions = call(aten.arange.default, call(aten.sym_size.int, _tokens(cutter), 1), device=device, pin_memory=False)
    behind = call(aten.sub.Tensor, call(aten.unsqueeze.default, positions, 1), positions)
    distance = call(aten.clamp_min.default, behind, 0)
    table = call(aten.index.Tensor, cutter.rewriter.parameter(name), [None, distance])
    return _laid_out(call, cutter, table, places)


def _tokens(cutter: HeadCutter) -> fx.Node:
    return placeholder(cutter.model.graph, cutter.model.convention.tokens)


def _laid_out(call: Call, cutter: HeadCutter, table: fx.Node, places: tuple[int, ...]) -> fx.Node:
    """A table `[H, T, T]` as probabilities are laid out: heads folded into the batch, or grouped over shared keys."""
    shape = cutter.structure.values[cutter.heads.softmax].shape
    if len(shape) == 3 and len(places) > 1:
        return call(aten.repeat.default, table, [call(aten.sym_size.int, _tokens(cutter), 0), 1, 1])
    return call(aten.unflatten.int, table, 0, list(shape[1:3])) if len(shape) == 5 else table


class StaticTables:
    """Makes the products of static heads; layers with equal masks share what is made of the mask alone."""

    def __init__(self, pattern: Pattern = zeros) -> None:
        self._pattern = pattern
        self._known: dict[Hashable, fx.Node] = {}

    def product(self, cutter: HeadCutter, places: tuple[int, ...]) -> fx.Node:
        """The result of the heads at `places` of the cutter's group, laid out as its product."""
        left, right = cutter.product.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        axes = {} if len(places) == cutter.heads.count else cutter.operands()
        if left in axes:
            cutter.at(left, axes[left], places)
        values = cutter.at(right, axes[right], places) if right in axes else right
        call = cutter.rewriter.call
        found = call(aten.matmul.default, self._table(cutter, places, left), values)
        shape = cutter.structure.values[right].shape
        if len(shape) == 4 and shape[1] == 1 < cutter.heads.count:  # all heads share the values
            found = call(aten.expand.default, found, [-1, len(places), -1, -1])
        return found

    def _table(self, cutter: HeadCutter, places: tuple[int, ...], left: fx.Node) -> fx.Node:
        """The steps from the scores to `left`, repeated on scores of zero (dropout is left out)."""
        steps: list[tuple[fx.Node, fx.Node]] = []
        node = left
        while node is not cutter.scores:
            source = live_inputs(node, cutter.structure.live)[0]
            if node.op != "call_module":
                steps.append((node, source))
            node = source
        call = functools.partial(self._call, cutter)
        dtype = cutter.structure.values[cutter.heads.softmax].dtype
        current = self._zeros(cutter, places, moved=any(step.target in VIEWS for step, _ in steps))
        for step, source in reversed(steps):
            if step is cutter.heads.softmax:
                hidden = call(aten.le.Scalar, current, MASKED_BELOW)
                scores = self._pattern(call, cutter, places)
                if scores is None:
                    scores = call(aten.zeros_like.default, current)
                current = call(aten.where.ScalarSelf, hidden, masked(dtype), scores)
                # a pattern is an average, whatever stood in the place of the softmax
                current = call(aten.softmax.int, current, -1)
                continue
            twin, swap = cutter.copy_of(step, places), {cutter.copy_of(source, places): current}
            args, kwargs = fx.map_arg((twin.args, twin.kwargs), functools.partial(_swapped, swap))
            current = call(twin.target, *args, **kwargs)
        current.meta["dtype"] = dtype
        return current

    def _call(self, cutter: HeadCutter, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        key = (target, str(args), str(kwargs))
        if key not in self._known:
            self._known[key] = cutter.rewriter.call(target, *args, **kwargs)
        return self._known[key]

    def _zeros(self, cutter: HeadCutter, places: tuple[int, ...], *, moved: bool) -> fx.Node:
        """Scores of zero: of the full shape where it is changed on the way, or one matrix for all texts and heads."""
        shapes = cutter.shapes_of(cutter.scores, places)
        if not moved:
            shapes = [[*[1] * (len(shape) - 2), *shape[-2:]] for shape in shapes]
        sizes = [find_size(cutter.at_shapes, each) for each in zip(*shapes, strict=True)]
        if None in sizes:
            raise UnsupportedGraphError(
                f"{cutter.name} makes tables of the tokens' positions, but the scores at {place(cutter.scores)} "
                f"are {list(shapes[0])} for {cutter.at_shapes[0].length} tokens: others are not supported"
            )
        key = ("zeros", *sizes)
        if moved or key not in self._known:
            tokens = _tokens(cutter)
            with tokens.graph.inserting_before(cutter.product):
                whole = [insert_size(tokens, size) for size in sizes]
            # like the embedding, so that values which are rewritten later are not held by their type
            self._known[key] = cutter.rewriter.call(aten.new_zeros.default, cutter.structure.embedding, whole)
        return self._known[key]


def _swapped(swap: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return swap.get(node, node)
