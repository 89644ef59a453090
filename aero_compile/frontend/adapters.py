"""Low-rank adapters (LoRA, Hu et al. 2021) that were not merged: one linear layer whose weight is an expression.

    linear(x, W, b) + s·linear(linear(x, A), B)  → linear(x, W + s·(B @ A), b)

A, B and W stay parameters of their own. An adapter with a dropout of its own computes something else in training, so it
is refused with the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from aero_compile.errors import UnsupportedModelError
from aero_compile.ir.dataflow import live_values
from aero_compile.ir.places import place
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel

aten = torch.ops.aten


class _Adapter(NamedTuple):
    """`source` is what A reads; `dropped`: through a dropout."""

    source: fx.Node
    down: fx.Node
    up: fx.Node
    factor: float
    dropped: bool


def join_adapters(model: TransformedModel) -> bool:
    """Let linear layers hold the adapters beside them, in place; returns whether there were any.

    Raises:
        UnsupportedModelError: an adapter drops out a part of its input in training.
    """
    live, values = live_values(model)
    changed = False
    for node in [n for n in model.graph.nodes if n.target is aten.add.Tensor and n in live and not n.kwargs]:
        operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
        for base, branch in zip(operands, reversed(operands), strict=True):
            linear, adapter = _reshaped(base), _adapter(model, branch)
            if adapter is None or len(operands) != 2 or not _beside(linear, base, adapter, values):
                continue
            if adapter.dropped:
                raise UnsupportedModelError(
                    f"{model.convention.family} has a low-rank adapter with a dropout of its own at {place(branch)}, "
                    "which no single linear layer computes in training; merge it (merge_and_unload() of PEFT), or set "
                    "its dropout (lora_dropout) to 0"
                )
            _join(linear, adapter)
            Rewriter(node).replace(base)
            changed = True
            break
    return changed


def _join(linear: fx.Node, adapter: _Adapter) -> None:
    call = Rewriter(linear).call
    product = call(aten.matmul.default, adapter.up, adapter.down)
    if adapter.factor != 1.0:
        product = call(aten.mul.Tensor, product, adapter.factor)
    weight = call(aten.add.Tensor, linear.args[1], product)
    linear.args = (linear.args[0], weight, *linear.args[2:])


def _adapter(model: TransformedModel, node: fx.Node) -> _Adapter | None:
    """The adapter that ends at `node`."""
    factor = 1.0
    if node.target is aten.mul.Tensor and isinstance(node.args[1], int | float) and isinstance(node.args[0], fx.Node):
        factor, node = float(node.args[1]), node.args[0]
    ups = []
    for _ in range(2):
        node = _reshaped(node)
        if node.target is not aten.linear.default or len(node.args) != 2 or len(node.users) != 1:
            return None
        ups.append(node.args[1])
        node = node.args[0]  # type: ignore[assignment]
    source = _reshaped(node)
    dropped = source.op == "call_module" and isinstance(model.get_submodule(str(source.target)), nn.Dropout)
    if dropped:
        source = _reshaped(source.all_input_nodes[0])
    up, down = ups
    assert isinstance(up, fx.Node)
    assert isinstance(down, fx.Node)
    return _Adapter(source, down, up, factor, dropped)


def _reshaped(node: fx.Node) -> fx.Node:
    """The value that `node` is another shape of."""
    while node.target is aten.reshape.default:
        node = node.all_input_nodes[0]
    return node


def _beside(linear: fx.Node, base: fx.Node, adapter: _Adapter, values: Mapping[fx.Node, Any]) -> bool:
    """Whether `linear`, which `base` is another shape of, reads what the adapter reads and has more than its rank."""
    if linear.target is not aten.linear.default or len(linear.users) != 1 or len(base.users) != 1:
        return False
    source, into = linear.all_input_nodes[0], values[adapter.down].shape
    same = _reshaped(source) is adapter.source and values[source].shape[-1] == into[-1]
    wide = values[linear].shape[-1] == values[base].shape[-1] == values[adapter.up].shape[0]
    return same and wide and bool(into[0] <= min(into[-1], values[adapter.up].shape[0]))
