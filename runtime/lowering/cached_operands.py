"""Products that read cached rows: which factor is made of a cached value, and along which of its axes positions lie.

A cached value reaches its product through views and repetitions alone (`aero_compile.analysis.new_positions`), so each
element of the factor is one of the cached value's: these moves are run on the numbers of its elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aero_compile.analysis.position_slicing import Axis
from aero_compile.ir.ops import facts, of_form
from aero_compile.runtime.partition.partition import Partition

_SPREADS = of_form("repeat", "repeat_interleave", "expand")


@dataclass(frozen=True)
class CachedOperand:
    """The right factor [..., inner, columns] of a product: `keys` where its columns are positions, else its rows are.

    `repeats`: how many consecutive matrices are equal, as of grouped queries.
    """

    keys: bool
    repeats: int


def cached_operand(part: Partition, factor: fx.Node) -> CachedOperand | None:
    """Find out how a factor is made of one cached value; None: it is not, or holds other rows beside it."""
    moves, node = list[fx.Node](), factor
    while node not in part.results:
        live = [each for each in node.all_input_nodes if part.is_live(each)]
        if node.op != "call_function" or len(live) != 1 or not _moves(node):
            return None
        moves.append(node)
        node = live[0]
    axis = part.axes[part.results.index(node)]
    if axis is None:
        return None
    elements = _moved(part, node, list(reversed(moves)))
    if elements.is_floating_point() or elements.dim() < 2:
        return None
    places = _positions(part.shapes[node], axis, part.room)[elements]
    count = torch.arange(part.room)
    for keys, own in ((True, count), (False, count[:, None])):
        if places.shape[-1 if keys else -2] == part.room and bool((places == own).all()):
            return CachedOperand(keys, _repeats(elements.flatten(0, -3) if elements.dim() > 2 else elements[None]))
    return None


def _moves(node: fx.Node) -> bool:
    return bool(facts(node.target).view) or node.target in _SPREADS


def _moved(part: Partition, cached: fx.Node, moves: list[fx.Node]) -> torch.Tensor:
    """The numbers of the elements of a cached value, moved as it is."""
    shape = part.shapes[cached]
    values: dict[fx.Node, Any] = {cached: torch.arange(torch.Size(shape).numel()).reshape(shape)}
    for node in moves:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values.get(each, part.known.get(each)))
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    found: torch.Tensor = values[moves[-1] if moves else cached]
    return found


def _positions(shape: tuple[int, ...], axis: Axis, room: int) -> torch.Tensor:
    """The position of each element of a cached value, in order."""
    behind = [1] * (len(shape) - axis.dim - 1)
    places = torch.arange(shape[axis.dim]) // axis.inner[0] % room
    return places.reshape(-1, *behind).expand(shape).reshape(-1)


def _repeats(matrices: torch.Tensor) -> int:
    """The largest size of equal groups of consecutive matrices [n, rows, columns], all of each group alike."""
    count = matrices.shape[0]
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    groups = (matrices.reshape(count // size, size, -1) for size in sizes)
    return next(group.shape[1] for group in groups if bool((group == group[:, :1]).all()))
