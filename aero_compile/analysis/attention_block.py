"""Attention as a block of the decoder: what it reads, where its heads mix values, its residual connection."""

from __future__ import annotations

import torch
from torch import fx

from aero_compile.analysis.parts import Attention, Structure
from aero_compile.analysis.projections import find_projections, mixed_values, views_below, weighted_sum
from aero_compile.analysis.residual_merge import find_merge
from aero_compile.analysis.structure import structure_of
from aero_compile.errors import UnsupportedGraphError
from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.places import place

aten = torch.ops.aten


def attention_input(model: GraphModel, attention: Attention) -> fx.Node:
    """The value `[B, T, d]` that the queries are projected from: the block's input after its norm, if it has one.

    Where no head has queries, that the values are projected from.

    Raises:
        UnsupportedGraphError: the queries come from no linear layer, or from several values.
    """
    projections = find_projections(model, attention)
    queries = projections.queries or projections.values
    found = {stream_value(structure_of(model), each.linear.args[0]) for each in queries}
    if len(found) != 1:
        raise UnsupportedGraphError(
            f"the queries of layer {attention.layer} ({place(attention.node)}) are computed from "
            f"{len(found)} values; supported is attention whose queries are projected from one"
        )
    return found.pop()


def stream_value(structure: Structure, node: object) -> fx.Node:
    """The value of layout `[B, T, d]` that `node` is a view of, or `node` itself if there is none."""
    assert isinstance(node, fx.Node)
    layout = structure.values[structure.embedding].shape[:2]
    found = node
    for each in views_below(node):
        shape = structure.values[each].shape
        if len(shape) == 3 and shape[:2] == layout:
            found = each
    return found


def find_skip(model: GraphModel, attention: Attention) -> tuple[fx.Node, fx.Node] | None:
    """The residual connection around `attention`: (addition, the term that bypasses it), or None without one."""
    structure = structure_of(model)
    found = find_projections(model, attention)
    start = found.output
    if start is None:
        heads = [mixed_values(weighted_sum(group.softmax, structure), structure) for group in attention.groups]
        heads += [group.product for group in attention.static]
        joins = {user for head in heads for user in head.users if user.target is aten.cat.default}
        start = joins.pop() if len(joins) == 1 else heads[0]
    merge = find_merge(start, attention_input(model, attention), structure.live)
    return merge[1][-1] if merge else None
