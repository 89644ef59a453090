"""Where NaN or infinity began: in a parameter, in a gradient, or in the forward pass of one batch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from aero_compile.training.regularized_model import EntropyRegularizedModel

# Ops that write -inf on purpose: masks of attention scores.
_MASKING = ("masked_fill", "where", "full", "scalar_tensor", "fill")


def describe_values(tensor: Tensor) -> str:
    """`"3 of 64 values are NaN, 1 infinite"` for a tensor that is not finite."""
    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    parts = [f"{nans} of {tensor.numel()} values NaN"] if nans else []
    if infinities:
        parts.append(f"{infinities} of {tensor.numel()} values infinite")
    return ", ".join(parts)


def _layer(name: str) -> str:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return f" (layer {number.group(1)})" if number else ""


def non_finite_parameter(named: Iterable[tuple[str, Tensor | None]], what: str) -> str | None:
    """The first of the named tensors that holds NaN or infinity, in words; None if all are finite."""
    for name, tensor in named:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return f"{what} {name}{_layer(name)}: {describe_values(tensor.detach())}"
    return None


class _Found(Exception):
    """Carries the description of the first non-finite value out of the interpreter.

    In an attribute, because the interpreter adds its own lines to the message of whatever passes through.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class _Watch(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self._masked: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point() and not _finite(value):
                if _only_minus_infinity(value) and self._masks(n):
                    self._masked.add(n)
                else:
                    raise _Found(f"{place(n)}: {describe_values(value)}")
        return result

    def _masks(self, node: fx.Node) -> bool:
        from_mask = any(parent in self._masked for parent in node.all_input_nodes)
        return from_mask or any(word in str(node.target) for word in _MASKING)


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _only_minus_infinity(value: Tensor) -> bool:
    return not bool(value.isnan().any()) and not bool(torch.isposinf(value).any())


def place(node: fx.Node) -> str:
    """A node's place in the model: module (or the weight it reads), layer and operation."""
    operation = str(node.target).removesuffix(".default")
    stack = node.meta.get("nn_module_stack")
    name = ""
    if stack:
        name = str(list(stack.values())[-1][0])
    if not name:
        name = next((str(p.target) for p in node.all_input_nodes if p.op == "get_attr"), "")
    if not name and node.op in ("get_attr", "call_module"):
        return f"{node.target}{_layer(str(node.target))}"
    return f"{name}{_layer(name)}, operation {operation}" if name else f"operation {operation} ({node.name})"


def first_non_finite(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> str | None:
    """Run a TransformedModel's logits graph on a batch and name the first non-finite value, or None.

    Parameters are looked at first. `-inf` made by attention masks is no fault. The model keeps its
    mode (train or eval), nothing is differentiated.
    """
    in_parameters = non_finite_parameter(model.named_parameters(), "parameter")
    if in_parameters:
        return in_parameters
    graph = model.logits_graph()
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            is_mask = "mask" in str(node.target)
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            inputs.append(mask if is_mask else input_ids)
    try:
        with torch.no_grad():
            _Watch(model, graph).run(*inputs)
    except _Found as found:
        return found.where
    return None


def where_values_broke(wrapper: Any, batch: dict[str, Tensor] | None) -> str:
    """Where a model in training began to give NaN or infinity, in words, as far as a batch that it did so for tells.

    Without a batch, or where `wrapper` is no EntropyRegularizedModel, parameters alone are looked at.
    """
    if batch is None or not isinstance(wrapper, EntropyRegularizedModel):
        found = non_finite_parameter(wrapper.named_parameters(), "parameter")
        return found or "a place that cannot be looked at in this mode of training"
    found = first_non_finite(wrapper.model, batch["input_ids"], batch.get("attention_mask"))
    found = found or non_finite_parameter([("thresholds", wrapper.thresholds)], "parameter")
    return found or "the loss itself: the logits of this batch are finite here"


def bad_gradient(wrapper: Any, inputs: Any) -> str | None:
    """Repeat a batch, unclipped, and name the gradient that is not finite nearest to the output, or None."""
    wrapper.zero_grad()
    with torch.enable_grad():
        wrapper(**inputs)["loss"].backward()
    named = [(name, p.grad) for name, p in wrapper.named_parameters()]
    return non_finite_parameter(reversed(named), "the gradient of parameter")
