"""Where one layer ends and the next begins: the places of a graph that the least data crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aero_compile.analysis.structure import structure_of
from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.ops import PRODUCTS


def layer_cuts(model: GraphModel) -> list[fx.Node]:
    """Nodes of `model.graph` behind which a layer begins or ends, in order: one more than there are layers.

    Between two attentions the graph is cut where the hidden values that are used on both sides have the fewest
    elements, as late as possible: behind the residual merge of the feed-forward block. The first cut lies between the
    token embedding and the first attention, the last one between the last attention and the logits' own product.
    """
    structure = structure_of(model)
    needed = model.logits_nodes() & structure.live
    order = [node for node in model.graph.nodes if node in needed]
    place = {node: index for index, node in enumerate(order)}
    crossing = _elements_behind(model, order, place)
    head = max(index for index, node in enumerate(order) if node.target in PRODUCTS)
    bounds = [place[structure.embedding]]
    for attention in structure.attentions:
        inside = [heads.softmax for heads in attention.groups] + [heads.product for heads in attention.static]
        found = [place[node] for node in (*inside, attention.marker) if node in place]
        bounds += [min(found), max(found)]
    bounds.append(head)
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return [order[min(range(low, high), key=lambda index: (crossing[index], -index))] for low, high in pairs]


def _elements_behind(model: GraphModel, order: Sequence[fx.Node], place: dict[fx.Node, int]) -> list[int]:
    """For each place in `order`: elements of the values computed up to it that are used behind it."""
    values = structure_of(model).values
    change = [0] * (len(order) + 1)
    for index, node in enumerate(order):
        last = max((place[user] for user in node.users if user in place), default=index)
        elements = _elements(values[node])
        change[index] += elements
        change[last] -= elements
    total, found = 0, []
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _elements(value: Any) -> int:
    return int(value.numel()) if isinstance(value, torch.Tensor) else sum(map(_elements, value))
