"""Take the queries of the last attention out of the product that computes them with its keys and values.

Before → after (rows Q of W make the queries, rows R the rest):
    y = linear(x, W, b); q from y, k and v from y → q from linear(x, W[Q], b[Q]), k and v from linear(x, W[R], b[R])

The views behind the product keep their layout, whatever it is (thirds, interleaved by head, grouped): results are put
where their rows were, and what nobody reads any more is filled with copies of some other channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aero_compile.analysis.parts import Attention
from aero_compile.analysis.projections import find_projections, rows_read, values_behind
from aero_compile.ir.dataflow import ancestors
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel

aten = torch.ops.aten


def part_queries(model: TransformedModel) -> tuple[str, ...]:
    """Give the last attention's queries a product of their own, and say which could not get one and why.

    Raises:
        UnsupportedGraphError: the projections of the last attention cannot be separated.
    """
    if not model.structure.attentions:
        return ()
    attention = model.structure.attentions[-1]
    found = find_projections(model, attention)
    left = []
    for projection in found.queries:
        linear, queries = projection.linear, set(projection.rows)
        others = _rows_read_elsewhere(model, attention, linear)
        if not others:
            continue
        if others & queries:
            left.append(f"queries of layer {attention.layer} are computed at all positions: other values share them")
            continue
        twin = _copy_for_queries(model, attention, linear)
        size = int(model.structure.values[linear].shape[-1])
        rank = model.structure.values[linear].dim()
        _keep_rows(model, twin, (rank, size), sorted(queries))
        _keep_rows(model, linear, (rank, size), sorted(others))
    model.graph_changed()
    return tuple(left)


def _query_operands(attention: Attention) -> list[fx.Node]:
    return [group.scores.args[0] for group in attention.groups if isinstance(group.scores.args[0], fx.Node)]


def _rows_read_elsewhere(model: TransformedModel, attention: Attention, linear: fx.Node) -> set[int]:
    """Rows of `linear` that anything but the scores' queries depends on."""
    return rows_read(model, linear, without=[(group.scores, 0) for group in attention.groups])


def _copy_for_queries(model: TransformedModel, attention: Attention, linear: fx.Node) -> fx.Node:
    """A copy of `linear`, and of what lies between it and the scores, that the queries alone are taken from."""
    operands = _query_operands(attention)
    needed = ancestors(operands, set(values_behind(linear, model.structure)))
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(model.graph.nodes):
        if node in needed:
            copies[node] = Rewriter.after(node).copy(node, copies)
    for group in attention.groups:
        arguments: tuple[Any, ...] = group.scores.args
        group.scores.args = (copies.get(arguments[0], arguments[0]), *arguments[1:])
    return copies[linear]


def _keep_rows(model: TransformedModel, linear: fx.Node, shape: tuple[int, int], rows: list[int]) -> None:
    """Compute only `rows` of a linear layer, whose result has `shape` (rank, channels); the others repeat the first."""
    rank, size = shape
    where = {row: i for i, row in enumerate(rows)}
    rewriter = Rewriter(linear)
    kept, channels = (_indices(model, rewriter, each) for each in (rows, [where.get(row, 0) for row in range(size)]))
    x, *weights = linear.args
    taken = [rewriter.call(aten.index_select.default, w, 0, kept) for w in weights if w is not None]
    product = rewriter.call(aten.linear.default, x, *taken)
    behind = [*[None] * (rank - 1), channels]
    rewriter.replace(rewriter.call(aten.index.Tensor, product, behind))


def _indices(model: TransformedModel, rewriter: Rewriter, numbers: list[int]) -> fx.Node:
    """`numbers` as an int64 vector that the graph computes: a table of them would be taken for the server's."""
    kind: dict[str, Any] = {"dtype": torch.int64, "device": next(model.parameters()).device}
    pieces: list[fx.Node] = []
    at = 0
    while at < len(numbers):
        step = 1 if numbers[at + 1 : at + 2] == [numbers[at] + 1] else 0
        end = at + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + step:
            end += 1
        if step:
            pieces.append(rewriter.call(aten.arange.start, numbers[at], numbers[end - 1] + 1, **kind))
        else:
            pieces.append(rewriter.call(aten.full.default, [end - at], numbers[at], **kind))
        at = end
    return pieces[0] if len(pieces) == 1 else rewriter.call(aten.cat.default, pieces, 0)
