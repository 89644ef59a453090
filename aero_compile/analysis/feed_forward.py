"""Find feed-forward blocks: two linear layers in a row whose result is added to what the first one reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from aero_compile.analysis.parts import Activation, FeedForward, nonlinear_kind
from aero_compile.errors import UnsupportedGraphError
from aero_compile.ir.dataflow import ancestors, live_inputs, through_views
from aero_compile.ir.ops import CHOICES, NORMS, SCALES, SPLITS, SUMS, VIEWS, of_form
from aero_compile.ir.places import place, source_path

aten = torch.ops.aten

_BRANCH_OPS = SCALES | of_form("negation")
_POWERS = of_form("power")
_PARTS = of_form("part", "slice", "select")
_FFN_OPS = VIEWS | SPLITS | NORMS | SUMS | CHOICES | _BRANCH_OPS | _POWERS | _PARTS | {aten.mean.dim}
_FFN_OPS |= of_form("activation", "prelu", "function", "extreme", "vector_norm", "cat")

_PASSED = VIEWS | NORMS | SUMS | _BRANCH_OPS | {aten.tanh.default}
"""Ops between an FFN's output and the residual stream."""

_NORM_OPS = _PASSED | {aten.mean.dim}
"""Ops that norms, and what replaces them, consist of."""


def find_ffns(
    order: Sequence[fx.Node],
    live: set[fx.Node],
    depth: Mapping[fx.Node, int],
    layers: int,
    values: Mapping[fx.Node, Any],
) -> Iterator[FeedForward]:
    """Feed-forward blocks in graph order; `depth` says how many of the `layers` attentions a node comes after."""
    found: list[FeedForward] = []
    for node in order:
        if node.target is not aten.linear.default:
            continue
        inside = _inside(node, live, values)
        inputs = tuple(n for n in inside if n.target is aten.linear.default)
        bases = {through_views(live_inputs(linear, live)[0]) for linear in inputs}
        if len(bases) != 1:
            continue
        entry = bases.pop()
        merge = find_merge(node, entry, live, depth)
        if merge is None:
            continue
        branch, residual = merge
        residual += tuple(_rest_of_sum(residual[-1][0], _bases(entry, live), live))
        name = source_path(node).rpartition(".")[0] or source_path(node)
        activations = tuple(find_activations(inside, live))
        found.append(FeedForward(len(found), entry, inputs, node, activations, branch, residual, name))
    each = len(found) // layers
    for number, ffn in enumerate(found):
        regular = each * layers == len(found)
        layer = number // each if regular else max(depth[ffn.output] - 1, 0)
        yield dataclasses.replace(ffn, layer=layer)


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
        known = node.target in _FFN_OPS or node.op == "call_module" or _is_elementwise(node, live, values)
        if not known or len(seen) > 64:
            return ()
        stack.extend(live_inputs(node, live))
    return tuple(seen)


