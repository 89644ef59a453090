"""The linear layers that read a value, and what may be moved into their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.ops import SHAPE_ONLY, VIEWS
from aero_compile.ir.ownership import given_nodes
from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten

LARGEST, SMALLEST = 64.0, 1 / 16
"""Largest gain that is folded into weights, and how small it may be: they lose the bits that a gain takes away."""


def linear_readers(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The linear layers that read `node`, directly or through views that keep its last dimension; none if others do.

    Args:
        node: a hidden value, `[..., d]`.
        values: the fake value of every node.
    """
    shape = values[node].shape
    return _readers(node, torch.arange(shape[-1]).expand(shape), shape[-1], values)


def _readers(node: fx.Node, numbers: Tensor, width: int, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """As `linear_readers`; `numbers` are the channels that the elements of `node` belong to."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in SHAPE_ONLY:
            continue
        inner: list[fx.Node] = []
        if user.target is aten.linear.default and user.args[0] is node:
            in_order = numbers.shape[-1] == width and bool((numbers == torch.arange(width)).all())
            inner = [user] if in_order and node not in user.args[1:] else []
        elif user.target in VIEWS:
            swap = {node: numbers}
            args, kwargs = fx.map_arg((user.args, user.kwargs), lambda each: swap.get(each, values[each]))  # noqa: B023
            inner = _readers(user, user.target(*args, **kwargs), width, values)
        if not inner:
            return []
        found += inner
    return found


def other_reader(node: fx.Node) -> str:
    """What reads `node` besides linear layers, for reports."""
    for user in node.users:
        if user.target in SHAPE_ONLY or user.target is aten.linear.default:
            continue
        if user.target in VIEWS:
            deeper = other_reader(user)
            if deeper:
                return deeper
            continue
        return "the output" if user.op == "output" else str(user.target).removeprefix("aten.").partition(".")[0]
    return ""


def keeps_given(model: GraphModel, linears: Sequence[fx.Node], moved: Sequence[Any]) -> str:
    """Why numbers do not go into these layers' weights: clients are given the weights alone; empty if they go."""
    given = given_nodes(model, model.graph)
    if not given or all(each in given for each in moved if isinstance(each, fx.Node)):
        return ""
    return "clients are given the weight that it would go into" if any(x.args[1] in given for x in linears) else ""


def scale_columns(linear: fx.Node, gain: Any, *, inverse: bool = False) -> None:
    """linear(x·gain, W, b) → linear(x, W·diag(gain), b); divided by `gain` if `inverse`."""
    value, weight, *rest = linear.args
    target = aten.div.Tensor if inverse else aten.mul.Tensor
    linear.args = (value, Rewriter(linear).call(target, weight, gain), *rest)


def move_shift(linear: fx.Node, shift: Any, *, negative: bool = False) -> None:
    """linear(x + shift, W, b) → linear(x, W, b + W·shift); − if `negative`."""
    call = Rewriter(linear).call
    value, weight, *rest = linear.args
    moved = call(aten.sum.dim_IntList, call(aten.mul.Tensor, weight, shift), [1])
    if rest and rest[0] is not None:
        bias = call(aten.sub.Tensor if negative else aten.add.Tensor, rest[0], moved)
    else:
        bias = call(aten.neg.default, moved) if negative else moved
    linear.args = (value, weight, bias)
