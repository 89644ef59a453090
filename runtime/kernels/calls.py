"""Calls of kernels in JAX functions.

An operator calls a kernel like any function. In plain JAX a call computes what the parties' results come to; SPU cannot
run it, so a function is cut in pieces at its calls before it is compiled (`aero_compile.runtime.lowering.cut`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from aero_compile.runtime.kernels.registry import Kernel


def call_kernel(kernel: Kernel, x: Any) -> tuple[Any, ...]:
    """Call a kernel on a JAX array of floats; its results have the same shape."""
    return tuple(primitive().bind(x, kernel=kernel))


@cache
def primitive() -> Any:
    """The call as a JAX primitive: it has a value and a shape, but no translation, so that none is ever compiled."""
    from jax.core import Primitive

    found: Any = Primitive("share_kernel")
    found.multiple_results = True
    found.def_impl(lambda x, kernel: list(kernel.plain(x)))
    found.def_abstract_eval(lambda x, kernel: [x.update() for _ in kernel.owners])
    return found
