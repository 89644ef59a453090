"""Who may know what: split a logits graph into public, server-owned and live (token-dependent) values.

Only live nodes are lowered to the private computation. Everything else is evaluated here, once, in
PyTorch, at the concrete batch size and sequence length:

* PUBLIC: follows from shapes, literals and the architecture (positions, causal masks, rotary tables). Both
  parties may know it; it becomes a constant of the program.
* SERVER: follows from anything else that the model holds. It becomes an input that only the server holds.
* LIVE: follows from the client's tokens. It exists only as secret shares.

Of what the model holds (parameters, buffers of any type, constants, tensor attributes) everything is the server's
but what is shown to be structure by what it holds (`aero_compile.ir.structural`). So what is public has been computed
from shapes, literals and structure alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from aero_compile.errors import LoweringError
from aero_compile.ir.ops import SHAPE_ONLY, name_of
from aero_compile.ir.places import source_path
from aero_compile.ir.structural import structural_attributes
from aero_compile.ir.weight_values import call_in_eval

SOFTMAX = torch.ops.aten.softmax.int

Observer = Callable[[fx.Node, Mapping[fx.Node, "Domain"], tuple[Any, ...], dict[str, Any], Any], None]


class Domain(Enum):
    """Who may know a value."""

    PUBLIC = "public"
    SERVER = "server"
    LIVE = "live"


@dataclass(frozen=True)
class Partition:
    """A graph at one concrete shape, every node assigned to a domain.

    `known` holds the value of each public and server node; `shapes` and `is_float` describe the live
    tensors. Values of live nodes are not kept: nothing in the lowering may depend on the tokens. `masks` keeps what
    `masks.find_mask` found.
    """

    graph: fx.Graph
    tokens: fx.Node
    output: fx.Node
    domains: dict[fx.Node, Domain]
    known: dict[fx.Node, Any]
    shapes: dict[fx.Node, tuple[int, ...]]
    is_float: dict[fx.Node, bool]
    masks: dict[fx.Node, Any] = field(default_factory=dict)

    def is_live(self, value: object) -> bool:
        """Whether `value` is a node that depends on the tokens."""
        return isinstance(value, fx.Node) and self.domains[value] is Domain.LIVE


def op_name(node: fx.Node) -> str:
    """Return the operator of a node without its overload, e.g. `aten.add`; `dropout` for the module."""
    if node.op == "call_module":
        return "dropout"
    if node.op != "call_function":
        return node.op
    return name_of(node.target)


def place_of(node: fx.Node) -> str:
    """Return where in the user's model a node comes from, as far as the capture recorded it."""
    return source_path(node) or "an unnamed place"


def partition(
    module: torch.nn.Module,
    graph: fx.Graph,
    input_ids: torch.Tensor,
    observe: Observer | None = None,
) -> Partition:
    """Evaluate `graph` on `input_ids` (int64 [B, T]) and sort its nodes into the three domains.

    `observe` is called with every live node, the domains so far, the node's arguments and its value (plaintext, in
    this process).

    Raises:
        LoweringError: the graph has inputs other than `input_ids` and `attention_mask`, no single
            output, or an output that does not depend on the tokens.
    """
    outputs = [node for node in graph.nodes if node.op == "output"]
    inputs = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    unknown = sorted(set(inputs) - {"input_ids", "attention_mask"})
    if "input_ids" not in inputs or unknown:
        raise LoweringError(
            f"the logits graph takes {sorted(inputs)}; private inference knows input_ids and attention_mask"
        )
    result = outputs[0].args[0]
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, fx.Node):
        raise LoweringError("the logits graph must return exactly one tensor, the logits")

    sorter = _Sorter(module, graph, observe)
    arguments = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    with torch.no_grad():
        sorter.run(*(arguments[name] for name in inputs))
    if sorter.domains[result] is not Domain.LIVE:
        raise LoweringError("the logits do not depend on the tokens: nothing to compute privately")
    return Partition(graph, inputs["input_ids"], result, sorter.domains, sorter.known, sorter.shapes, sorter.is_float)


class _Sorter(fx.Interpreter):
    """Runs the graph in eager PyTorch and records, per node, its domain and what the lowering may use."""

    def __init__(self, module: torch.nn.Module, graph: fx.Graph, observe: Observer | None) -> None:
        super().__init__(module, garbage_collect_values=True, graph=graph)
        self.domains: dict[fx.Node, Domain] = {}
        self.known: dict[fx.Node, Any] = {}
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.is_float: dict[fx.Node, bool] = {}
        self._observe = observe
        self._structural = structural_attributes(module, graph)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module" and not isinstance(self.fetch_attr(str(n.target)), torch.nn.Dropout):
            value = self._weight_from_module(n)
        elif n.op == "call_module":
            value = self.fetch_args_kwargs_from_env(n)[0][0]  # identity at inference
        else:
            value = super().run_node(n)
        domain = self._domain(n, value)
        self.domains[n] = domain
        if n.target is SOFTMAX:
            value = self._without_empty_rows(n, value)
        if domain is Domain.LIVE:
            if isinstance(value, torch.Tensor):
                self.shapes[n] = tuple(value.shape)
                self.is_float[n] = value.is_floating_point()
            if self._observe is not None and n.op not in ("output", "placeholder"):
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                self._observe(n, self.domains, args, kwargs, value)
        elif n.op != "output":
            self.known[n] = value
        return value

    def _without_empty_rows(self, node: fx.Node, weights: Any) -> Any:
        """A softmax gives zeros, not NaN, in rows where nothing is allowed: so it is computed privately."""
        scores, dim = self.fetch_args_kwargs_from_env(node)[0][:2]
        return weights.masked_fill((scores == -torch.inf).all(dim, keepdim=True), 0.0)

    def _weight_from_module(self, node: fx.Node) -> Any:
        """What a module other than dropout (a spectral norm) makes of a weight, in evaluation mode."""
        if self._domain(node, None) is Domain.LIVE:
            raise LoweringError(f"node {node.name} calls module {node.target} on hidden values; only dropout may be")
        args, _ = self.fetch_args_kwargs_from_env(node)
        return call_in_eval(self.fetch_attr(str(node.target)), *args)

    def _domain(self, node: fx.Node, value: object) -> Domain:
        if node.op == "placeholder":
            return Domain.LIVE if node.target == "input_ids" else Domain.PUBLIC
        if node.op == "get_attr":
            return Domain.PUBLIC if str(node.target) in self._structural else Domain.SERVER
        used = node.all_input_nodes
        if node.target in SHAPE_ONLY:  # of its first argument; what it fills with, if anything, may be a weight
            used = [each for each in used if each is not node.args[0] or each in node.args[1:]]
        found = {self.domains[each] for each in used}
        if Domain.LIVE in found:
            return Domain.LIVE
        return Domain.SERVER if Domain.SERVER in found else Domain.PUBLIC


def live_inputs(part: Partition, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the live nodes that `node` reads."""
    return (used for used in node.all_input_nodes if part.is_live(used))
