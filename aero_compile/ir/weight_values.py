"""Values of nodes, computed: of what follows from weights alone, and of single nodes from those of their inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.ir.graph_model import GraphModel


def call_in_eval(module: torch.nn.Module, *args: Any, buffers: dict[str, Tensor] | None = None) -> Any:
    """The result of `module` in evaluation mode, with other `buffers` if given; its mode stays as it was."""
    training = module.training
    module.eval()
    try:
        return torch.func.functional_call(module, buffers or {}, args)
    finally:
        module.train(training)


def node_value(module: torch.nn.Module, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Value of one node, as in evaluation mode: a tensor of `module`, or the result of a call on its inputs' values."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module).detach()
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with torch.no_grad():
        if node.op == "call_module":
            return call_in_eval(module.get_submodule(str(node.target)), *args)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def weight_value(model: GraphModel, node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
    """Value, as in evaluation mode, of a node that depends on no input but those known.

    Args:
        model: whose tensors; on the meta device the value is a meta tensor.
        node: the root of the expression.
        known: values found so far; those found here are added.
    """
    found = {} if known is None else known

    def value_of(node: fx.Node) -> Any:
        if node not in found:
            found[node] = node_value(model, node, value_of)
        return found[node]

    return value_of(node)
