"""Run a logits graph in the clear, in this process, where numbers are asked for: ranges, variances, expected logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.ir.ownership import Domain, domains_of
from aero_compile.runtime.lowering.partition import HIDDEN, value_in_run

Observer = Callable[[fx.Node, Mapping[fx.Node, Domain], tuple[Any, ...], dict[str, Any], Any], None]
"""Is told a node that depends on the tokens, the domains, the node's arguments and its value."""


def run_in_the_clear(
    module: torch.nn.Module, graph: fx.Graph, input_ids: Tensor, observe: Observer | None = None
) -> Tensor:
    """The logits of `input_ids`, int64 [B, T], as the program computes them but for its approximations.

    `observe` is called with every node that depends on the tokens as soon as its value is known.
    """
    arguments = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    inputs = [arguments[str(node.target)] for node in graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        result = _Run(module, graph, observe).run(*inputs)
    logits = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(logits, Tensor)
    return logits


class _Run(fx.Interpreter):
    """Evaluates nodes one after another, and forgets each value when nothing reads it any more."""

    def __init__(self, module: torch.nn.Module, graph: fx.Graph, observe: Observer | None) -> None:
        super().__init__(module, garbage_collect_values=True, graph=graph)
        self._graph_module = module
        self._observe = observe
        self._domains = {} if observe is None else domains_of(module, graph, "input_ids")

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        value = value_in_run(self._graph_module, n, self.env.__getitem__)
        if self._observe is not None and self._domains[n] in HIDDEN:
            self._observe(n, self._domains, *self.fetch_args_kwargs_from_env(n), value)
        return value
