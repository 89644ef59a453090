"""What happens at each event of a run: lines of metrics, checks before an update, marks of whole checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aero_compile.training.run_directory import METRICS_FILE, RunDirectory


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
