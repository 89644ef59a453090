"""Check of a recognition: the nodes that would replace a region are run against it, at random points and at edges.

A region and what replaces it are compared in float64, every time a model is captured: at numbers of all sizes, and, if
rows are summed over, at rows of zeros, of equal numbers, with an outlier, and, of scores, hidden ones (−∞, −1e30).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from aero_compile.frontend.matching import agree
from aero_compile.ir.custom_ops import MASKED
from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten

Build = Callable[[Rewriter, Sequence[fx.Node], Sequence[fx.Node]], fx.Node]
"""(rewriter, entries, constants) → the node that computes a region."""


@dataclass(frozen=True)
class Region:
    """Nodes between `entries` (outside) and `exit` (inside), in graph order, and the constants they read."""

    entries: tuple[fx.Node, ...]
    exit: fx.Node
    nodes: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]

    def key(self) -> tuple[Any, ...]:
        """Equal for regions that compute the same thing up to the shape of their input."""
        names = {n: f"x{i}" for i, n in enumerate(self.entries)} | {n: f"c{i}" for i, n in enumerate(self.constants)}
        names |= {n: f"v{i}" for i, n in enumerate(self.nodes)}
        return tuple(
            (str(n.target), repr(fx.map_arg((n.args, n.kwargs), lambda a: _Name(names[a])))) for n in self.nodes
        )

    def run(self, *entries: Tensor, constants: Mapping[fx.Node, Tensor]) -> Any:
        """Value of the exit for values of the entries."""
        env = dict(zip(self.entries, entries, strict=True)) | dict(constants)
        return _run(self.nodes, env)[self.exit]


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


class Replacement:
    """What `build` would write in the place of `region`, in a graph of its own."""

    def __init__(self, region: Region, build: Build) -> None:
        graph = fx.Graph()
        self._entries = [graph.placeholder(f"x{i}") for i in range(len(region.entries))]
        self._constants = [graph.placeholder(f"c{i}") for i in range(len(region.constants))]
        self._result = build(Rewriter(graph.placeholder("exit")), self._entries, self._constants)
        self._nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._region = region

    @property
    def is_simpler(self) -> bool:
        """True if it has fewer nodes than the region, or as many but other ones; a hard tanh is not a clamp."""
        new, old = (Counter(node.target for node in nodes) for nodes in (self._nodes, self._region.nodes))
        if old.keys() <= {aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default}:
            return aten.clamp.default not in new or new.total() < old.total()
        return new.total() < old.total() or (new.total() == old.total() and new != old and not new[aten.mul.Tensor])

    def agrees(self, probes: Sequence[Tensor], constants: Mapping[fx.Node, Tensor]) -> bool:
        """True if it equals the region wherever the region is finite. `probes`: values of each entry."""
        expected = self._region.run(*probes, constants=constants)
        given = [constants[node] for node in self._region.constants]
        env = dict(zip((*self._entries, *self._constants), (*probes, *given), strict=True))
        value = _run(self._nodes, env)[self._result]
        if not isinstance(expected, Tensor) or expected.shape != value.shape:
            return False
        finite = torch.isfinite(expected)
        return not bool(finite.any()) or agree(value[finite], expected[finite])


def _run(nodes: Sequence[fx.Node], env: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = cast("Any", node.target)(*args, **kwargs)
    return env


def edge_numbers(*literals: float) -> Tensor:
    """Numbers at which element-wise functions differ that agree elsewhere: tiny, huge, zero, around `literals`."""
    sizes = torch.tensor([0.0, 1e-300, 1e-30, 1e-8, 1.0, 30.0, 700.0, 1e6, 1e8], dtype=torch.float64)
    given = torch.tensor(literals, dtype=torch.float64)
    around = torch.cat([given, given * (1 + 1e-6), given * (1 - 1e-6)])
    return torch.cat([sizes, -sizes, around, -around])


def edge_rows(x: Tensor) -> Iterator[Tensor]:
    """Rows at which functions of rows differ that agree elsewhere, of the shape of the random rows `x`, float64."""
    yield from (x * 1e6, x * 1e-6, x - 30.0, x + 30.0, torch.zeros_like(x), torch.ones_like(x))
    outlier = x.clone()
    outlier[..., 0] *= 1e4
    yield outlier


def hidden_rows(x: Tensor) -> Iterator[Tensor]:
    """Rows of scores of which a mask hides half, by −∞ or by a finite number, or all."""
    for hidden, first in ((-torch.inf, x.shape[-1] // 2 + 1), (MASKED, x.shape[-1] // 2 + 1), (-torch.inf, 0)):
        masked = x.clone()
        masked[..., first:] = hidden
        yield masked
