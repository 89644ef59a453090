"""The training loop: Hugging Face's Trainer with entropies, exact records, and a hard stop at NaN."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy

from aero_compile.across_processes import mean_over_processes
from aero_compile.errors import OutputDirError, TrainingError
from aero_compile.model import TransformedModel
from aero_compile.passes.lib.head_edits import heads_with_softmax
from aero_compile.training import measures as held_out
from aero_compile.training.callbacks import (
    ModelRecords,
    NothingToTrain,
    Pace,
    Recorder,
    TrainingLines,
    TrainingProgress,
)
from aero_compile.training.data.stream import STATE_FILE, Snapshot, StreamedBlocks
from aero_compile.training.learning_rates import fill_groups, scale_by_stage, split_groups
from aero_compile.training.nonfinite import bad_gradient, non_finite_parameter, where_values_broke
from aero_compile.training.penalty_watch import PenaltyWatch
from aero_compile.training.run_directory import METRICS_FILE, RunDirectory
from aero_compile.training.schedule import SWITCHED_FILE, HeadSwitching, StagedRemoval

# Learnable settings rather than weight matrices; everything with one dimension is exempt as well.
_NEVER_DECAYED = ("log_t", "thresholds")

logger = logging.getLogger("aero_compile.retrain")

_PARTS = (
    *("ce_loss", "penalty", "weighted_penalty", "heads_outside", "spread_penalty", "deviation_penalty"),
    *("distill_kl", "distill_hidden", "distill_attention"),
)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


class RegularizedTrainer(Trainer):
    """Trains an EntropyRegularizedModel and writes its run directory.

    Weight decay touches matrices only. Every step's loss and gradients are checked: NaN or infinity raises
    TrainingError with the place where it began, before the optimizer can spread it, on all processes.
    A checkpoint with non-finite weights is never written; old ones go once the new one is complete
    (`save_total_limit`).
    """

    def __init__(
        self,
        *,
        run: RunDirectory,
        entropy_blocks: int,
        args: TrainingArguments,
        ffn_spectra: bool = False,
        lr_scale: Mapping[str, float] = MappingProxyType({}),
        lambda_warmup: float = 0.0,
        threshold_warmup: float = 0.0,
        stages: StagedRemoval | None = None,
        switching: HeadSwitching | None = None,
        **options: Any,
    ) -> None:
        callback = Recorder(
            run,
            args.save_total_limit,
            begin_step=self.begin_step,
            before_update=self.before_update,
            wait=lambda: self.accelerator.wait_for_everyone(),
        )
        args.save_total_limit = None  # the recorder removes old checkpoints, later than Trainer would
        super().__init__(args=args, **options, callbacks=[callback])
        self._show_progress()
        self.run_directory, self.entropy_blocks = run, entropy_blocks
        self.records = ModelRecords(run, ffn_spectra=ffn_spectra)
        self._pace = Pace()
        self.lr_scale, self.lambda_warmup, self.stages = lr_scale, lambda_warmup, stages
        self.threshold_warmup, self.switching = threshold_warmup, switching
        self._watch: PenaltyWatch | None = None
        self._parts_of_step: list[tuple[Tensor, Tensor]] = []
        self._relative_entropies: list[Tensor] | None = None
        self._sums: dict[str, Tensor] = {}
        self._counted = 0
        self._inputs: dict[str, Any] = {}
        self._train_entropies: list[Tensor] | None = None

    def _show_progress(self) -> None:
        """A bar on a terminal, plain lines elsewhere; a notebook keeps Trainer's table."""
        bar = self.pop_callback(ProgressCallback)
        lines = self.pop_callback(PrinterCallback)
        if bar is not None and sys.stderr.isatty():
            self.add_callback(TrainingProgress)
        elif bar is not None or lines is not None:
            self.add_callback(TrainingLines)

    def train_to_end(self, checkpoint: Path | None) -> None:
        """Train, from `checkpoint` on if there is one; no step where there is none left to take."""
        self.args.eval_on_start &= checkpoint is None  # what is resumed was looked at when it began
        blocks: Any = self.train_dataset
        if isinstance(blocks, StreamedBlocks):
            state = None if checkpoint is None else checkpoint / STATE_FILE
            start = Snapshot.load(state) if state is not None and state.is_file() else Snapshot()
            self.train_dataset: Any = blocks.begun_at(start)
        try:
            with contextlib.suppress(NothingToTrain):
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            for shown in self.callback_handler.callbacks:
                if isinstance(shown, TrainingProgress):
                    shown.close()
        if self.stages is not None and self.state.global_step >= self.stages.steps:
            self.stages.finish(self._transformed())

    # -- optimizer and loss -----------------------------------------------------------------------------

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices only: no biases, norms, scales, temperatures or thresholds."""
        named = model.named_parameters()
        return [n for n, p in named if p.dim() > 1 and n.rpartition(".")[2] not in _NEVER_DECAYED]

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer, with a group for every role whose learning rate is scaled."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and (self.lr_scale or self.stages or self.switching):
            split_groups(optimizer, self.lr_scale)
            self._fill_groups()
        return optimizer

    def _fill_groups(self) -> None:
        wrapper: Any = self.model
        named = [(name, p) for name, p in wrapper.named_parameters() if p.requires_grad]
        decayed = set(self.get_decay_parameter_names(wrapper))
        fill_groups(self.optimizer, named, decayed, self.lr_scale, self.args.weight_decay)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the learning rate, times the factor of the stage that a step is in."""
        given = self.args.warmup_steps
        # A warm-up of all steps leaves the only one at a rate of 0, and polynomial divides by the steps after it.
        if self.args.get_warmup_steps(num_training_steps) == num_training_steps > 0:
            self.args.warmup_steps = num_training_steps - 1
        try:
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.warmup_steps = given
        if self.stages is not None and any(stage.learning_rate is not None for stage in self.stages.stages):
            scale_by_stage(scheduler, partial(self.stages.rate, peak=self.args.learning_rate))
        return scheduler

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        """The model's own loss; its parts and the entropies are kept for the next log line."""
        if model.training and self._logs_next():
            inputs = {**inputs, "output_entropies": True}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            for name in _PARTS:
                if outputs.get(name) is not None:
                    self._sums[name] = self._sums.get(name, 0.0) + outputs[name].mean()
            self._counted += 1
            if outputs.get("penalty") is not None:
                self._parts_of_step.append((outputs["ce_loss"].mean(), outputs["penalty"].mean()))
            self._train_entropies = outputs.get("entropies")
            self._relative_entropies = outputs.get("relative_entropies")
            self._inputs = inputs
        elif not bool(torch.isfinite(loss).all()):
            self._inputs = inputs
        return (loss, outputs) if return_outputs else loss

    def _logs_next(self) -> bool:
        step, every = self.state.global_step + 1, self.state.logging_steps
        if self.args.logging_strategy != IntervalStrategy.STEPS:
            return bool(step == self.state.max_steps)
        return bool(every) and (step % every == 0 or step == 1 or step == self.state.max_steps)

    # -- what goes wrong --------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Tensor:
        """One forward and backward pass; raises TrainingError if the loss is not finite."""
        self._warm_up()
        loss: Tensor = super().training_step(model, inputs, *args, **options)
        if self._anywhere(~torch.isfinite(loss).all()):
            self._stop("the loss became NaN" if bool(loss.isnan().any()) else "the loss became infinite")
        return loss

    def _warm_up(self) -> None:
        """Set what warms up: it follows from the step, and so is the same after a resume."""
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        if self.lambda_warmup:
            steps = self._steps_of(self.lambda_warmup)
            wrapper.weight_share.fill_(min(1.0, (self.state.global_step + 1) / max(steps, 1.0)))
        if self.threshold_warmup:
            wrapper.thresholds_move.fill_(float(self._thresholds_move()))

    def _steps_of(self, warmup: float) -> float:
        return warmup * (self.state.max_steps if warmup < 1 else 1)

    def _thresholds_move(self) -> bool:
        return bool(self.state.global_step >= self._steps_of(self.threshold_warmup))

    def before_update(self) -> None:
        """Before an update of weights: check the gradients, hold thresholds that wait, and let lambda follow."""
        self.check_gradients()
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        if self.threshold_warmup and not self._thresholds_move():
            wrapper.thresholds.grad = None  # the optimizer knows nothing of it until it moves
        if wrapper.followed_weight is not None and self._parts_of_step:
            means = torch.stack([torch.stack(list(parts)).float() for parts in self._parts_of_step]).mean(0)
            wrapper.follow(*mean_over_processes(means))
        self._parts_of_step = []

    def check_gradients(self) -> None:
        """Raise TrainingError if a gradient is not finite (float16 scaling handles its own overflows)."""
        if getattr(self.accelerator, "scaler", None) is not None:
            return
        model: Any = self.model
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if self._anywhere(~torch.isfinite(norm)):
            self._stop("the gradients became NaN or infinite", look_at_gradients=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights; raises TrainingError instead of writing weights that are not finite."""
        model: Any = self.model
        bad = non_finite_parameter(model.named_parameters(), "parameter")
        if self._anywhere(torch.tensor(bad is not None, device=self.args.device)):
            self._stop("a weight became NaN or infinite")
        if output_dir is not None:
            self.run_directory.unmark(output_dir)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        folder = f"checkpoint-{self.state.global_step}"
        try:
            with self._pace.paused(), self.run_directory.writing(folder):
                super()._save_checkpoint(*args, **options)
                self._save_stream(self.run_directory.path / folder)
                if self.switching is not None:
                    self.switching.save(self.run_directory.path / folder / SWITCHED_FILE)
        except OutputDirError as error:
            shutil.rmtree(self.run_directory.path / folder, ignore_errors=True)
            last = self.run_directory.last_checkpoint()
            kept = (
                f"the last whole checkpoint is {last}. Make room and continue with --resume"
                if last
                else "no checkpoint had been written before. Make room; --resume then begins at the first step"
            )
            raise OutputDirError(f"{error}; {kept}") from error.__cause__

    def _save_stream(self, folder: Path) -> None:
        """Note where a streamed dataset is; without that a resumed run reads it from the beginning."""
        args, data = self.args, self.train_dataset
        if isinstance(data, StreamedBlocks) and self.run_directory.writes:
            batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            note = data.note_before(self.state.global_step * batch)
            if note is not None:
                note.save(folder / STATE_FILE)

    def _anywhere(self, flag: Tensor) -> bool:
        if self.args.world_size > 1:
            count: Any = self.accelerator.reduce(flag.float().reshape(1), reduction="sum")
            return bool(count.item() > 0)
        return bool(flag)

    def _stop(self, what: str, look_at_gradients: bool = False) -> None:
        if look_at_gradients:
            where = self._bad_gradient() or "the backward pass (repeated, the last batch gives finite gradients)"
        else:
            where = self._diagnose()
        model = self._inner()
        if model is not None:
            with self.accelerator.autocast():
                self.records.failure(self.state.global_step + 1, what, where, model, self._inputs.get("input_ids"))
        last = self.run_directory.last_checkpoint()
        kept = f"The last good checkpoint is {last}." if last else "No checkpoint had been written yet."
        step = self.state.global_step + 1
        raise TrainingError(
            f"{what} at step {step}. It began in {where}. {kept} A lower learning "
            "rate, more warmup, or another recipe (scaled FFN, entropy regularization) may help.",
            step=step,
            place=where,
        )

    def _diagnose(self) -> str:
        model: Any = self.model
        if self.is_fsdp_enabled or not self._inputs:
            return where_values_broke(model, None)
        batch = self._prepare_inputs({k: self._inputs[k] for k in ("input_ids", "attention_mask") if k in self._inputs})
        with self.accelerator.autocast():
            return where_values_broke(self.accelerator.unwrap_model(model), batch)

    def _bad_gradient(self) -> str | None:
        if self.is_fsdp_enabled or not self._inputs:
            return None
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            return bad_gradient(wrapper, self._prepare_inputs(self._inputs))

    # -- what is recorded -------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, or the perplexity, to a log event."""
        if "loss" in logs and self._counted:
            for name, total in self._sums.items():
                mean: Any = self.accelerator.reduce(total.detach().float() / self._counted, reduction="mean")
                logs[name] = float(mean)
            self._sums, self._counted = {}, 0
            if "weighted_penalty" in logs:
                logs["penalty_share"] = logs.pop("weighted_penalty") / max(logs["ce_loss"], 1e-12)
            speed = self._pace.tokens_per_second(self.state.num_input_tokens_seen)
            if speed is not None:
                logs["tokens_per_second"] = speed
            self._record_parameters("log")
            wrapper: Any = self.accelerator.unwrap_model(self.model)
            if self.lambda_warmup or wrapper.followed_weight is not None:
                logs["lambda"] = wrapper.current_weight
        if "eval_loss" in logs:
            logs["perplexity"] = perplexity(logs["eval_loss"])
        super().log(logs, start_time)
        if "loss" in logs and self._train_entropies is not None:
            self.records.entropies(self.state.global_step, "log", "train", self._by_head(self._train_entropies))
        if "penalty_share" in logs:
            self._watch_penalty(logs["penalty_share"], logs["heads_outside"])

    def _watch_penalty(self, share: float, heads_outside: float) -> None:
        """Warn, once in a run, where the penalty is too small to act; what was recorded before a resume counts."""
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        step, steps = self.state.global_step, self.state.max_steps
        if self._watch is None:
            fixed = not wrapper.thresholds.requires_grad
            self._watch = PenaltyWatch(fixed=fixed, first_step=self._steps_of(self.lambda_warmup))
            before = self.run_directory.read_lines(METRICS_FILE)
            self._watch.replay([record for record in before if record["step"] < step], steps)
        if self._watch.observe(step, steps, share, heads_outside):
            text = self._watch.text(wrapper, step, share, heads_outside)
            self.run_directory.append(METRICS_FILE, {"step": step, "event": "warning", "warning": text})
            logger.warning("warning: %s", text)

    def _by_head(self, layers: list[Tensor]) -> list[list[float]]:
        """Numbers of each head, `[L][H]`, of L tensors that several devices may have concatenated."""
        heads = self._transformed().num_heads
        return [layer.float().view(-1, int(heads[i])).mean(0).tolist() for i, layer in enumerate(layers)]

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """As Trainer's; in several processes the mean over all held-out blocks, where Trainer counts some twice."""
        if self.args.world_size == 1 or self.args.bf16_full_eval or self.args.fp16_full_eval:
            return super().evaluation_loop(*args, **options)
        blocks: Any = self.eval_dataset
        model: Any = self.model
        model.eval()
        size, share = self.args.eval_batch_size, self.args.eval_batch_size * self.args.world_size
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for start in range(0, len(blocks), share):
            first = start + size * self.args.process_index
            own = [blocks[i] for i in range(first, min(first + size, len(blocks)))]
            # A process without blocks of its own takes part in the exchange of weights all the same.
            batch = self._prepare_inputs(default_data_collator(own or [blocks[0]]))
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch)
            sums += torch.stack([loss.double() * len(own), torch.tensor(float(len(own))).to(sums)])
        totals: Any = self.accelerator.reduce(sums, reduction="sum")
        name = f"{options.get('metric_key_prefix', 'eval')}_loss"
        return EvalLoopOutput(None, None, {name: float(totals[0] / totals[1])}, len(blocks))

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Held-out loss, perplexity and headwise entropies; TrainingError if the loss is not finite."""
        with self._pace.paused():
            metrics: dict[str, float] = super().evaluate(*args, **options)
            if not math.isfinite(metrics.get("eval_loss", 0.0)):
                self._stop("the held-out loss became NaN or infinite")
            if "eval_loss" in metrics:
                metrics["perplexity"] = perplexity(metrics["eval_loss"])
            entropies = self.measure("eval")
            if self.switching is not None:
                step, left = self.state.global_step, heads_with_softmax(self._transformed())
                self.switching.observe(step, step / max(1, self.state.max_steps), entropies, left)
        return metrics

    def begin_step(self) -> None:
        """Before a step: the passes of the stage that begins with it, or heads that become static."""
        if self.stages is None and self.switching is None:
            return
        step, model = self.state.global_step, self._transformed()
        if self.switching is not None and self.switching.chosen:
            self._change(len(self.switching.switched), self.switching.text, partial(self.switching.enter, model))
        if self.stages is None:
            return
        if self.stages.begins(step):
            number = self.stages.number(step)
            self._change(number, self.stages.stages[number].text, partial(self.stages.enter, model, number))
        self.stages.blend(model, step)

    def _change(self, number: int, passes: str, change: Callable[[], None]) -> None:
        """Change the model between two steps, and record what that does to the held-out loss."""
        step = self.state.global_step
        with self._pace.paused():
            before = self._held_out_loss()
            change()
            self._fill_groups()
            losses = {"loss_before": before, "loss_after": self._held_out_loss()}
        record = {"step": step, "event": "stage", "stage": number, "passes": passes}
        self.run_directory.append(METRICS_FILE, record | losses)
        logger.info(
            "stage %d at step %d: %s; held-out loss %.4f, was %.4f",
            *(number, step, passes or "no change", losses["loss_after"], before),
        )

    def _transformed(self) -> Any:
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        return wrapper.model

    def final_metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation if it was of this model, else of a new one."""
        last = [] if self.args.load_best_model_at_end else self.state.log_history[-2:]
        for event in reversed(last):
            if "eval_loss" in event and event.get("step") == self.state.global_step:
                return dict(event)
        return self.evaluate()

    def measure(self, event: str) -> list[list[float]]:
        """Record what is looked at over time on held-out blocks; returns the headwise entropies `[L][H]` (nats)."""
        step, size, blocks = self.state.global_step, self.args.eval_batch_size, self._held_out()
        entropies, shares = held_out.headwise_entropies(self.model, blocks, size, self.args.device, self.entropy_blocks)
        self.records.entropies(step, event, "validation", entropies, shares)
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        spreads = None
        if wrapper.spread_weight:
            spreads = held_out.headwise_spreads(self.model, blocks, size, self.args.device, self.entropy_blocks)
        self._record_parameters(event, spreads)
        model = self._inner()
        if model is not None:
            count = min(self.entropy_blocks, len(blocks))
            with self.accelerator.autocast():
                self.records.activations(step, event, model, list(held_out.batches(blocks, count, size)))
        return entropies

    def _held_out(self) -> Any:
        return self.eval_dataset

    def _held_out_loss(self) -> float:
        return held_out.mean_loss(self.model, self._held_out(), self.args.eval_batch_size, self.args.device)

    def _inner(self) -> TransformedModel | None:
        """The transformed model, on the process that records; None on others and where weights are spread (FSDP)."""
        wrapper: Any = self.accelerator.unwrap_model(self.model)
        inner = getattr(wrapper, "model", None)
        whole = self.run_directory.writes and not self.is_fsdp_enabled
        return inner if whole and isinstance(inner, TransformedModel) else None

    def _record_parameters(self, event: str, spreads: list[list[float]] | None = None) -> None:
        model = self._inner()
        if model is not None:
            wrapper: Any = self.accelerator.unwrap_model(self.model)
            relative = self._relative_entropies if event == "log" else None
            rows = None if relative is None else self._by_head(relative)
            self.records.parameters(self.state.global_step, event, wrapper, model, spreads, rows)
