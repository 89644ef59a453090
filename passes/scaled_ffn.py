"""scaled-ffn: learnable scales of the FFN and of its residual (ScaledFFN, eq. 6 of the AERO paper).

Before → after:
    x + FFN(x)          → β·x + (1/α)·FFN(x)          sequential block, x = X_SA
    x + attn + FFN(x)   → β·(x + attn) + (1/α)·FFN(x)  parallel block (GPT-J, GPT-NeoX, Falcon, Phi)

α and β are one learnable scalar each per layer (`scaled_ffn.<layer>.alpha`, `.beta`, shape [1]); where a layer has
several FFNs, they are numbered (`scaled_ffn.<layer>.<number>.alpha`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from aero_compile.errors import RecipeError, UnsupportedGraphError
from aero_compile.graph_pass import GraphPass, PassResult
from aero_compile.rewriting import insert_call, parameter_node
from aero_compile.structure import require_ffns
from aero_compile.trainable import TransformedModel

aten = torch.ops.aten


@dataclass(frozen=True)
class ScaledFFN(GraphPass):
    """Insert α and β in every layer. With both at 1, their default, the function is unchanged.

    Options:
        init_alpha, init_beta: initial values; α must not be 0.
    """

    init_alpha: float = 1.0
    init_beta: float = 1.0

    name: ClassVar[str] = "scaled-ffn"
    preserves_numerics: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.init_alpha) and math.isfinite(self.init_beta)) or self.init_alpha == 0:
            raise RecipeError(
                f"{self.name}: init_alpha must be finite and not 0 and init_beta finite, got "
                f"{self.init_alpha} and {self.init_beta}"
            )

    def call(self, model: TransformedModel) -> PassResult:
        if any(name.startswith("scaled_ffn.") for name, _ in model.named_parameters()):
            return PassResult(model, modified=False)
        structure = model.structure
        ffns = require_ffns(structure, self.name)
        if len(ffns) < len(structure.attentions):
            missing = sorted({a.layer for a in structure.attentions} - {f.layer for f in ffns})
            raise UnsupportedGraphError(
                f"{self.name} found {len(ffns)} feed-forward blocks for {len(structure.attentions)} attentions; "
                f"none in layer {missing[0] if missing else 0}"
            )
        weight = next(model.parameters())
        per_layer = Counter(ffn.layer for ffn in ffns)
        seen: Counter[int] = Counter()
        for ffn in ffns:
            several = per_layer[ffn.layer] > 1
            name = f"scaled_ffn.{ffn.layer}.{seen[ffn.layer]}" if several else f"scaled_ffn.{ffn.layer}"
            seen[ffn.layer] += 1
            for leaf, initial in (("alpha", self.init_alpha), ("beta", self.init_beta)):
                value = torch.full((1,), initial, dtype=weight.dtype, device=weight.device)
                model.add_tensor(f"{name}.{leaf}", nn.Parameter(value))
            alpha = parameter_node(model, f"{name}.alpha", ffn.output)
            beta = parameter_node(model, f"{name}.beta", ffn.output)
            add, branch = ffn.branch
            # 1/α depends on a weight alone, so a private run multiplies instead of dividing
            inverse = insert_call(model.graph, add, aten.reciprocal.default, alpha, like=ffn.output)
            scaled = insert_call(model.graph, add, aten.mul.Tensor, branch, inverse, like=ffn.output)
            add.replace_input_with(branch, scaled)
            for merge, sibling in ffn.residual:
                kept = insert_call(model.graph, merge, aten.mul.Tensor, sibling, beta, like=ffn.output)
                merge.replace_input_with(sibling, kept)
        model.graph_changed()
        return PassResult(model, modified=True)
