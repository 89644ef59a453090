"""Recognize what a region of arithmetic computes by running it, whatever way it is written.

Around every nonlinear node (tanh, rsqrt, exp, …) take the regions of the graph with a single live input and a
single output, cut out by dominators and post-dominators, and compare what they compute, in float64, with the
canonical ops. The largest region that agrees to 1e-7 is replaced by one node:

    0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))  → gelu(x, approximate="tanh")
    x·rsqrt(mean(x²) + ε)·w                      → rms_norm(x, [d], w, ε)
    exp(x − max x) / Σ exp(x − max x)            → softmax(x, -1)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.frontend.norm_matching import drop_expansions, insert_norm, match_norm
from aero_compile.frontend.pointwise import agree, classify, uniform_value
from aero_compile.ir.attention_weights import SINK, attention_weights, softmax_with_sink
from aero_compile.ir.dataflow import hidden_nodes, live_values
from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import is_floating, node_values, sample_shape
from aero_compile.model import TransformedModel

aten = torch.ops.aten

REACH = 14
"""How many dominators above and post-dominators below a seed are tried."""

_ARITHMETIC = frozenset(
    ["add", "sub", "rsub", "mul", "div", "pow", "neg", "square", "reciprocal", "sqrt", "rsqrt", "abs"]
)
_FUNCTIONS = frozenset(
    ["tanh", "erf", "sigmoid", "exp", "expm1", "log", "log1p", "logaddexp", "softplus", "relu", "leaky_relu"]
    + ["exp2", "log2", "elu", "log_sigmoid"]
)
_COMPARISONS = frozenset(["gt", "ge", "lt", "le", "eq", "ne", "sign", "sgn", "heaviside"])
_BOUNDS = frozenset(["clamp", "clamp_min", "clamp_max", "maximum", "minimum", "hardtanh", "hardsigmoid", "threshold"])
_CHOICES = frozenset(["where", "masked_fill", "to", "_to_copy", "type_as"])
_LOGIC = frozenset(["__and__", "__or__", "__xor__"])
_LOGIC |= {f"{kind}_{name}" for kind in ("logical", "bitwise") for name in ("and", "or", "xor", "not")}
_REDUCING = frozenset(
    ["mean", "sum", "var", "amax", "max", "std", "norm", "linalg_vector_norm", "logsumexp", "var_mean", "std_mean"]
)
_BROADCASTING = frozenset(["unsqueeze", "expand", "getitem", "detach"])
_POINTWISE = _ARITHMETIC | _FUNCTIONS | _COMPARISONS | _BOUNDS | _CHOICES | _LOGIC
_ALLOWED = _POINTWISE | _REDUCING | _BROADCASTING
_SEEDS = frozenset(["tanh", "erf", "sigmoid", "exp", "rsqrt", "sqrt", "pow", "div", "softplus", "reciprocal", "std"])
_SEEDS |= _COMPARISONS | _BOUNDS | {"abs", "relu", "expm1", "exp2", "logaddexp", "log_sigmoid"}

Build = Callable[[Rewriter, fx.Node], fx.Node]


@dataclass(frozen=True)
class Region:
    """Nodes between `entry` (outside) and `exit` (inside), in graph order, and the constants they read."""

    entry: fx.Node
    exit: fx.Node
    nodes: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]

    def key(self) -> tuple[Any, ...]:
        """Equal for regions that compute the same thing up to the shape of their input."""
        names = {self.entry: "x"} | {n: f"c{i}" for i, n in enumerate(self.constants)}
        names |= {n: f"v{i}" for i, n in enumerate(self.nodes)}
        return tuple(
            (str(n.target), repr(fx.map_arg((n.args, n.kwargs), lambda a: _Name(names[a])))) for n in self.nodes
        )

    def run(self, x: Tensor, constants: Mapping[fx.Node, Tensor]) -> Any:
        """Value of the exit when the entry is `x`."""
        env: dict[fx.Node, Any] = {self.entry: x, **constants}
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return env[self.exit]


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def recognize(model: TransformedModel) -> int:
    """Replace every recognized region of `model`'s graph by its op; returns how many there were."""
    replaced = 0
    known: dict[Any, Any] = {}
    drop_expansions(model.graph, *live_values(model))
    while True:
        found = _scan(model, known)
        renewed: dict[fx.Node, fx.Node] = {}
        for region, build in found:
            # the entry may be the exit of a region that was replaced just now
            rewriter = Rewriter(region.exit)
            new = build(rewriter, renewed.get(region.entry, region.entry))
            rewriter.replace(new)
            renewed[region.exit] = new
        replaced += len(found)
        if not found:
            return replaced
        model.graph_changed()


