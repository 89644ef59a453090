"""strip-layer-norm: remove every LayerNorm and RMSNorm, with its gain and bias.

Before → after:
    layer_norm(x, [d], weight, bias, eps)  → x
    rms_norm(x, [d], weight, eps)          → x

The paper's norm-free architectures (SM+G, SM+R, SM) drop the final norm as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from aero_compile.errors import UnsupportedGraphError
from aero_compile.graph_pass import GraphPass, PassResult
from aero_compile.parts import nonlinear_kind
from aero_compile.rewriting import bypass
from aero_compile.trainable import TransformedModel


@dataclass(frozen=True)
class StripLayerNorm(GraphPass):
    """Remove all norms.

    Options:
        keep_final: leave the final norm in place (as He & Hofmann 2024 do).
    """

    keep_final: bool = False

    name: ClassVar[str] = "strip-layer-norm"
    preserves_numerics: ClassVar[bool] = False

    def call(self, model: TransformedModel) -> PassResult:
        structure = model.structure
        norms = [norm for norm in structure.norms if norm.layer is not None or not self.keep_final]
        if not norms:
            if self.was_applied(model) or (structure.norms and self.keep_final):
                return PassResult(model, modified=False)
            present = sorted({nonlinear_kind(node, structure.live) or "softmax" for node in structure.live})
            raise UnsupportedGraphError(
                f"{self.name} found no LayerNorm or RMSNorm in {model.convention.family}; the nonlinear ops it "
                f"has are {', '.join(present)}"
            )
        for norm in norms:
            source = norm.node.args[0]
            assert isinstance(source, fx.Node)
            bypass(norm.node, source)
        model.graph_changed()
        return PassResult(model, modified=True)
