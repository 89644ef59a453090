"""Measure what values reach, and refuse those that do not fit: fixed-point products wrap silently beyond their range.

In a k-bit ring with f fraction bits a product holds 2f fraction bits before it is truncated, so what is
multiplied, and every sum of products, must stay below about 2^(k - 2f - 3) (2^25 for k = 64, f = 18).
``private_inference`` has weights and tokens in one process, so it evaluates the model in plaintext first
and looks at every live value. Where the parties run on two machines nobody can do that: give
``compile_model`` representative text as ``calibration``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import fx

from aero_compile.errors import LoweringError
from aero_compile.runtime.arithmetic.exponential import Exponential, choose_power
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Tolerances
from aero_compile.runtime.lowering.partition import MASKED_BELOW, SOFTMAXES, op_name, place_of
from aero_compile.runtime.operators.products import NORM_GAIN
from aero_compile.runtime.spu_config import largest_value


@dataclass
class RangeCheck:
    """An observer for ``partition``: the values too large for the fixed-point format, and how far scores spread.

    ``spreads`` has, for each softmax, the largest difference of two allowed scores of a row seen so far.
    """

    ring_bits: int
    fraction_bits: int
    tolerances: Tolerances = DEFAULT
    found: list[tuple[str, str]] = field(default_factory=list)
    spreads: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Largest magnitude that may be multiplied safely."""
        return largest_value(self.ring_bits, self.fraction_bits)

    @property
    def inverse_limit(self) -> float:
        """Largest argument of reciprocal, square root and their inverse (they normalize within 2f bits)."""
        return 2.0 ** (self.fraction_bits - 1)

    def __call__(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        inner = _INNER.get(op_name(node).rpartition(".")[2])
        if inner is not None:
            for what, size, limit in inner(self, args, kwargs):
                self._compare(node, what, size, limit)
        if node.target in SOFTMAXES:
            self.spreads[node.name] = max(self.spreads.get(node.name, 0.0), _spread(args, kwargs))
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            self._compare(node, "result", float(value.abs().max()), self.limit)

    def _compare(self, node: fx.Node, what: str, size: float, limit: float) -> None:
        if not size <= limit:
            message = (
                f"the {what} of {op_name(node)} (node {node.name}, in {place_of(node)}) reaches {size:.4g}; "
                f"with a {self.ring_bits}-bit ring and {self.fraction_bits} fraction bits it must stay below "
                f"{limit:.4g}"
            )
            self.found.append((node.name, message))

    def raise_first(
        self,
        executed: Collection[str],
        weights: Mapping[str, npt.NDArray[Any]],
        exponentials: Mapping[str, Exponential] | None = None,
    ) -> None:
        """Raise LoweringError if a weight, or a value of one of the ``executed`` nodes, was too large.

        Nodes that are not executed (masked scores, for one) may hold anything. ``exponentials`` tells how each
        softmax computes its exponential, and so how far its scores may spread.
        """
        messages = [message for name, message in self.found if name in executed]
        for name, chosen in (exponentials or {}).items():
            if self.spreads.get(name, 0.0) > chosen.widest:
                messages.append(
                    f"the scores of softmax {name} spread over {self.spreads[name]:.4g}; the exponential that "
                    f"calibration chose holds up to {chosen.widest:.4g}: calibrate on more text"
                )
        for name, array in weights.items():
            if not largest(array) <= self.limit:
                messages.append(f"the server's {name} reaches {largest(array):.4g}, over {self.limit:.4g}")
        if messages:
            raise LoweringError(
                f"{messages[0]}. Larger values would wrap around silently; use fewer fraction bits or a "
                "larger ring, or rescale the model"
            )


def largest(array: npt.NDArray[Any]) -> float:
    """Largest magnitude in an array, 0 if it is empty; NaN if it holds one."""
    return max(abs(float(array.max())), abs(float(array.min()))) if array.size else 0.0


_Findings = list[tuple[str, float, float]]


def _norm(check: RangeCheck, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Findings:
    x, shape = args[0].double(), args[1]
    dims = tuple(range(-len(shape), 0))
    squares = x.square().sum(dims)
    return [
        ("sum of squares", float(squares.max()), check.limit),
        ("variance", float(squares.max()) / math.prod(shape), check.inverse_limit / NORM_GAIN),
    ]


def _spread(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Largest difference between two allowed scores of one row."""
    scores = args[0].double()
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    allowed = scores > MASKED_BELOW
    low = torch.where(allowed, scores, math.inf).amin(dim)
    high = torch.where(allowed, scores, -math.inf).amax(dim)
    return float(torch.nan_to_num(high - low, nan=0.0, neginf=0.0).max())


def _exp(check: RangeCheck, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Findings:
    return [("argument", float((-args[0]).max()), -choose_power(check.tolerances.exp).lowest)]


def _divisor(check: RangeCheck, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Findings:
    other = args[1] if len(args) > 1 else args[0]
    if not isinstance(other, torch.Tensor):
        return []
    return [
        ("divisor", float(other.abs().max()), check.inverse_limit),
        ("inverse of the divisor", float((1 / other.abs()).max()), check.inverse_limit),
    ]


def _root(check: RangeCheck, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Findings:
    return [("argument", float(args[0].max()), check.inverse_limit)]


_INNER: dict[str, Callable[[RangeCheck, tuple[Any, ...], dict[str, Any]], _Findings]] = {
    "layer_norm": _norm,
    "rms_norm": _norm,
    "exp": _exp,
    "div": _divisor,
    "reciprocal": _divisor,
    "sqrt": _root,
    "rsqrt": _root,
}
