"""Find the activations of a feed-forward block: nonlinear element-wise regions with one input and one output."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from aero_compile.analysis.block_ops import BOUNDS, PARTS, POWERS
from aero_compile.analysis.parts import Activation, nonlinear_kind
from aero_compile.errors import UnsupportedGraphError
from aero_compile.ir.dataflow import ancestors, live_inputs
from aero_compile.ir.ops import SCALES
from aero_compile.ir.places import place

aten = torch.ops.aten


def find_activations(inside: Sequence[fx.Node], live: set[fx.Node]) -> Iterator[Activation]:
    """Nonlinear element-wise regions of an FFN: for each part of an in-projection, what it alone goes through.

    A gate and the values it multiplies are different parts, also where one linear layer computes both. Bounds of a part
    that is multiplied by another one (`(clamp(u, −7, 7) + 1)·f(g)`, gpt-oss) are no activation.
    """
    within = set(inside)
    above = {node: ancestors([node], within) for node in inside}
    origins: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in sorted(inside, key=lambda n: len(above[n])):
        parents = [origins[parent] for parent in node.all_input_nodes if parent in within]
        starts = node.target is aten.linear.default or node.target in PARTS or not parents
        origins[node] = frozenset({node}) if starts else frozenset.union(*parents)
    for origin in [node for node in inside if origins[node] == {node}]:
        own = {node for node in inside if origins[node] == {origin}}
        nonlinear = [node for node in own - {origin} if _is_nonlinear(node, live)]
        products = [node for node in inside if origin in origins[node] and len(origins[node]) > 1]
        products = [node for node in products if node.target in SCALES and len(live_inputs(node, live)) > 1]
        if not nonlinear or (products and all(node.target in BOUNDS for node in nonlinear)):
            continue
        found = _smallest_region(nonlinear, own, above, live)
        apart = any(_is_apart(product, found.node, origin, origins, above) for product in products)
        yield dataclasses.replace(found, whole=not apart)


def _is_apart(
    product: fx.Node,
    result: fx.Node,
    origin: fx.Node,
    origins: Mapping[fx.Node, frozenset[fx.Node]],
    above: Mapping[fx.Node, set[fx.Node]],
) -> bool:
    """True if `product` multiplies what comes of an activation's `result` by something else of the same `origin`."""
    operands = [operand for operand in product.all_input_nodes if operand in origins]
    of_result = [operand for operand in operands if result in above[operand]]
    others = [operand for operand in operands if result not in above[operand] and origin in origins[operand]]
    return bool(of_result and others)


def _is_nonlinear(node: fx.Node, live: set[fx.Node]) -> bool:
    """Whether `node` is nonlinear in the one value that its inputs come from."""
    if nonlinear_kind(node, live) or node.target in POWERS:
        return True
    operands = [a for a in node.args if isinstance(a, fx.Node) and a in live]
    return node.target in SCALES and len(operands) > 1


def _smallest_region(
    nonlinear: Sequence[fx.Node], own: set[fx.Node], above: dict[fx.Node, set[fx.Node]], live: set[fx.Node]
) -> Activation:
    """The smallest part with one input and one output that all nonlinear nodes are in."""
    first = set.intersection(*(above[node] - {node} for node in nonlinear))
    exits = sorted((n for n in own if above[n].issuperset(nonlinear)), key=lambda n: len(above[n]))
    sources = sorted(first, key=lambda n: -len(above[n]))
    for exit_, source in itertools.product(exits, sources):
        region = {n for n in above[exit_] if n is not source and source in above[n]}
        reads = {p for n in region for p in live_inputs(n, live)} - region
        leaks = any(user not in region for n in region - {exit_} for user in n.users)
        if reads == {source} and not leaks and region <= own:
            nodes = tuple(sorted(region, key=lambda n: len(above[n])))
            return Activation(_kind(region, live), source, exit_, nodes)
    raise UnsupportedGraphError(f"the activation around {place(nonlinear[0])} has more than one input or output")


def _kind(region: set[fx.Node], live: set[fx.Node]) -> str:
    """Name of an activation: that of its op, or of the ops it is made of."""
    names = sorted(str(kind) for node in region if (kind := nonlinear_kind(node, live)))
    squared = any(node.target in POWERS for node in region)
    product = any(node.target in SCALES and len(live_inputs(node, live)) > 1 for node in region)
    if product and set(names) == {"sigmoid"}:
        return "quick_gelu"
    added = "squared" if squared else "product" if product else ""
    if not added and len(names) > 1 and set(names) == {"relu"}:  # relu(relu(x) + 1) is not a relu
        added = "relu"
    return "_".join(filter(None, [*sorted(set(names)), added]))
