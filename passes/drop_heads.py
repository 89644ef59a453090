"""drop-heads: some heads of an attention go, with all that only they read.

Before → after (W_h: the columns of the output projection that read head h, out_h: what the head gives):
    Σ_h W_h·out_h + b  → Σ W_h·out_h + b over the heads that stay                         output=none
                       → Σ W_h·out_h + b + Σ W_g·mean(out_g) over the heads g that go     output=mean

mean(out_g) is the head's average output over calibration text, at all positions alike, so that it becomes a part of the
bias. Rows of queries, keys and values, columns of the output projection, temperatures and scores of these heads go.
Heads keep their numbers; a layer without any head loses its attention (see drop-attention).
Heads removed whole: Michel, Levy & Neubig 2019, "Are Sixteen Heads Really Better than One?"; replaced by their mean:
Wang et al. 2023, "Interpretability in the Wild" (mean ablation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aero_compile.analysis.head_sets import chosen_heads, heads_text, is_measured, parse_heads
from aero_compile.calibration import entropy_shares
from aero_compile.errors import RecipeError
from aero_compile.graph_pass import CalibratedPass, PassResult
from aero_compile.model import TransformedModel
from aero_compile.passes._dropped_heads import OUTPUTS, drop_heads, heads_left
from aero_compile.passes._head_edits import heads_with_softmax


@dataclass(frozen=True)
class DropHeads(CalibratedPass):
    """Take some heads out.

    Options:
        heads: which (see `aero_compile.analysis.head_sets`), as in `0.1+2.3-5`, `3.*` or `entropy:8`, which chooses
            among heads with a softmax.
        output: `none`, or `mean`: what stands for a head is its mean output over calibration text.
    """

    heads: str = "all"
    output: str = "none"

    name: ClassVar[str] = "drop-heads"
    preserves_numerics: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", parse_heads(self.heads))
        if self.output not in OUTPUTS:
            raise RecipeError(f"{self.name}: output is {' or '.join(OUTPUTS)}, not {self.output!r}")

    def call(self, model: TransformedModel) -> PassResult:
        return self._apply(model, None)

    def call_on(self, model: TransformedModel, calibration: Sequence[Tensor]) -> PassResult:
        return self._apply(model, calibration)

    def _apply(self, model: TransformedModel, batches: Sequence[Tensor] | None) -> PassResult:
        left, shares = heads_with_softmax(model), None
        if is_measured(self.heads) and batches is not None and left:
            shares = {head: share for head, share in entropy_shares(model, batches).items() if head in left}
        chosen = chosen_heads(self.heads, model.num_heads, self.name, shares) & heads_left(model)
        if not chosen:
            return PassResult(model, modified=False)
        drop_heads(model, chosen, self.output, self.name, batches)
        applied = dataclasses.replace(self, heads=heads_text(chosen)) if shares is not None else None
        return PassResult(model, modified=True, applied=applied)
