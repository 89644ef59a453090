"""What private products cost that compute a state of the residual stream, as it is and in other bases."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from aero_compile.analysis.residual_stream import Basis, ResidualStream, State


def cost(stream: ResidualStream, state: State) -> int:
    """Elements of the weights that private products compute `state` with; a private scale counts as a product."""
    affine = stream.affine
    linear = [node for node in state.region if node.target is torch.ops.aten.linear.default]
    total = sum(int(affine.values[node.all_input_nodes[1]].numel()) for node in linear)
    return total + sum(stream.width(node) ** 2 for node in state.region if affine.is_private(node))


def new_cost(
    stream: ResidualStream, state: State, bases: Mapping[fx.Node, Basis], parent: fx.Node | None = None
) -> int:
    """The same, once it is rewritten in `bases`; `parent` is the state that it then continues without a product."""
    square = stream.width(state.node) ** 2
    total, turned = 0, state.node in bases
    for leaf, shape in (*[each for each in state.leaves if each[0] is not parent], *state.averaged):
        if leaf not in stream.live:
            continue
        if stream.is_looked_up(leaf, state):
            total += stream.vocabulary * (stream.width(state.node) - stream.width(leaf))
        elif shape or turned or leaf in bases:
            total += math.prod(shape) if shape else square
    if not turned and not stream.is_public(state):
        scales = [s for leaf, s in state.skips if s.dim() == 0 and leaf is not parent and leaf not in bases]
        total += square * sum(float(s) != 1 for s in scales)
    return total
