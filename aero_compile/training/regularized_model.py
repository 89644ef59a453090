"""The model wrapper that trains: a transformed model with its entropy thresholds and the regularized loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aero_compile.across_processes import process_count, with_means_of_all
from aero_compile.deviation_spread import deviation_taps
from aero_compile.entropy import REDUCTIONS, Reduction, entropy_regularization, headwise, layer_means
from aero_compile.errors import InputError
from aero_compile.ir.checkpointing import Checkpointable, Checkpoints
from aero_compile.penalty_control import PenaltyControl, against_own_maximum, followed_weight, initial_thresholds
from aero_compile.score_spread import spread_penalty
from aero_compile.tapped import run_tapped
from aero_compile.training.distillation import Distiller


class TrainingOutput(dict[str, Any]):
    """A dict whose entries are also attributes; absent ones read as None. What Trainer expects."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class EntropyRegularizedModel(Checkpointable, nn.Module):
    """A transformed model together with its entropy thresholds and the regularized loss.

    `model`: a TransformedModel (or anything called the same way that has `num_layers` and
    `num_heads`). `weight`: lambda; 0 turns regularization off, and then the thresholds are not
    trained. `threshold_init`: start of every theta; the paper gives no value, 0.5 is half the
    range. `thresholds` is a Parameter `[L, H]`, saved with the module. `warms_up`: the penalty is
    multiplied by `weight_share`, a scalar buffer that whoever trains sets from 0 to 1. `distiller`: adds
    terms that compare the model with a teacher (`aero_compile.training.distillation`), in training alone.
    `spread_weight`: weight of `aero_compile.score_spread.spread_penalty`; 0 leaves it out. `deviation_weight`: weight
    of the mean of `aero_compile.deviation_spread.deviation_spread` over the norms that the model has. The attribute
    `listing_blocks`, if set, is the number of blocks that the listing's penalty is a sum over, whatever the batch is.

    `control`: ways to keep the penalty acting (`aero_compile.penalty_control`). With `waits` the scalar buffer
    `thresholds_move` is set from 0 to 1 by whoever trains. With `share` the buffer `followed_weight`, saved with the
    module, is lambda; whoever trains calls `follow` once a step.

    Everything is computed inside `forward`, so data-parallel wrappers see every parameter. Tied weights
    are written once in `state_dict()` and shared again by `load_state_dict`.
    """

    # Trainer then scales the per-batch mean by the accumulation steps; exact because blocks are full.
    accepts_loss_kwargs = False

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 0.0,
        margin: float = 0.1,
        threshold_init: float = 0.5,
        reduction: Reduction = "algorithm",
        warms_up: bool = False,
        distiller: Distiller | None = None,
        spread_weight: float = 0.0,
        deviation_weight: float = 0.0,
        control: PenaltyControl = PenaltyControl(),  # noqa: B008, it is frozen
    ) -> None:
        super().__init__()
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"the weight (lambda) must be a number of at least 0, not {weight}")
        if not (math.isfinite(margin) and margin >= 0):
            raise InputError(f"the margin (gamma) must be a number of at least 0, not {margin}")
        if not 0 <= threshold_init <= 1:
            raise InputError(f"thresholds are fractions of the largest entropy: 0 to 1, not {threshold_init}")
        if not (math.isfinite(spread_weight) and spread_weight >= 0):
            raise InputError(f"the weight of the spread must be a number of at least 0, not {spread_weight}")
        if not (math.isfinite(deviation_weight) and deviation_weight >= 0):
            raise InputError(f"the weight of deviations must be a number of at least 0, not {deviation_weight}")
        if reduction not in REDUCTIONS:
            raise InputError(f"unknown reduction {reduction!r} (known: {', '.join(REDUCTIONS)})")
        heads = [int(count) for count in model.num_heads]  # type: ignore[union-attr]
        if weight > 0 and len(set(heads)) != 1:
            raise InputError(f"entropy regularization needs equally many heads in every layer, not {heads}")
        self.model = model
        self.weight, self.margin, self.reduction = weight, margin, reduction
        self.distiller, self.spread_weight = distiller, spread_weight
        self.deviation_weight = deviation_weight
        self.listing_blocks: int | None = None
        self.control = control
        start = initial_thresholds(heads, threshold_init, control.targets)
        self.thresholds = nn.Parameter(start, requires_grad=weight > 0 and control.learns)
        # Buffers, not numbers: torch.compile would compile anew for every value.
        self.register_buffer("weight_share", torch.ones(()) if warms_up else None, persistent=False)
        self.register_buffer("thresholds_move", torch.zeros(()) if control.waits else None, persistent=False)
        self.register_buffer("followed_weight", torch.tensor(float(weight)) if control.share and weight else None)
        self.weight_share: Tensor | None
        self.thresholds_move: Tensor | None
        self.followed_weight: Tensor | None
        self.register_state_dict_post_hook(_drop_tied)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_restore_tied)  # type: ignore[no-untyped-call]

    def _set_checkpoints(self, checkpoints: Checkpoints | None) -> None:
        if not isinstance(self.model, Checkpointable):
            raise InputError(f"a {type(self.model).__name__} has no gradient checkpointing: a TransformedModel has")
        super()._set_checkpoints(checkpoints)
        self.model._set_checkpoints(checkpoints)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_entropies: bool = False,
        output_spreads: bool = False,
    ) -> TrainingOutput:
        """Loss and logits of a batch of token ids `[B, T]`.

        In training mode `loss = cross_entropy + lambda * penalty + spread_weight * spread_penalty + deviation_weight *
        deviation_penalty`; in eval mode it is the plain cross entropy, so that held-out losses compare between
        settings. Also returned: `logits` `[B, T, V]`, and detached `ce_loss`, `penalty`, `spread_penalty`,
        `deviation_penalty` (scalars), `entropies`, L tensors `[H]` averaged over batch
        and positions (always when regularizing, else on `output_entropies`), and on `output_spreads` the largest
        spreads of scores over both, L tensors `[H]`. When regularizing, detached too: `weighted_penalty` (lambda times
        the penalty), `heads_outside` (how many heads are outside of the margin) and `relative_entropies` (L tensors
        `[H]`, what thresholds are compared with: fractions of the largest entropy). In eval mode, with entropies:
        `row_shares`, L tensors `[H]`, the mean over rows i > 0 of E_i / log(i + 1).
        """
        regularize = self.training and self.weight > 0 and labels is not None
        wanted = regularize or output_entropies
        narrows = self.training and self.spread_weight > 0 and labels is not None
        measured = {"output_entropies": wanted} | ({"output_spreads": True} if narrows or output_spreads else {})
        distiller = self.distiller if self.training and labels is not None else None
        taps: dict[str, Any] = {} if distiller is None else dict(distiller.terms.taps)
        if self.training and self.deviation_weight > 0 and labels is not None:
            taps["deviations"] = deviation_taps
        model: Any = self.model
        run = partial(run_tapped, model, taps) if taps else model
        out = run(input_ids, attention_mask=attention_mask, labels=labels, **measured)
        result = TrainingOutput()
        if labels is not None:
            result["loss"] = out.loss
        result["logits"] = out.logits
        if labels is not None:
            result["ce_loss"] = out.loss.detach()
        if wanted:
            result["entropies"] = [layer.detach() for layer in layer_means(out.entropies)]
        if wanted and not self.training:
            result["row_shares"] = _row_shares(out.entropies)
        if output_spreads:
            result["spreads"] = [layer.detach().amax((0, 2)) for layer in out.spreads]
        if narrows:
            spread = spread_penalty(out.spreads)
            result["loss"] = result["loss"] + self.spread_weight * spread
            result["spread_penalty"] = spread.detach()
        if "deviations" in taps:
            spreads = out["inside"]["deviations"]
            deviations = torch.stack(spreads).mean() if spreads else torch.zeros_like(out.loss)
            result["loss"] = result["loss"] + self.deviation_weight * deviations
            result["deviation_penalty"] = deviations.detach()
        if regularize:
            length = out.entropies[0].shape[2]
            entropies = against_own_maximum(out.entropies) if self.control.by_row else out.entropies
            if self.reduction == "algorithm":
                entropies = with_means_of_all(entropies)
            penalty = self._penalty(entropies, length)
            share = 1.0 if self.weight_share is None else self.weight_share
            weight = self.weight if self.followed_weight is None else self.followed_weight
            weighted = weight * share * penalty
            result["loss"] = result["loss"] + weighted
            result["penalty"], result["weighted_penalty"] = penalty.detach(), weighted.detach()
            result["relative_entropies"], result["heads_outside"] = self._state_of_heads(entropies, length)
        if distiller is not None:
            result["loss"] = result["loss"] + (distiller.terms.ce - 1.0) * out.loss
            for name, term in distiller.compare(out, input_ids, attention_mask).items():
                result["loss"] = result["loss"] + getattr(distiller.terms, name) * term
                result[f"distill_{name}"] = term.detach()
        return result

    def follow(self, ce_loss: Tensor, penalty: Tensor) -> None:
        """Move lambda towards its share of the cross entropy, given the means of a step; nothing without a share."""
        if self.followed_weight is not None:
            new = followed_weight(self.followed_weight, self.weight, ce_loss, penalty, self.control.share)
            self.followed_weight.copy_(new)

    @property
    def current_weight(self) -> float:
        """Lambda as it is: with its warm-up, and followed if it follows the loss."""
        weight = self.weight if self.followed_weight is None else float(self.followed_weight)
        return weight if self.weight_share is None else weight * float(self.weight_share)

    def _penalty(self, entropies: Sequence[Tensor], length: int) -> Tensor:
        """The penalty of the batch of all processes; averaged over them, as data-parallel training does, it stays."""
        thresholds: Tensor = self.thresholds
        if self.thresholds_move is not None:  # a gradient of 0, not none: data-parallel training waits for one
            thresholds = thresholds.detach() + self.thresholds_move * (thresholds - thresholds.detach())
        if self.reduction == "listing":  # a sum over the batch
            blocks, own = self.listing_blocks, entropies[0].shape[0]
            scale = process_count() if blocks is None else blocks / own
            return scale * entropy_regularization(entropies, thresholds, self.margin, "listing", length)
        return entropy_regularization(entropies, thresholds, self.margin, seq_len=length)

    @torch.no_grad()
    def _state_of_heads(self, entropies: Sequence[Tensor], length: int) -> tuple[list[Tensor], Tensor]:
        """Heads' mean entropies as fractions of the largest, and how many are outside of the margin, in both forms."""
        largest = math.log(length) or 1.0
        relative = headwise(entropies) / largest
        outside = (relative - self.thresholds).abs() > self.margin
        return list(relative), outside.sum().to(relative.dtype)


def _row_shares(entropies: Sequence[Tensor]) -> list[Tensor]:
    """Headwise means of E_i / log(i + 1) over batch and rows i > 0, L tensors `[H]`."""
    largest = math.log(entropies[0].shape[2]) or 1.0
    return [layer.detach() / largest for layer in layer_means(against_own_maximum(entropies))]


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Names under which a parameter is seen again, each with the name under which it is saved."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            tied[name] = kept
    return tied


def _drop_tied(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _tied_names(module):
        state.pop(prefix + name, None)


def _restore_tied(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, kept in _tied_names(module).items():
        if prefix + kept in state:
            state.setdefault(prefix + name, state[prefix + kept])
