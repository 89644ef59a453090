"""linear-attention: a product of features of queries and keys in place of the softmax (Katharopoulos et al. 2020).

Before → after (per head, n the number of keys that a position sees):
    softmax(mask(c·Q·Kᵀ))  → s/(Σs + n·ε), s = c·φ(Q)·φ(K)ᵀ           where not hidden, else 0

    features=elu     φ(x) = elu(x) + 1 = relu(x) + exp(min(x, 0)), theirs (eq. 7)
    features=relu    φ(x) = relu(x)
    features=square  φ(x) = x²

Not among them: exp(x) and the random features of Performers (Choromanski et al. 2021). Their exponents have either sign
and are tamed by a maximum over features and keys, which costs two parties more than the softmax that it replaces.

The scale c, which stands before the softmax, cancels but for ε. What is computed is their causal attention (eq. 9)
with the products in the other order, T×T weights a head, as masks and private matrix products have them. Two parties
compute φ for T·d values a head and side instead of T²/2 exponentials, and one reciprocal a row. A bias of positions
that is added to the scores (ALiBi) has no place in it: such models are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from aero_compile.analysis.causality import added_to_scores
from aero_compile.analysis.parts import Heads
from aero_compile.errors import RecipeError, UnsupportedGraphError
from aero_compile.graph_pass import PassResult
from aero_compile.ir.dataflow import live_inputs
from aero_compile.ir.ops import CHOICES, SCALES, SUMS, VIEWS
from aero_compile.ir.places import place
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel
from aero_compile.passes._attention_weights import AttentionWeightsPass

aten = torch.ops.aten

FEATURES = ("elu", "relu", "square")

_PLAIN = VIEWS | SCALES | SUMS | CHOICES | {aten.maximum.default, aten.clamp.default, aten.clamp_min.default}
"""How scores are scaled and masked."""


@dataclass(frozen=True)
class LinearAttention(AttentionWeightsPass):
    """Replace softmax attention by linear attention.

    Options:
        features: `elu`, `relu` or `square`.
        eps: ε ≥ 0. With 1/64, the default, a private run refuses no row for being small.
    """

    features: str = "elu"
    eps: float = 0.015625

    name: ClassVar[str] = "linear-attention"
    preserves_numerics: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("features", FEATURES)
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise RecipeError(f"{self.name}: eps must be at least 0, got {self.eps}")

    def weights(self) -> dict[str, Any]:
        return {"kind": "normalized", "power": 1, "eps": self.eps}

    def call(self, model: TransformedModel) -> PassResult:
        others = [
            each for each in model.history if isinstance(each, LinearAttention) and each.features != self.features
        ]
        if others:
            raise UnsupportedGraphError(f"{self.name}: the model has other features already, by {others[0]}")
        return super().call(model)

    def prepare(self, model: TransformedModel, heads: Heads) -> None:
        self._require_plain_scores(model, heads)
        for side in (0, 1):
            value, reader = heads.scores.args[side], heads.scores
            assert isinstance(value, fx.Node)
            while value.target in VIEWS and len(value.users) == len(value.all_input_nodes[0].users) == 1:
                value, reader = value.all_input_nodes[0], value
            features = self._features(value, heads.scores)
            if reader is heads.scores:  # which may read one value on both sides
                reader.args = tuple(features if at == side else each for at, each in enumerate(reader.args))
            else:
                reader.replace_input_with(value, features)

    def _features(self, value: fx.Node, like: fx.Node) -> fx.Node:
        call = Rewriter.after(value, like=like).call
        if self.features == "square":
            return call(aten.mul.Tensor, value, value)
        positive = call(aten.relu.default, value)
        if self.features == "relu":
            return positive
        negative = call(aten.sub.Tensor, value, positive)
        return call(aten.add.Tensor, positive, call(aten.exp.default, negative))

    def _require_plain_scores(self, model: TransformedModel, heads: Heads) -> None:
        """Refuse what is done to scores beside scaling and masking."""
        node = heads.softmax.args[0]
        while isinstance(node, fx.Node) and node is not heads.scores:
            if node.target not in _PLAIN:
                raise self._refused(node, f"{node.target} of the scores")
            node = live_inputs(node, model.structure.live)[0]
        if added_to_scores(model, heads):
            raise self._refused(heads.softmax, "a bias of positions added to the scores")

    def _refused(self, node: fx.Node, what: str) -> UnsupportedGraphError:
        return UnsupportedGraphError(
            f"{self.name} leaves no place for {what} ({place(node)}); take a model without it, or quad-softmax"
        )
