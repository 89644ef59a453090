"""Callbacks of a training run: records of the model, progress on the terminal, and checks before each update.

At each event of a run lines of metrics are written, gradients are checked before an update, and whole checkpoints are
marked. The model's records over time are its entropies, learned settings, and how large activations are. A person sees
loss, speed and the time that is left, as a bar or in plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aero_compile.model import TransformedModel
from aero_compile.training import measures as probes
from aero_compile.training.regularized_model import EntropyRegularizedModel
from aero_compile.training.run_directory import (
    ACTIVATIONS_FILE,
    ENTROPIES_FILE,
    METRICS_FILE,
    PARAMETERS_FILE,
    RunDirectory,
)


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


class Pace:
    """Tokens a second of training alone: evaluation and checkpoints do not count as its time."""

    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None
        self._depth = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body out; may be nested."""
        begin, self._depth = time.monotonic(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._since is not None and self._depth == 0:
                moment, tokens = self._since
                self._since = (moment + time.monotonic() - begin, tokens)

    def tokens_per_second(self, tokens: int) -> float | None:
        """The speed since the last call, with `tokens` seen by now; None at the first call."""
        now, before = time.monotonic(), self._since
        self._since = (now, tokens)
        if before is None or now <= before[0]:
            return None
        return round((tokens - before[1]) / (now - before[0]), 1)


class TrainingProgress(ProgressCallback):
    """Trainer's bar, which tells the time that is left, with loss, perplexity and tokens a second beside it."""

    training_bar: Any
    prediction_bar: Any

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self.shown: dict[str, str] = {}
        if self.training_bar is not None and state.global_step:  # a resumed run: its rate is that of its own steps
            self.training_bar.n = self.training_bar.initial = self.current_step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or self.training_bar is None:
            return
        words = _words(logs or {})
        if logs and "eval_loss" in logs:  # stays on the screen, above the bar
            self.training_bar.write(f"step {state.global_step}: {', '.join(words.values())}")
        self.shown |= words
        self.training_bar.set_postfix_str(", ".join(self.shown.values()))

    def close(self) -> None:
        """End the line of a bar that an exception left open, so that what is printed next begins a line."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.training_bar = self.prediction_bar = None


class TrainingLines(TrainerCallback):
    """A plain line on standard error for every log event: for log files and pipes, where a bar is noise."""

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begun = (time.monotonic(), state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        words = list(_words(logs or {}).values())
        if state.is_world_process_zero and words:
            words += self._left(state) if "loss" in (logs or {}) else []
            print(f"step {state.global_step}/{state.max_steps}: {', '.join(words)}", file=sys.stderr, flush=True)

    def _left(self, state: TrainerState) -> list[str]:
        begin, step = self._begun or (0.0, state.global_step)
        if not step < state.global_step < state.max_steps:
            return []
        seconds = (time.monotonic() - begin) / (state.global_step - step) * (state.max_steps - state.global_step)
        return [f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"]


@contextmanager
def bars_on_terminals_alone() -> Iterator[None]:
    """Keep the bars of libraries that read and tokenize away from everything but a terminal."""
    import datasets
    from transformers.utils import logging as messages

    off = not sys.stderr.isatty()
    shown = (not datasets.are_progress_bars_disabled(), messages.is_progress_bar_enabled())
    if off:
        datasets.disable_progress_bars()
        messages.disable_progress_bar()
    try:
        yield
    finally:
        if off and shown[0]:
            datasets.enable_progress_bars()
        if off and shown[1]:
            messages.enable_progress_bar()


def _words(logs: dict[str, Any]) -> dict[str, str]:
    """What of a log event is worth the room on one line."""
    forms = {
        "loss": "loss {:.4g}",
        "eval_loss": "held-out {:.4g}",
        "perplexity": "perplexity {:.4g}",
        "penalty_share": "penalty share {:.2%}",
        "heads_outside": "{:.3g} heads outside",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    return {key: form.format(logs[key]) for key, form in forms.items() if isinstance(logs.get(key), float)}


class NothingToTrain(Exception):
    """Ends a run whose last step was taken already: Trainer itself would take one more."""


class Recorder(TrainerCallback):
    """Writes metrics and marks checkpoints; has gradients checked, and more, before each update."""

    def __init__(
        self,
        run: RunDirectory,
        keep: int | None,
        *,
        begin_step: Callable[[], None],
        before_update: Callable[[], None],
        wait: Callable[[], None],
    ) -> None:
        self.run, self.begin, self.keep = run, time.time(), keep
        self.begin_step, self.before_update, self.wait = begin_step, before_update, wait

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            raise NothingToTrain

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begin_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        record = {"step": state.global_step, "time": round(time.time(), 3)}
        record["seconds"] = round(time.time() - self.begin, 3)
        for key, value in (logs or {}).items():
            record["tokens" if key == "num_input_tokens_seen" else key] = value
        self.run.append(METRICS_FILE, record)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.before_update()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.wait()  # each process writes its own random state
        self.run.mark_complete(state.global_step, self.keep, state.best_model_checkpoint)