def _scan(model: TransformedModel, known: dict[Any, Any]) -> list[tuple[Region, Build]]:
    """All recognized regions that do not overlap."""
    values = node_values(model, *sample_shape(model))
    hidden = hidden_nodes(model.graph, model.convention.tokens, values)
    live = [n for n in model.graph.nodes if n in hidden and n.op != "output"]
    finder = _Regions(live)
    taken: set[fx.Node] = set()
    found: list[tuple[Region, Build]] = []
    for seed in live:
        if seed in taken or _kind(seed) not in _SEEDS:
            continue
        for region in finder.around(seed):
            if taken.intersection(region.nodes):
                continue
            build = _identify(region, values, model, known)
            if build is not None:
                found.append((region, build))
                taken.update(region.nodes)
                break
    return found


def _kind(node: fx.Node) -> str:
    """Bare op name: `aten.pow.Tensor_Scalar` → `pow`."""
    if node.op != "call_function":
        return node.op
    parts = str(node.target).split(".")
    return parts[1] if parts[0] == "aten" else getattr(node.target, "__name__", str(node.target))


class _Regions:
    """Single-input, single-output regions of the live graph."""

    def __init__(self, live: Sequence[fx.Node]) -> None:
        import networkx as nx

        self._order = {node: i for i, node in enumerate(live)}
        flow = nx.DiGraph()
        flow.add_node("source")
        for node in live:
            inputs = [parent for parent in node.all_input_nodes if parent in self._order]
            for parent in inputs:
                flow.add_edge(parent, node)
            if not inputs:
                flow.add_edge("source", node)
            if not any(user in self._order for user in node.users) or any(user.op == "output" for user in node.users):
                flow.add_edge(node, "sink")
        self._above = nx.immediate_dominators(flow, "source")
        self._below = nx.immediate_dominators(flow.reverse(copy=False), "sink") if "sink" in flow else {}

    def around(self, seed: fx.Node) -> Iterable[Region]:
        """Regions around `seed`, largest first, that hold nothing but arithmetic."""
        entries = self._chain(self._above, seed)[1:]
        exits = [
            seed,
            *itertools.takewhile(lambda n: _kind(n) in _ALLOWED, self._chain(self._below, seed)[1:]),
        ]
        regions = []
        for entry, exit_ in itertools.product(entries, exits):
            region = self._between(entry, exit_)
            if region is not None and seed in region.nodes:
                regions.append(region)
        return sorted(regions, key=lambda region: -len(region.nodes))

    def _chain(self, tree: Mapping[Any, Any], node: fx.Node) -> list[fx.Node]:
        chain = [node]
        while len(chain) <= REACH:
            parent = tree.get(chain[-1])
            if not isinstance(parent, fx.Node) or parent is chain[-1]:
                break
            chain.append(parent)
        return chain

    def _between(self, entry: fx.Node, exit_: fx.Node) -> Region | None:
        inside: set[fx.Node] = set()
        stack = [exit_]
        while stack:
            node = stack.pop()
            if node is entry or node in inside:
                continue
            if node not in self._order or _kind(node) not in _ALLOWED or len(inside) > 48:
                return None
            inside.add(node)
            stack.extend(parent for parent in node.all_input_nodes if parent in self._order)
        leaks = any(user not in inside for node in inside - {exit_} for user in node.users)
        if leaks or not inside:
            return None
        nodes = tuple(sorted(inside, key=self._order.__getitem__))
        constants = dict.fromkeys(
            p for node in nodes for p in node.all_input_nodes if p not in self._order and p is not entry
        )
        return Region(entry, exit_, nodes, tuple(constants))


