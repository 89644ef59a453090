"""Find feed-forward blocks: two linear layers in a row whose result is added to what the first one reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from aero_compile.parts import ACTIVATIONS, NORMS, Attention, FeedForward
from aero_compile.rewriting import VIEWS, ancestors, live_inputs, source_path, through_views

aten = torch.ops.aten

_BRANCH_OPS = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.type_as.default})
_FFN_OPS = frozenset(
    {
        *ACTIVATIONS,
        *NORMS,
        *_BRANCH_OPS,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.pow.Tensor_Scalar,
        aten.square.default,
        aten.abs.default,
        aten.exp.default,
        aten.erf.default,
        aten.clamp.default,
        aten.minimum.default,
        aten.maximum.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.select.int,
    }
)


_PASSED = VIEWS | NORMS | _BRANCH_OPS | {aten.add.Tensor}
"""Ops between an FFN's output and the residual stream."""


def find_ffns(order: Sequence[fx.Node], live: set[fx.Node], attentions: Sequence[Attention]) -> Iterator[FeedForward]:
    """Feed-forward blocks: two linear layers in a row whose result is added to what the first one reads."""
    softmaxes = [attention.softmax for attention in attentions]
    found: list[FeedForward] = []
    for node in order:
        if node.target is not aten.linear.default:
            continue
        inner = _ffn_inside(node, live)
        if inner is None:
            continue
        inputs, activations = inner
        entries = {_live_operand(linear, live) for linear in inputs}
        bases = {through_views(entry) for entry in entries}
        if len(bases) != 1:
            continue
        entry = bases.pop()
        merge = _merge(node, entry, live)
        if merge is None:
            continue
        branch, residual = merge
        name = source_path(node).rpartition(".")[0] or source_path(node)
        found.append(FeedForward(len(found), entry, inputs, node, activations, branch, residual, name))
    if len(found) == len(attentions):
        yield from found
        return
    for ffn in found:
        above = ancestors([ffn.output], live)
        layer = sum(softmax in above for softmax in softmaxes) - 1
        yield FeedForward(**(vars(ffn) | {"layer": max(layer, 0)}))


def _live_operand(node: fx.Node, live: set[fx.Node]) -> fx.Node:
    return live_inputs(node, live)[0]


def _ffn_inside(output: fx.Node, live: set[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """In-projections and activations above the linear node `output`, if nothing but an FFN is there."""
    inputs: dict[fx.Node, None] = {}
    activations: dict[fx.Node, None] = {}
    stack = [_live_operand(output, live)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.linear.default:
            inputs[node] = None
            continue
        getitem = getattr(node.target, "__name__", "") == "getitem"
        inside = node.target in _FFN_OPS or node.target in VIEWS or node.op == "call_module" or getitem
        if not inside or len(seen) > 64:
            return None
        if node.target in ACTIVATIONS:
            activations[node] = None
        stack.extend(live_inputs(node, live))
    return (tuple(inputs), tuple(reversed(activations))) if inputs else None


def _merge(
    output: fx.Node, entry: fx.Node, live: set[fx.Node]
) -> tuple[tuple[fx.Node, fx.Node], tuple[tuple[fx.Node, fx.Node], ...]] | None:
    """Follow the FFN's result to the add with the residual stream it came from."""
    bases = _bases(entry, live)
    node, branch = output, None
    residual: list[tuple[fx.Node, fx.Node]] = []
    for _ in range(12):
        users = [user for user in node.users if user in live]
        if len(users) != 1:
            return None
        user = users[0]
        if user.target is aten.add.Tensor and len(live_inputs(user, live)) == 2:
            sibling = next(p for p in live_inputs(user, live) if p is not node)
            branch = branch or (user, node)
            residual.append((user, sibling))
            if _adds_up(sibling, bases, live):
                return branch, tuple(residual)
        elif user.op != "call_module" and user.target not in _PASSED:
            return None
        node = user
    return None


def _bases(entry: fx.Node, live: set[fx.Node]) -> set[fx.Node]:
    """Values that are the residual stream behind `entry`: itself, and what its norm was applied to."""
    bases = {entry}
    node = entry
    while True:
        below = through_views(node)
        if below.target in NORMS or below.op == "call_module":
            below = through_views(live_inputs(below, live)[0])
        if below is node:
            return bases
        bases.add(below)
        node = below


def _adds_up(node: fx.Node, bases: set[fx.Node], live: set[fx.Node], depth: int = 4) -> bool:
    """Whether `node` is a sum that one of `bases` is a term of."""
    node = through_views(node)
    if node in bases:
        return True
    passes = node.target in _BRANCH_OPS or node.op == "call_module" or node.target is aten.add.Tensor
    return depth > 0 and passes and any(_adds_up(p, bases, live, depth - 1) for p in live_inputs(node, live))
