"""The kernels that a program may name, and their form in a program file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Protocol

from aero_compile.runtime.kernels.exponential_factors import ExponentialFactors
from aero_compile.runtime.kernels.words import Words


class Kernel(Protocol):
    """Work of each party on its own shares, element by element; frozen, so that equal ones are equal."""

    @property
    def owners(self) -> tuple[int | None, ...]:
        """For each result the rank of the party that knows it; None: it is shared."""

    def of_share(self, rank: int, share: Words) -> tuple[Words, ...]:
        """What party `rank` holds of each result, from its `share` of the argument: uint64 [elements]."""

    def plain(self, x: Any) -> tuple[Any, ...]:
        """The results as JAX arrays of floats, for `x` in the clear."""


KERNELS = {kind.__name__: kind for kind in (ExponentialFactors,)}
"""By their names in a program."""


def to_json(kernel: Kernel) -> dict[str, Any]:
    """Return the name and the options of a kernel."""
    return {"kernel": type(kernel).__name__, **asdict(kernel)}  # type: ignore[call-overload]


def from_json(content: Mapping[str, Any]) -> Kernel:
    """Return the kernel that `to_json` described, or that somebody else wrote.

    Raises:
        ValueError: there is no such kernel, or it does not take these options.
    """
    kind = KERNELS.get(content.get("kernel", ""))
    options = {name: value for name, value in content.items() if name != "kernel"}
    if kind is None or set(options) != {field.name for field in fields(kind)}:
        raise ValueError(f"there is no kernel {str(dict(content))[:100]}")
    kernel = kind(**options)
    kernel.check()
    return kernel
