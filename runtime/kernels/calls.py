"""Calls of kernels in JAX functions.

An operator calls a kernel like any function. In plain JAX a call computes what the parties' results come to; SPU cannot
run it, so a function is cut in pieces at its calls before it is compiled (`aero_compile.runtime.lowering.cut`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from aero_compile.runtime.kernels.kernel import Kernel


def call_kernel(kernel: Kernel, *arguments: Any) -> tuple[Any, ...]:
    """Call a kernel on JAX arrays of floats; `Kernel.results` tells what it gives."""
    return tuple(primitive().bind(*arguments, kernel=kernel))


@cache
def primitive() -> Any:
    """The call as a JAX primitive: it has a value and a shape, but no translation, so that none is ever compiled."""
    from jax import core

    found: Any = core.Primitive("share_kernel")
    shaped: Any = core.ShapedArray
    found.multiple_results = True
    found.def_impl(lambda *arguments, kernel: list(kernel.plain(*arguments)))
    found.def_abstract_eval(
        lambda *arguments, kernel: [
            shaped(each.shape, np.dtype(each.dtype)) for each in kernel.results(*(one.shape for one in arguments))
        ]
    )
    return found
