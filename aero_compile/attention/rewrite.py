"""Before → after, in the programs of training and evaluation; the model's own graph keeps its attention open:

scores → scale → mask → softmax → dropout → product  → one call that holds no matrix of T×T probabilities
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from aero_compile.analysis.layer_text import layers_text
from aero_compile.analysis.parts import Heads
from aero_compile.analysis.structure import structure_of
from aero_compile.attention.block_graph import block_function, modules
from aero_compile.attention.blocks import Plain, Plan, attention_function
from aero_compile.attention.masks import longest, mask_kind
from aero_compile.attention.plain import scale_of
from aero_compile.attention.regions import NotRecognized, Region, find_region
from aero_compile.attention.row_measures import Measure, Measures
from aero_compile.ir.graph_model import GraphModel

SHORTEST = 128
"""Tokens from which on attention is rewritten; below, the open form is at least as fast and holds little."""


@dataclass(frozen=True)
class Found:
    """One softmax's attention: its region with what is known of it, or why it stays as it is.

    `form`: "fused", "in blocks" or "whole".
    """

    form: str
    region: Region | None = None
    scale: float | None = None
    causal: bool = False
    why: str = ""


def attention_forms(model: GraphModel, padded: bool = False) -> tuple[tuple[Found, ...], ...]:
    """How the attention of each layer, for each of its softmaxes, is computed; found once for a state of the graph."""
    key = f"attention_forms.{padded}"
    if key not in model.derived:
        attentions = structure_of(model).attentions
        model.derived[key] = tuple(tuple(_form(model, heads, padded) for heads in one.groups) for one in attentions)
    found: tuple[tuple[Found, ...], ...] = model.derived[key]
    return found


def describe(layers: Sequence[Sequence[Found]]) -> str:
    """The forms of all layers in words, and why attention stays whole."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for number, layer in enumerate(layers):
        for found in layer:
            grouped.setdefault((found.form, found.why), []).append(number)
    parts = [
        f"{form} in {layers_text(numbers)}" + (f" ({why})" if why else "") for (form, why), numbers in grouped.items()
    ]
    return f"attention from {SHORTEST} tokens on: {'; '.join(parts)}"


def _form(model: GraphModel, heads: Heads, padded: bool) -> Found:
    structure = structure_of(model)
    try:
        region = find_region(model, structure, heads)
        block_function(region, (region.product,))
    except NotRecognized as error:
        return Found("whole", why=str(error))
    kind = mask_kind(model, structure, region, padded)
    scale = scale_of(structure, region) if kind == "causal" else None
    return Found("in blocks" if scale is None else "fused", region, scale, causal=kind != "unknown")


def rewrite_attention(
    model: GraphModel, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node], measures: Measures, padded: bool
) -> dict[tuple[fx.Node, Measure], fx.Node]:
    """Rewrite what can be in `graph`, whose nodes are `copies` of the model's.

    Returns the nodes that hold what is measured, `[…, T]`, of rewritten softmaxes.
    """
    taps: dict[tuple[fx.Node, Measure], fx.Node] = {}
    for layer in attention_forms(model, padded):
        for found in layer:
            if found.region is None or found.region.product not in copies:
                continue
            product = copies[found.region.product]
            with graph.inserting_before(product):
                held = [graph.get_attr(str(node.target)) for node in modules(found.region)]
                inputs = [copies[node] for node in found.region.inputs]
                call = graph.call_function(attention_function(_plan(model, found, measures)), (*inputs, *held))
                mixed = graph.call_function(operator.getitem, (call, 0))
                for place, measure in enumerate(measures, 1):
                    taps[found.region.heads.softmax, measure] = graph.call_function(operator.getitem, (call, place))
            product.replace_all_uses_with(mixed)
    return taps


def _plan(model: GraphModel, found: Found, measures: Measures) -> Plan:
    region = found.region
    assert region is not None
    order = list(region.inputs)
    query, key = (order.index(node) for node in region.heads.scores.all_input_nodes)
    value = order.index(region.product.all_input_nodes[1])
    plain = None if found.scale is None else Plain(query, key, value, found.scale, longest(model))
    dim = region.nodes[region.product].rows
    assert dim is not None
    block = block_function(region, (region.product,), measures)
    return Plan(block, tuple(region.inputs.values()), query, key, dim, measures, found.causal, plain)
