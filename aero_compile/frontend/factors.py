"""Group the factors of a product by what they are computed from.

An activation times a value of another branch, or times weights, can be written in any order of factors. Before → after:
    (u·g)·sigmoid(g)         → u·(g·sigmoid(g))
    u·g/(1 + exp(−g))        → u·(g/(1 + exp(−g)))
    (u·g)·(1 + erf(g/√2))·½  → u·(g·(1 + erf(g/√2)))·½
    (w·g)·sigmoid(g)         → (g·sigmoid(g))·w          w: weights, or any table

Products whose factors already stand together stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aero_compile.analysis.block_ops import PARTS
from aero_compile.ir.dataflow import live_inputs, live_values
from aero_compile.ir.ops import NORMS, PRODUCERS, SCALES, SPLITS
from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import is_floating
from aero_compile.model import TransformedModel

aten = torch.ops.aten

_STARTS = PRODUCERS | NORMS | PARTS | SPLITS
"""Ops whose result is taken as one value, whatever it is computed from."""

Origins = Mapping[fx.Node, frozenset[fx.Node]]


@dataclass(frozen=True)
class _Factor:
    """A factor of a product: a node or a number; `below` if the product is divided by it."""

    value: Any
    below: bool


def group_factors(model: TransformedModel) -> None:
    """Rewrite every product of `model`'s graph in which factors of one origin stand apart."""
    live, values = live_values(model)
    origins = origins_of([node for node in model.graph.nodes if node in live], live)
    for root in reversed(list(model.graph.nodes)):
        if root.target in SCALES and root in live and root.users and not root.kwargs and is_floating(values[root]):
            factors = list(_factors(root, root, origins, values))
            groups = _groups(factors, origins)
            if len(factors) > 2 and any(len(group) > 1 for group in groups.values()):
                _regroup(root, factors, groups, origins)


def origins_of(order: list[fx.Node], live: set[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Map each live node to the results of products, norms and cuts that it is computed from by other ops."""
    origins: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in order:
        parents = [origins[parent] for parent in live_inputs(node, live) if parent in origins]
        starts = node.target in _STARTS or not parents
        origins[node] = frozenset({node}) if starts else frozenset.union(*parents)
    return origins


def _factors(node: fx.Node, root: fx.Node, origins: Origins, values: Mapping[fx.Node, Any]) -> Iterator[_Factor]:
    """Factors of `node`, through products that nothing else reads."""
    inner = node is root or (len(node.users) == 1 and node in origins and not node.kwargs)
    if node.target not in SCALES or not inner or not is_floating(values[node]):
        yield _Factor(node, below=False)
        return
    for place, operand in enumerate(node.args):
        inverse = node.target is aten.div.Tensor and place == 1
        found = _factors(operand, root, origins, values) if isinstance(operand, fx.Node) else [_Factor(operand, False)]
        for factor in found:
            yield _Factor(factor.value, factor.below != inverse)


def _groups(factors: list[_Factor], origins: Origins) -> dict[frozenset[fx.Node], list[_Factor]]:
    """The live factors by origin."""
    groups: dict[frozenset[fx.Node], list[_Factor]] = {}
    for factor in factors:
        if isinstance(factor.value, fx.Node) and factor.value in origins:
            groups.setdefault(origins[factor.value], []).append(factor)
    return groups


def _regroup(
    root: fx.Node, factors: list[_Factor], groups: dict[frozenset[fx.Node], list[_Factor]], origins: Origins
) -> None:
    """Write `root` as the product of the groups, then of what depends on no token, in the order in which it stands."""
    rewriter = Rewriter(root)
    rest = [factor for factor in factors if not (isinstance(factor.value, fx.Node) and factor.value in origins)]
    live = [_multiplied(rewriter, group) for group in groups.values()]
    rewriter.replace(_written(rewriter, _multiplied(rewriter, [*live, *rest])))


def _multiplied(rewriter: Rewriter, factors: list[_Factor]) -> _Factor:
    """The product of `factors`, in their order: one factor, which is below if all of them are."""
    if all(factor.below for factor in factors):
        above = _multiplied(rewriter, [_Factor(factor.value, below=False) for factor in factors])
        return _Factor(above.value, below=True)
    first = next(factor for factor in factors if not factor.below and isinstance(factor.value, fx.Node))
    product = first.value
    for factor in (factor for factor in factors if factor is not first):
        product = rewriter.call(aten.div.Tensor if factor.below else aten.mul.Tensor, product, factor.value)
    return _Factor(product, below=False)


def _written(rewriter: Rewriter, factor: _Factor) -> fx.Node:
    node: fx.Node = rewriter.call(aten.reciprocal.default, factor.value) if factor.below else factor.value
    return node
