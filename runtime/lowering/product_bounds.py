"""Bounds of products: what two factors can make, and how small they must stay for it to be multiplied safely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from aero_compile.runtime.operators import bounds
from aero_compile.runtime.operators.bounds import SLACK, Bound, Values, times


def multiplied(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Two tensors, entry by entry."""
    if node.meta.get("normalizes"):  # exponentials times values, times 1/Σ: an average of the values
        product = given["x"]
        return bounds.within(SLACK * values.of(product.args[1]).peak)
    x, y = given["x"], given["other"]
    shape, limit = values.shape(node), values.form.limit
    left, right = bounds.spread(values, x, shape), bounds.spread(values, y, shape)
    if times(left.peak, right.peak) > limit:
        root = math.sqrt(limit)
        if not values.hides(y) or (values.hides(x) and right.peak <= root):
            values.need(x, limit / right.peak)
        elif not values.hides(x) or left.peak <= root:
            values.need(y, limit / left.peak)
        else:
            values.need(x, root)
            values.need(y, root)
    return left.scaled(right.low, right.high)


def squared(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """A square."""
    return _to_power(values, given["x"], 2)


def _to_power(values: Values, x: Any, exponent: int) -> Bound:
    peak = values.of(x).peak
    if peak > 1 and math.log2(max(peak, 1.0)) * exponent > math.log2(values.form.limit):
        values.need(x, values.form.limit ** (1 / exponent))
        peak = min(peak, values.form.limit ** (1 / exponent))
    top = peak**exponent
    return Bound(0.0 if exponent % 2 == 0 else -top, top)


def to_power(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """A power with a number as its exponent."""
    exponent = given["exponent"]
    if not isinstance(exponent, (int, float)):
        return Bound(-math.inf, math.inf)
    if exponent > 0 and float(exponent).is_integer():
        return _to_power(values, given["x"], int(exponent))
    if exponent == 0.5:
        return Bound(0.0, SLACK * math.sqrt(values.form.inverse_limit))
    high = SLACK / (math.sqrt(values.form.least) if exponent == -0.5 else values.form.least)
    return Bound(-high if exponent == -1 else 0.0, high)


def divided(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """A quotient; a divisor that depends on tokens is watched."""
    x, y = given["x"], given["other"]
    left, right = values.of(x), values.of(y)
    least = min(abs(right.low), abs(right.high)) if right.low > 0 or right.high < 0 else 0.0
    least = max(least, values.form.least if values.hides(y) else 0.0)
    if least == 0.0:
        return Bound(-math.inf, math.inf)
    if left.peak / least > values.form.limit:
        values.need(x, values.form.limit * least)
    return bounds.spread(values, x, values.shape(node)).scaled(-1 / least, 1 / least)


def linear(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Rows times a transposed weight, and a bias."""
    weight = given["weight"]
    known = values.known(weight)
    if known is None:
        return _contracted(values, node, given["input"], weight, values.shape(weight)[-1], transposed=True)
    found = _mapped(values, given["input"], values.matrix(known, transposed=True))
    bias = given.get("bias")
    return found if bias is None else bounds.plus(found, bounds.spread(values, bias, values.shape(node)))


def _mapped(values: Values, x: Any, weight: bounds.Weight) -> Bound:
    found = bounds.through(values.of(x).fitted(values.shape(x)), weight)
    if found.peak > values.form.limit:
        limit = values.form.limit / SLACK
        values.need(x, max(limit / (4 * weight.column), limit / weight.column_total))
    return found


def matmul(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """A matrix product."""
    x, other = given["x"], given["other"]
    right, left = values.known(other), values.known(x)
    if right is not None:
        return _mapped(values, x, values.matrix(right))
    if left is not None:  # rows of a known matrix meet columns
        found = values.of(other).fitted(values.shape(other))
        weight = values.matrix(left, transposed=True)
        peak = min(times(found.across, weight.column), times(found.peak, weight.column_total))
        if peak > values.form.limit:
            values.need(other, values.form.limit / (SLACK * weight.column_total))
        return bounds.within(SLACK * peak)
    return _contracted(values, node, x, other, values.shape(x)[-1])


def _contracted(values: Values, node: fx.Node, x: Any, y: Any, inner: int, transposed: bool = False) -> Bound:
    left, right = values.of(x).fitted(values.shape(x)), values.of(y).fitted(values.shape(y))
    if transposed:
        right = replace(right, length=right.across, across=right.length)
    found = bounds.of_product(left, right, inner)
    if found.peak > values.form.limit:
        limit = values.form.limit / SLACK
        root = math.sqrt(limit)
        if left.length <= root:
            values.need(y, limit / (4 * left.length))
        elif right.across <= root:
            values.need(x, limit / (4 * right.across))
        else:
            values.need(x, root / 4)
            values.need(y, root / 4)
    return found
