"""Find feed-forward blocks: two linear layers in a row whose result is added to what the first one reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from aero_compile.analysis.activations import find_activations
from aero_compile.analysis.block_ops import IN_FFNS
from aero_compile.analysis.parts import FeedForward, nonlinear_kind
from aero_compile.analysis.residual_merge import find_merge, rest_of_sum
from aero_compile.ir.dataflow import live_inputs, through_views
from aero_compile.ir.places import source_path

aten = torch.ops.aten


def find_ffns(
    order: Sequence[fx.Node],
    live: set[fx.Node],
    depth: Mapping[fx.Node, int],
    layers: int,
    values: Mapping[fx.Node, Any],
) -> Iterator[FeedForward]:
    """Feed-forward blocks in graph order; `depth` says how many of the `layers` attentions a node comes after."""
    matched = (_match(node, live, depth, values) for node in order if node.target is aten.linear.default)
    found = [ffn for ffn in matched if ffn is not None]
    each = len(found) // max(layers, 1)
    for number, ffn in enumerate(found):
        regular = each * layers == len(found)
        layer = number // each if regular else max(depth[ffn.output] - 1, 0)
        yield dataclasses.replace(ffn, layer=layer)


def _match(
    output: fx.Node, live: set[fx.Node], depth: Mapping[fx.Node, int], values: Mapping[fx.Node, Any]
) -> FeedForward | None:
    """The block that a linear node is the out-projection of, in no layer yet; None if it is that of none."""
    inside = _inside(output, live, values)
    inputs = tuple(n for n in inside if n.target is aten.linear.default)
    bases = {through_views(live_inputs(linear, live)[0]) for linear in inputs}
    if len(bases) != 1:
        return None
    entry = bases.pop()
    merge = find_merge(output, entry, live, depth)
    if merge is None:
        return None
    branch, residual = merge
    residual += tuple(rest_of_sum(residual[-1][0], entry, live))
    name = source_path(output).rpartition(".")[0] or source_path(output)
    return FeedForward(0, entry, inputs, output, tuple(find_activations(inside, live)), branch, residual, name)


def _inside(output: fx.Node, live: set[fx.Node], values: Mapping[fx.Node, Any]) -> tuple[fx.Node, ...]:
    """Nodes between the linear node `output` and its in-projections, these included, if that is all there is."""
    stack = [live_inputs(output, live)[0]]
    seen: dict[fx.Node, None] = {}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen[node] = None
        if node.target is aten.linear.default:
            continue
        known = node.target in IN_FFNS or node.op == "call_module" or _is_elementwise(node, live, values)
        if not known or len(seen) > 64:
            return ()
        stack.extend(live_inputs(node, live))
    return tuple(seen)


def _is_elementwise(node: fx.Node, live: set[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether an op that is not in our tables maps one hidden value to another of the same shape (SELU, PReLU)."""
    inputs = live_inputs(node, live)
    single = len(inputs) == 1 and nonlinear_kind(node, live) is not None
    return single and getattr(values[inputs[0]], "shape", None) == getattr(values[node], "shape", None)
