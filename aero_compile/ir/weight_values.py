"""Values of nodes that follow from weights alone."""

from __future__ import annotations

import operator
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


def weight_value(model: GraphModel, node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
    """Value, as in evaluation mode, of a node that is computed from parameters, buffers and constants alone.

    Args:
        model: whose parameters; on the meta device the value is a meta tensor.
        node: the root of the expression.
        known: values found so far; those found here are added.
    """
    known = {} if known is None else known
    if node in known:
        return known[node]
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model).detach()
    else:
        inputs = {parent: weight_value(model, parent, known) for parent in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        with torch.no_grad():
            if node.op == "call_module":
                value = call_in_eval(model.get_submodule(str(node.target)), *args)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
    known[node] = value
    return value
