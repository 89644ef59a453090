"""What a run writes down about its model over time: entropies, learned settings, and how large activations are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aero_compile.model import TransformedModel
from aero_compile.training import probes
from aero_compile.training.regularized_model import EntropyRegularizedModel
from aero_compile.training.run_directory import ACTIVATIONS_FILE, ENTROPIES_FILE, PARAMETERS_FILE, RunDirectory


class ModelRecords:
    """Writes lines of `entropies.jsonl`, `parameters.jsonl` and `activations.jsonl`."""

    def __init__(self, run: RunDirectory, *, ffn_spectra: bool) -> None:
        self._run, self._ffn_spectra = run, ffn_spectra

    def entropies(
        self,
        step: int,
        event: str,
        split: str,
        entropies: list[list[float]],
        row_shares: list[list[float]] | None = None,
    ) -> None:
        """Headwise entropies `[L][H]` in nats, and as shares of what each row can have, if that was measured."""
        record: dict[str, Any] = {"step": step, "event": event, "split": split, "entropies": entropies}
        if row_shares is not None:
            record["row_shares"] = [[float(f"{share:.6g}") for share in row] for row in row_shares]
        self._run.append(ENTROPIES_FILE, record)

    def parameters(
        self,
        step: int,
        event: str,
        wrapper: EntropyRegularizedModel,
        model: TransformedModel,
        spreads: list[list[float]] | None = None,
        relative_entropies: list[list[float]] | None = None,
    ) -> None:
        """What the passes and the regularization learn beside weights; no line where that is nothing.

        `spreads`: how far the scores of each head `[L][H]` spread at most, if that was measured. `relative_entropies`:
        of the training batch `[L][H]`, the fractions of the largest entropy that thresholds are compared with.
        """
        record: dict[str, Any] = {"step": step, "event": event}
        if wrapper.weight > 0:
            record["thresholds"] = [[float(f"{t:.6g}") for t in row] for row in wrapper.thresholds.tolist()]
        temperatures = probes.headwise_temperatures(model)
        if any(temperatures):
            record["temperatures"] = temperatures
        scalars = probes.learned_scalars(model)
        if scalars:
            record["scalars"] = scalars
        if relative_entropies is not None:
            record["relative_entropies"] = [[float(f"{e:.6g}") for e in row] for row in relative_entropies]
        if spreads is not None:
            record["score_spread"] = [[float(f"{s:.6g}") for s in row] for row in spreads]
        if len(record) > 2:
            self._run.append(PARAMETERS_FILE, record)

    def activations(self, step: int, event: str, model: TransformedModel, batches: Sequence[Tensor]) -> None:
        """How large hidden values are on held-out batches of token ids `[B, T]`, and spectra of FFNs if asked for."""
        scales = probes.activation_scales(model, batches)
        spectra = {"spectra": probes.ffn_spectra(model, batches)} if self._ffn_spectra else {}
        self._run.append(ACTIVATIONS_FILE, {"step": step, "event": event, "split": "validation", **scales, **spectra})

    def failure(self, step: int, what: str, where: str, model: TransformedModel, tokens: Tensor | None) -> None:
        """How large activations were on the batch that failed, with the place where it began."""
        record = {"step": step, "event": "failure", "what": what, "where": where}
        if tokens is not None:
            record |= probes.activation_scales(model, [tokens])
        self._run.append(ACTIVATIONS_FILE, record)
