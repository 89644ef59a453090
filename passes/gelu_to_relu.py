"""gelu-to-relu: make every FFN activation a ReLU.

Before → after:
    gelu(x), gelu(x, approximate="tanh"), silu(x), relu(x)², …  → relu(x)

In a gated FFN (Llama) the gate's activation is replaced: silu(a)·b → relu(a)·b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from aero_compile.errors import UnsupportedGraphError
from aero_compile.graph_pass import GraphPass, PassResult
from aero_compile.passes._activation import ffn_activations
from aero_compile.rewriting import insert_call, replace_node
from aero_compile.trainable import TransformedModel

aten = torch.ops.aten


@dataclass(frozen=True)
class GeluToRelu(GraphPass):
    """Replace FFN activations by ReLU (the paper's SM+LN+R and SM+R)."""

    name: ClassVar[str] = "gelu-to-relu"
    preserves_numerics: ClassVar[bool] = False

    def call(self, model: TransformedModel) -> PassResult:
        activations = ffn_activations(model, self.name)
        if not activations and not self.was_applied(model):
            raise UnsupportedGraphError(
                f"{self.name} found no activation in the {len(model.structure.ffns)} feed-forward blocks of "
                f"{model.convention.family}: they are linear"
            )
        changed = [activation for activation in activations if activation.kind != "relu"]
        for activation in changed:
            relu = insert_call(model.graph, activation.node, aten.relu.default, activation.source)
            replace_node(activation.node, relu)
        if changed:
            model.graph_changed()
        return PassResult(model, modified=bool(changed))
