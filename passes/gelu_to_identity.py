"""gelu-to-identity: remove every FFN activation, so that the FFN is linear.

Before → after:
    gelu(x), relu(x), silu(x), relu(x)², …  → x

A gated FFN keeps its product: silu(a)·b → a·b, which is bilinear and costs one private multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aero_compile.errors import UnsupportedGraphError
from aero_compile.graph_pass import GraphPass, PassResult
from aero_compile.passes._activation import ffn_activations
from aero_compile.rewriting import bypass
from aero_compile.trainable import TransformedModel


@dataclass(frozen=True)
class GeluToIdentity(GraphPass):
    """Remove FFN activations (the paper's SM+LN, SM and softmax-only architectures)."""

    name: ClassVar[str] = "gelu-to-identity"
    preserves_numerics: ClassVar[bool] = False

    def call(self, model: TransformedModel) -> PassResult:
        activations = ffn_activations(model, self.name)
        if not activations:
            if self.was_applied(model):
                return PassResult(model, modified=False)
            raise UnsupportedGraphError(
                f"{self.name} found no activation in the {len(model.structure.ffns)} feed-forward blocks of "
                f"{model.convention.family}: they are linear already"
            )
        for activation in activations:
            bypass(activation.node, activation.source)
        model.graph_changed()
        return PassResult(model, modified=True)
