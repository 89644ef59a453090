"""The linear layers that read a value, and what may be moved into their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.graphs.rewriting import SHAPE_ONLY, insert_call

aten = torch.ops.aten

LARGEST, SMALLEST = 64.0, 1 / 16
"""Largest gain that weights take up, and how small it may be: they lose the bits that a gain takes away."""


def linear_readers(node: fx.Node, width: int) -> list[fx.Node]:
    """The linear layers that read `node`, whose last dimension has `width` channels; none if anything else does.

    Between them there may be reshapes that keep the channels, and cuts along other dimensions.
    """
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in SHAPE_ONLY:
            continue
        if user.target is aten.linear.default and user.args[0] is node:
            inner = [user]
        elif _keeps_channels(user, width):
            inner = linear_readers(user, width)
        else:
            inner = []
        if not inner:
            return []
        found += inner
    return found


def _keeps_channels(view: fx.Node, width: int) -> bool:
    """Whether the last dimension is as it was, seen from the arguments; 1 would be no proof."""
    if view.target is aten.reshape.default:
        return view.args[1][-1] == width != 1  # type: ignore[index]
    return view.target in (aten.alias.default, aten.clone.default, aten.contiguous.default)


def other_reader(node: fx.Node) -> str:
    """What reads `node` besides linear layers, for reports."""
    for user in node.users:
        if user.target in SHAPE_ONLY or user.target is aten.linear.default:
            continue
        if user.target is aten.reshape.default:
            deeper = other_reader(user)
            if deeper:
                return deeper
            continue
        return "the output" if user.op == "output" else str(user.target).removeprefix("aten.").partition(".")[0]
    return ""


def scale_columns(linear: fx.Node, gain: Any, *, inverse: bool = False) -> None:
    """linear(x·gain, W, b) → linear(x, W·diag(gain), b); divided by `gain` if `inverse`."""
    value, weight, *rest = linear.args
    target = aten.div.Tensor if inverse else aten.mul.Tensor
    linear.args = (value, insert_call(linear.graph, linear, target, weight, gain), *rest)


def move_shift(linear: fx.Node, shift: Any, *, negative: bool = False) -> None:
    """linear(x + shift, W, b) → linear(x, W, b + W·shift); − if `negative`."""

    def call(target: Any, *args: Any) -> fx.Node:
        return insert_call(linear.graph, linear, target, *args)

    value, weight, *rest = linear.args
    moved = call(aten.sum.dim_IntList, call(aten.mul.Tensor, weight, shift), [1])
    if rest and rest[0] is not None:
        bias = call(aten.sub.Tensor if negative else aten.add.Tensor, rest[0], moved)
    else:
        bias = call(aten.neg.default, moved) if negative else moved
    linear.args = (value, weight, bias)
