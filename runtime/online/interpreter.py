"""One party's computation of a step on its shares: NumPy on words modulo 2^64, and a truncation after each product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.costs.pphlo import Operation, Tensor
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.online.moves import MOVES, move
from aero_compile.runtime.online.plan import PRODUCTS, SharePlan, truncated_bits
from aero_compile.runtime.online.public_values import public_value
from aero_compile.runtime.online.truncation import BitProducts, truncate
from aero_compile.runtime.roles import SERVER

Array = npt.NDArray[Any]


def run_on_shares(
    side: Side, plan: SharePlan, arguments: Sequence[Array], prepared: BitProducts, fraction_bits: int
) -> tuple[Words, ...]:
    """Compute a step as one party; returns its share of each result, uint64 of the result's shape.

    `arguments`: this party's shares, uint64 of their shapes, and public values. `prepared`: as many bit products as the
    plan truncates elements.
    """
    return _Run(side, plan, prepared, fraction_bits).run(arguments)


class _Run:
    def __init__(self, side: Side, plan: SharePlan, prepared: BitProducts, fraction_bits: int) -> None:
        self._side, self._plan, self._fraction_bits = side, plan, fraction_bits
        self._prepared, self._used = prepared, 0

    def run(self, arguments: Sequence[Array]) -> tuple[Words, ...]:
        function = self._plan.function
        values = {**self._plan.constants, **dict(zip(function.arguments, arguments, strict=True))}
        for operation in function.operations:
            if operation.result not in values:
                operands = [values[name] for name in operation.operands]
                values[operation.result] = self._result(operation, operands)
        return tuple(np.ascontiguousarray(values[name]) for name in function.results)

    def _result(self, operation: Operation, operands: list[Array]) -> Array:
        if not operation.gives.secret:
            return public_value(operation, operands)
        if operation.kind in PRODUCTS:
            return self._product(operation, operands)
        if operation.kind == "select":
            predicate, *chosen = operands
            yes, no = self._shares(operation.takes[1:], chosen)
            return np.where(predicate, yes, no)
        if operation.kind == "spu.gather":
            return move(operation, operands)
        shares = self._shares(operation.takes, operands)
        if operation.kind in MOVES:
            return move(operation, shares)
        return self._sum(operation, shares)

    def _sum(self, operation: Operation, shares: list[Words]) -> Words:
        if operation.kind == "negate":
            return np.uint64(0) - shares[0]
        if operation.kind == "convert":
            grows = operation.gives.is_float and not operation.takes[0].is_float
            return shares[0] << np.uint64(self._fraction_bits) if grows else shares[0]
        left, right = shares
        if operation.kind == "reduce":
            return np.asarray(left.sum(axis=operation.integers("dimensions"), dtype=np.uint64) + right)
        return left - right if operation.kind == "subtract" else left + right

    def _shares(self, takes: Sequence[Tensor], operands: Sequence[Array]) -> list[Words]:
        """Operands as shares: of a public value, all of it at the server and nothing at the client."""
        return [
            value if taken.secret else self._public_share(value) for taken, value in zip(takes, operands, strict=True)
        ]

    def _public_share(self, values: Array) -> Words:
        return self._encoded(values) if self._side.rank == SERVER else np.zeros(values.shape, np.uint64)

    def _encoded(self, values: Array) -> Words:
        if values.dtype == np.float64:
            values = np.rint(values * 2.0**self._fraction_bits)
        return values.astype(np.int64).astype(np.uint64)

    def _product(self, operation: Operation, operands: list[Array]) -> Words:
        """A product with a public factor, truncated where both are fixed-point numbers."""
        factor = self._plan.factors.get(operation.result)
        left, right = (
            value if taken.secret else self._encoded(value) if factor is None else factor.numbers.astype(np.uint64)
            for taken, value in zip(operation.takes, operands, strict=True)
        )
        product = np.asarray(left * right if operation.kind == "multiply" else left @ right, np.uint64)
        bits = truncated_bits(operation, self._plan.factors, self._fraction_bits)
        if not bits:
            return product
        start, self._used = self._used, self._used + product.size
        found = truncate(self._side, product.ravel(), bits, self._prepared[start : self._used])
        return found.reshape(operation.gives.shape)
