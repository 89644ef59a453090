"""Which norm a region of arithmetic computes: LayerNorm, RMSNorm, or one with its ε outside the root.

    (x − mean)/√(var·d/(d−1) + ε)·γ   → layer_norm with ε·(d−1)/d, times √((d−1)/d)     unbiased variance
    x/max(‖x‖, ε)·√d·γ                → rms_norm                                        F.normalize
    g·x/max(‖x‖, ε)                   → deviation_norm, times g/√d                      ScaleNorm
    γ·(x − mean)/(std + ε) + b        → deviation_norm, times √((d−1)/d)                Annotated Transformer

What is matched is the function, to 1e-7 on inputs of all sizes down to 1e-6, whatever ε that takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.frontend.pointwise import agree
from aero_compile.ir.deviation_norm import deviation_norm
from aero_compile.ir.ops import SCALES, SUMS
from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import is_floating

aten = torch.ops.aten

_SCALES = ((37.0, 1.0), (1.0, 0.0), (0.01, 0.0), (1e-6, 0.0))
_BROADCASTING = SUMS | SCALES


@dataclass(frozen=True)
class MatchedNorm:
    """`factor·norm(x)·constants[weight] + constants[bias]`; `form` is `root`, or one of `deviation_norm`."""

    centered: bool
    form: str
    eps: float
    factor: float
    weight: int | None
    bias: int | None


def match_norm(
    run: Callable[[Tensor], Any], literals: Sequence[float], constants: Sequence[Tensor], x: Tensor, by_mean: bool
) -> MatchedNorm | None:
    """The norm over the last dimension that `run` computes, or None.

    Args:
        run: the region as a function of its input.
        literals: numbers written in the region, among them its ε.
        constants: values of the other tensors that the region reads, float64.
        x: random values of the input's rank and width, float64.
        by_mean: the region takes means alone, no sums or lengths ‖x‖: then 1/√d is the scale of attention scores.
    """
    width = x.shape[-1]
    x = x * max(1.0, *(number**0.5 for number in literals if number > 0), 0.0)  # of the size at which ε tells
    probes = [scale * x + shift for scale, shift in _SCALES]
    results = [run(probe) for probe in probes]
    if not all(isinstance(r, Tensor) and r.shape == x.shape and bool(r.isfinite().all()) for r in results):
        return None
    large, larger = run(2.0**20 * x), run(2.0**24 * x)
    same = float((larger - large).abs().max()) <= 1e-3 * float(large.abs().max())
    if width < 2 or not same:  # the size of x, and ε, are nothing to a norm there
        return None
    for centered, form in itertools.product((True, False), ("root", "added", "at_least")):
        for eps in _epsilons(literals, width, form):
            normal = [_normalized(p, eps, centered, form) for p in probes]
            found = _affine(normal, results, constants, _natural_factors(width, by_mean))
            if found:
                return MatchedNorm(centered, form, eps, *found)
    return None


def _epsilons(literals: Sequence[float], width: int, form: str) -> Iterator[float]:
    """What ε can be, on the scale of the population's deviation, from the numbers in the region."""
    small = sorted({number for number in literals if number > 0})
    share = (width - 1) / width
    if form == "root":
        yield from (factor * eps for eps in small for factor in (1.0, 1 / width, share))
        yield from (eps * eps / width for eps in small)  # so small an ε outside the root that it only makes 0/0 a 0
        yield 0.0
    else:
        yield from (factor * eps for eps in small for factor in (1.0, width**-0.5, math.sqrt(share)))


def _normalized(x: Tensor, eps: float, centered: bool, form: str) -> Tensor:
    if form != "root":
        return deviation_norm(x, [x.shape[-1]], None, None, eps, centered, form)
    x = x - x.mean(-1, keepdim=True) if centered else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _affine(
    normal: Sequence[Tensor], results: Sequence[Tensor], constants: Sequence[Tensor], natural: Sequence[float]
) -> tuple[float, int | None, int | None] | None:
    """Factor, weight and bias that make `results` of `normal`: each constant is used, the bias not as the weight."""
    width = normal[0].shape[-1]
    weights: list[int | None] = [None, *(i for i, c in enumerate(constants) if c.numel() in (1, width))]
    biases: list[int | None] = [None, *(i for i, c in enumerate(constants) if c.numel() == width)]
    for weight, bias in itertools.product(weights, biases):
        used = {i for i in (weight, bias) if i is not None}
        if len(used) != len(constants) or (weight is not None and weight == bias):
            continue
        scaled = normal if weight is None else [n * constants[weight].reshape(-1) for n in normal]
        centers = results if bias is None else [r - constants[bias].reshape(-1) for r in results]
        factor = float((scaled[0] * centers[0]).sum() / scaled[0].square().sum())
        known = any(abs(factor - each) <= 1e-6 * each for each in natural)
        if known and all(agree(c, factor * s) for c, s in zip(centers, scaled, strict=True)):
            return (1.0 if abs(factor - 1) < 1e-9 else factor), weight, bias
    return None


def _natural_factors(width: int, by_mean: bool) -> list[float]:
    """Factors that come of how a norm is written; any other is the model's, and stays when norms are stripped."""
    roots = [1.0, math.sqrt((width - 1) / width)]
    roots += [] if by_mean else [math.sqrt(width), math.sqrt(width - 1)]
    return [*roots, *(1 / root for root in roots)]


def insert_norm(
    rewriter: Rewriter, x: fx.Node, found: MatchedNorm, constants: Mapping[fx.Node, tuple[int, ...]], width: int
) -> fx.Node:
    """The matched norm of `x`, where the rewriter is. `constants`: what the region reads, and of which shape.

    The factor goes into the gain; where there is none, and where the op has no bias, it stands behind.
    """
    call = rewriter.call

    def vector(index: int | None, factor: float = 1.0) -> fx.Node | None:
        if index is None:
            return None
        node, size = list(constants.items())[index]
        if len(size) != 1:
            node = call(aten.reshape.default, node, [-1])
        if factor != 1.0:
            node = call(aten.mul.Tensor, node, factor)
        return node if math.prod(size) == width else call(aten.expand.default, node, [width])

    shape, weight, bias = [width], vector(found.weight, found.factor), vector(found.bias)
    behind = 1.0 if weight is not None else found.factor
    has_bias = found.centered or found.form != "root"
    inner = bias if has_bias and behind == 1.0 else None
    if found.form != "root":
        args = (x, shape, weight, inner, found.eps, found.centered, found.form)
        norm = call(deviation_norm, *args)
    elif found.centered:
        norm = call(aten.layer_norm.default, x, shape, weight, inner, found.eps)
    else:
        norm = call(aten.rms_norm.default, x, shape, weight, found.eps)
    if behind != 1.0:
        norm = call(aten.mul.Tensor, norm, behind)
    return norm if bias is inner else call(aten.add.Tensor, norm, bias)


def drop_expansions(graph: fx.Graph, live: set[fx.Node], values: Mapping[fx.Node, Any]) -> None:
    """Let arithmetic broadcast by itself: x/expand(‖x‖, […, d]) → x/‖x‖."""
    for node in list(graph.nodes):
        if node.target is not aten.expand.default or node not in live or not is_floating(values[node]):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        for user in list(node.users):
            others = [other for other in user.all_input_nodes if other is not node]
            same = [other for other in others if getattr(values.get(other), "shape", None) == values[node].shape]
            if user.target in _BROADCASTING and same and values[source].dim() == values[node].dim():
                user.replace_input_with(node, source)
        if not node.users:
            graph.erase_node(node)
