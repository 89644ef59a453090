"""Find the public mask in front of a softmax, so that nothing masked or infinite enters the computation.

Attention masks arrive as arithmetic on the scores: an added table of 0 and -inf, `masked_fill`,
`where`, a product with 0/1 followed by -1e4, ALiBi slopes mixed in. All of it is affine in the scores
with public coefficients, so the walk goes back from the softmax over such operations to the last value that
is not, and *probes* the collected function f in PyTorch: f(s) = scale * s + bias wherever f(0) is a
moderate number, and the entry is masked wherever f stays below every score that a model could mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from aero_compile.ir.mask_values import MASKED_BELOW
from aero_compile.ir.ops import ELEMENTWISE, OPS, names_of, of_form
from aero_compile.ir.ownership import Domain
from aero_compile.runtime.lowering.partition import Partition, op_name

aten = torch.ops.aten

# Elementwise operations that are affine in their live operand when the others are public, and bounds of scores.
_AFFINE = names_of(
    frozenset(op for op in ELEMENTWISE if OPS[op].linear)
    | of_form("cast_as", "expand", "expand_as")
    | {aten.maximum.default, aten.clamp.default, aten.clamp_min.default}
)
_CASTS = names_of(of_form("cast", "cast_as"))


@dataclass(frozen=True)
class Masked:
    """The input of one softmax as `scale * core + bias` where `allowed`, and masked elsewhere.

    `scale` and `bias` broadcast to the scores; None stands for 1 and 0. `allowed` is boolean and
    broadcasts too; None means that every entry is allowed. `finite`: where what is masked was masked by a finite
    number, None if nowhere.
    """

    core: fx.Node
    scale: npt.NDArray[np.float64] | None
    bias: npt.NDArray[np.float64] | None
    allowed: npt.NDArray[np.bool_] | None
    finite: npt.NDArray[np.bool_] | None = None

    def empty_row_with_numbers(self, dim: int, ndim: int) -> bool:
        """Whether some row along `dim` allows nothing, but has finite entries: PyTorch averages over them."""
        if self.allowed is None or self.finite is None:
            return False
        tables = np.broadcast_arrays(self.allowed, self.finite)
        allowed, finite = (each.reshape((1,) * (ndim - each.ndim) + each.shape).any(dim) for each in tables)
        return bool((~allowed & finite).any())


def find_mask(part: Partition, scores: fx.Node) -> Masked:
    """Split `scores`, the live input of a softmax, into its unmasked core and its public mask; done once a node."""
    if scores not in part.masks:
        part.masks[scores] = _find_mask(part, scores)
    found: Masked = part.masks[scores]
    return found


def _find_mask(part: Partition, scores: fx.Node) -> Masked:
    walk = [scores]
    for node in _affine_ancestors(part, scores):
        walk.append(node)
    for depth in range(len(walk) - 1, 0, -1):  # prefer the longest chain that probes as affine
        found = _probe(part, walk[: depth + 1])
        if found is not None:
            return found
    return Masked(scores, None, None, None)


def _affine_ancestors(part: Partition, node: fx.Node) -> Iterator[fx.Node]:
    while node.op == "call_function" and op_name(node) in _AFFINE:
        live = [used for used in node.all_input_nodes if part.is_live(used)]
        others = [used for used in node.all_input_nodes if not part.is_live(used)]
        if len(live) != 1 or any(part.domains[used] is not Domain.PUBLIC for used in others):
            return
        node = live[0]
        yield node


def _probe(part: Partition, chain: list[fx.Node]) -> Masked | None:
    """Evaluate the chain (softmax input first, core last) on constant cores and read off the mask.

    A constant core has one entry that broadcasts: a mask that all heads share is evaluated once, not once a head.
    """
    core = chain[-1]
    if not part.is_float.get(core, False) or part.shapes[core] != part.shapes[chain[0]]:
        return None
    at = {value: _evaluate(part, chain, value) for value in (0.0, 1.0, 3.0)}
    allowed = at[0.0] > MASKED_BELOW
    if bool((at[3.0] > MASKED_BELOW).ne(allowed).any()):
        return None
    bias = torch.where(allowed, at[0.0], 0.0)
    scale = torch.where(allowed, at[1.0] - at[0.0], 1.0)
    straight = torch.where(allowed, at[0.0] + 3 * scale - at[3.0], 0.0)
    if bool((straight.abs() > 1e-9 * (1 + bias.abs())).any()) or not bool(torch.isfinite(bias).all()):
        return None
    finite = ~allowed & torch.isfinite(at[0.0])
    return Masked(
        core,
        None if bool((scale == 1).all()) else _compact(_spread(scale, allowed)),
        None if bool((bias == 0).all()) else _compact(bias),
        None if bool(allowed.all()) else _compact(allowed),
        _compact(finite) if bool(finite.any()) else None,
    )


def _evaluate(part: Partition, chain: list[fx.Node], value: float) -> torch.Tensor:
    core = torch.full([1] * len(part.shapes[chain[-1]]), value, dtype=torch.float64)
    environment: dict[fx.Node, Any] = {chain[-1]: core}

    def resolve(node: fx.Node) -> Any:
        found = environment[node] if node in environment else part.known[node]
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            return found.detach().cpu().to(torch.float64)
        return found.cpu() if isinstance(found, torch.Tensor) else found

    for node in reversed(chain[:-1]):
        if op_name(node) in _CASTS:
            environment[node] = environment[next(u for u in node.all_input_nodes if part.is_live(u))]
            continue
        args = fx.map_arg(node.args, resolve)
        kwargs = fx.map_arg(node.kwargs, resolve)
        assert callable(node.target)
        environment[node] = node.target(*args, **kwargs)
    result = environment[chain[0]]
    assert isinstance(result, torch.Tensor)
    return result.to(torch.float64)


def _spread(scale: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Give masked entries the scale of the allowed ones when it is one number, so that it compacts."""
    values = scale[allowed]
    if values.numel() and bool((values == values[0]).all()):
        return torch.full_like(scale, float(values[0]))
    return scale


def _compact(table: torch.Tensor) -> npt.NDArray[Any]:
    """Shrink every dimension along which the table does not vary to size 1 (it broadcasts back)."""
    for dim in range(table.dim()):
        first = table.narrow(dim, 0, 1)
        if bool((table == first).all()):
            table = first
    return table.contiguous().numpy()