def _identify(
    region: Region, values: Mapping[fx.Node, Any], model: TransformedModel, known: dict[Any, Any]
) -> Build | None:
    """What the region computes, as a function that inserts the canonical node, or None."""
    entry, result = values.get(region.entry), values.get(region.exit)
    if not isinstance(entry, Tensor) or not isinstance(result, Tensor) or entry.shape != result.shape:
        return None
    if any(not isinstance(values.get(node), Tensor) for node in region.constants):
        return None
    if not (is_floating(entry) and is_floating(result)):
        return None
    shapes = tuple(tuple(values[node].shape) for node in region.constants)
    uniform = {node: uniform_value(model, node) for node in region.constants}
    key = (region.key(), entry.shape[-1:], shapes, tuple(uniform.values()))
    if key not in known:
        try:
            known[key] = _classify(region, entry, shapes, uniform)
        except (RuntimeError, TypeError, ValueError, IndexError):
            known[key] = None
    description = known[key]
    return None if description is None else _builder(description, region, entry.shape[-1])


def _classify(
    region: Region, entry: Tensor, shapes: tuple[tuple[int, ...], ...], uniform: Mapping[fx.Node, float | None]
) -> tuple[Any, ...] | None:
    if all(_kind(node) in _POINTWISE for node in region.nodes):
        return _classify_pointwise(region, uniform)
    generator = torch.Generator().manual_seed(0)
    standins = {
        node: torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        for node, shape in zip(region.constants, shapes, strict=True)
    }
    width = entry.shape[-1]
    x = torch.randn((3,) * (entry.dim() - 1) + (width,), generator=generator, dtype=torch.float64)
    probes = [x, 37.0 * x + 1.0, 0.01 * x]
    results = [region.run(probe, standins) for probe in probes]
    if not shapes:
        for name, function in _SOFTMAXES.items():
            if all(agree(r, function(p, -1)) for p, r in zip(probes, results, strict=True)):
                return (name,)
    written = [a for node in region.nodes for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    norm = match_norm(lambda probe: region.run(probe, standins), written, list(standins.values()), x)
    return None if norm is None else ("norm", norm, shapes)


def _classify_pointwise(region: Region, constants: Mapping[fx.Node, float | None]) -> tuple[Any, ...] | None:
    if any(value is None for value in constants.values()):
        return None
    given = {node: torch.tensor(value, dtype=torch.float64) for node, value in constants.items()}
    written = [a for node in region.nodes for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float)]
    literals = [*map(float, written), *(value for value in constants.values() if value is not None)]
    found = classify(lambda x: region.run(x, given), literals, _kind(region.exit))
    return found and ("activation", *found)


_SOFTMAXES: Mapping[str, Callable[[Tensor, int], Tensor]] = {"softmax": torch.softmax, "sink": softmax_with_sink}
"""What arithmetic along rows may compute, beside norms."""


def _builder(description: tuple[Any, ...], region: Region, width: int) -> Build:
    kind, *details = description

    def build(rewriter: Rewriter, entry: fx.Node) -> fx.Node:
        if kind == "softmax":
            return rewriter.call(aten.softmax.int, entry, -1)
        if kind == "sink":
            return rewriter.call(attention_weights, entry, -1, *SINK)
        if kind == "norm":
            norm, shapes = details
            return insert_norm(rewriter, entry, norm, dict(zip(region.constants, shapes, strict=True)), width)
        name, *form = details
        op = getattr(aten, name).default
        if name == "gelu":
            return rewriter.call(op, entry, approximate=form[0])
        return rewriter.call(op, entry, *form)

    return build