def _is_elementwise(node: fx.Node, live: set[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether an op that is not in our tables maps one hidden value to another of the same shape (SELU, PReLU)."""
    inputs = live_inputs(node, live)
    single = len(inputs) == 1 and nonlinear_kind(node, live) is not None
    return single and getattr(values[inputs[0]], "shape", None) == getattr(values[node], "shape", None)


def find_activations(inside: Sequence[fx.Node], live: set[fx.Node]) -> Iterator[Activation]:
    """Nonlinear element-wise regions of an FFN: for each part of an in-projection, what it alone goes through.

    A gate and the values it multiplies are different parts, also where one linear layer computes both.
    """
    within = set(inside)
    above = {node: ancestors([node], within) for node in inside}
    origins: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in sorted(inside, key=lambda n: len(above[n])):
        parents = [origins[parent] for parent in node.all_input_nodes if parent in within]
        starts = node.target is aten.linear.default or node.target in _PARTS or not parents
        origins[node] = frozenset({node}) if starts else frozenset.union(*parents)
    for origin in [node for node in inside if origins[node] == {node}]:
        own = {node for node in inside if origins[node] == {origin}}
        nonlinear = [node for node in own - {origin} if _is_nonlinear(node, live)]
        if nonlinear:
            yield _smallest_region(nonlinear, own, above, live)


def _is_nonlinear(node: fx.Node, live: set[fx.Node]) -> bool:
    """Whether `node` is nonlinear in the one value that its inputs come from."""
    if nonlinear_kind(node, live) or node.target in _POWERS:
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
    names = {nonlinear_kind(node, live) for node in region} - {None}
    squared = any(node.target in _POWERS for node in region)
    if names == {"sigmoid"} and any(n.target is aten.mul.Tensor and len(live_inputs(n, live)) > 1 for n in region):
        return "quick_gelu"
    return "_".join([*sorted(str(name) for name in names), *(["squared"] if squared else [])]) or "product"


def find_merge(
    output: fx.Node, entry: fx.Node, live: set[fx.Node], depth: Mapping[fx.Node, int] | None = None
) -> tuple[tuple[fx.Node, fx.Node], tuple[tuple[fx.Node, fx.Node], ...]] | None:
    """Follow the result `output` of a block to the add with the residual stream that its input `entry` came from.

    With `depth`, where no term of the additions on the way is the stream itself, a term that comes after more
    attentions than `entry` stands for it: the attention of a parallel block without a residual connection.

    Returns:
        The (add, argument) edge of the result, and those of all it is added to; None if it is added to nothing.
    """
    bases = _bases(entry, live)
    node, branch, joined = output, None, 0
    residual: list[tuple[fx.Node, fx.Node]] = []
    for _ in range(12):
        users = _users(node, live)
        if len(users) != 1:
            break
        user = users[0]
        if user.target is aten.add.Tensor and len(live_inputs(user, live)) == 2:
            sibling = next(p for p in live_inputs(user, live) if p is not node)
            branch = branch or (user, node)
            residual.append((user, sibling))
            if _adds_up(sibling, bases, live):
                return branch, tuple(residual)
            if depth is not None and depth[sibling] > depth[entry]:
                joined = len(residual)
        elif user.op != "call_module" and user.target not in _PASSED:
            break
        node = user
    return (branch, tuple(residual[:joined])) if branch and joined else None


def _users(node: fx.Node, live: set[fx.Node]) -> list[fx.Node]:
    """Live users of `node`; a mean that is only subtracted from `node` again (a frozen norm's) is none of its own."""
    users = [user for user in node.users if user in live]
    return [user for user in users if user.target is not aten.mean.dim or not set(user.users) <= set(users)]


def _rest_of_sum(merge: fx.Node, bases: set[fx.Node], live: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What is added to `merge` alone and reads the same stream: the attention in (x + ffn) + attention."""
    users = _users(merge, live)
    while len(users) == 1 and users[0].target is aten.add.Tensor and len(live_inputs(users[0], live)) == 2:
        sibling = next(p for p in live_inputs(users[0], live) if p is not merge)
        if not bases & ancestors([sibling], live):
            return
        yield users[0], sibling
        merge = users[0]
        users = _users(merge, live)


def _bases(entry: fx.Node, live: set[fx.Node]) -> set[fx.Node]:
    """Values that are the residual stream behind `entry`: itself, and what norms, or what stands for them, take.

    A norm may be written as arithmetic (frozen statistics, tanh), so this goes back, latest node first, as long as
    there are such ops only; wherever a single value is left, everything above was computed from it alone.
    """
    bases: set[fx.Node] = set()
    open_nodes = {entry}
    for _ in range(24):
        node = max(open_nodes)
        if len(open_nodes) == 1:
            bases.add(node)
        if node.op != "call_module" and node.target not in _NORM_OPS:
            break
        open_nodes.remove(node)
        open_nodes.update(live_inputs(node, live))
        if not open_nodes:
            break
    return bases


def _adds_up(node: fx.Node, bases: set[fx.Node], live: set[fx.Node], depth: int = 4) -> bool:
    """Whether `node` is a sum that one of `bases` is a term of."""
    node = through_views(node)
    if node in bases:
        return True
    passes = node.target in _BRANCH_OPS or node.op == "call_module" or node.target is aten.add.Tensor
    return depth > 0 and passes and any(_adds_up(p, bases, live, depth - 1) for p in live_inputs(node, live))
