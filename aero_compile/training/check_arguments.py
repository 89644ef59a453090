"""Flags of Trainer that a transformed model or this machine does not take, refused before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler

from aero_compile.errors import InputError, first_line
from aero_compile.training.options import RetrainOptions
from aero_compile.training.ranges import check_ranges
from aero_compile.training.trainer_arguments import TRAINER_RANGES

logger = logging.getLogger("aero_compile.retrain")

_UNSUPPORTED = (
    ("label_smoothing_factor", 0.0),
    ("neftune_noise_alpha", None),
    ("use_liger_kernel", False),
)


def check_streaming(options: RetrainOptions, arguments: TrainingArguments) -> None:
    """Raise InputError for a streamed dataset, which has no length, without a number of steps."""
    if options.streaming and arguments.max_steps < 1 and options.stages is None:
        raise InputError("--streaming reads a dataset whose length is not known: give --max-steps N")
    if options.streaming and arguments.dataloader_num_workers:
        raise InputError("--streaming reads in the main process: leave --dataloader-num-workers out")
    if options.streaming and (options.dedup or options.max_train_tokens is not None):
        raise InputError("--streaming goes with neither --dedup nor --max-train-tokens, which look at all of the text")


_SMALLEST_EPSILON = 1e-7
"""About the smallest positive number of float16; less is zero there, and Adam divides by it."""


def check_weights_type(options: RetrainOptions, arguments: TrainingArguments) -> None:
    """Raise InputError for float16 weights that could not be trained with these flags."""
    if options.dtype != "float16":
        return
    if arguments.fp16:
        raise InputError("--fp16 scales gradients of float32 weights: leave it, or --dtype float16, out")
    if "adam" in str(arguments.optim).lower() and arguments.adam_epsilon < _SMALLEST_EPSILON:
        raise InputError(f"--dtype float16: --adam-epsilon {arguments.adam_epsilon} is zero in it; 1e-4 is usual")


def name_best_metric(arguments: TrainingArguments) -> None:
    """Let `--metric-for-best-model` be what `metrics.jsonl` calls it; InputError for what is not measured.

    The best perplexity is that of the best loss.
    """
    name = arguments.metric_for_best_model
    if name in ("perplexity", "eval_perplexity"):
        arguments.metric_for_best_model, arguments.greater_is_better = "eval_loss", False
    elif name not in (None, "loss", "eval_loss"):
        raise InputError(f"--metric-for-best-model {name} is not measured: take eval_loss or perplexity")


def check_training_arguments(arguments: TrainingArguments) -> None:
    """Raise InputError for flags of Trainer that a transformed model, or this machine, does not support."""
    for name, off in _UNSUPPORTED:
        value = getattr(arguments, name, off)
        if value not in (off, None, False):
            raise InputError(f"--{name} is not supported for transformed models")
    check_ranges(arguments, TRAINER_RANGES)
    _check_reporters(arguments.report_to or ())
    plugin = getattr(arguments, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise InputError(
            "DeepSpeed's ZeRO stage 3 gathers weights module by module, and a transformed model is one graph: take "
            "stage 1 or 2, or --fsdp"
        )
    half = [name for name in ("fp16", "fp16_full_eval") if getattr(arguments, name)]
    if half and arguments.device.type == "cpu":
        raise InputError(f"--{half[0]} needs a GPU, and this run is on a CPU: leave it out, or take --bf16")


def check_trainable(model: nn.Module, name: str) -> None:
    """Raise InputError if no weight of the model `name` would be trained, and say so if some would not."""
    weights = dict(model.named_parameters())
    trained = [key for key, weight in weights.items() if weight.requires_grad]
    way_out = "to train them, as after PEFT's merge_and_unload: for p in model.parameters(): p.requires_grad_(True)"
    if not trained:
        raise InputError(
            f"model {name}: all {len(weights)} weights are frozen (requires_grad=False), and nothing would be trained; "
            f"{way_out}"
        )
    if len(trained) < len(weights):
        some = ", ".join(trained[:3]) + (", …" if len(trained) > 3 else "")
        frozen = len(weights) - len(trained)
        logger.warning(
            "model %s: %d of %d weights are frozen, trained are %s; %s", name, frozen, len(weights), some, way_out
        )


# Asked for by name; Trainer itself knows more, and says in its own words what they need.
_REPORTERS = ("tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "clearml")


def _check_reporters(names: str | Iterable[str]) -> None:
    for name in [names] if isinstance(names, str) else names:
        if name in _REPORTERS and find_spec(name) is None:
            raise InputError(f"--report-to {name} needs the package {name}, not installed: pip install {name}")


def check_made_of_flags(arguments: TrainingArguments) -> None:
    """Make a schedule, an optimizer and a compiler of their flags once: Trainer does so behind the first record.

    Without a learning rate, which the model's size may decide, nothing is made. Raises InputError, naming the flag.
    """
    if arguments.learning_rate is None:
        return
    _try(f"optim {_text(arguments.optim)} {arguments.optim_args or ''}".strip(), lambda: _optimizer(arguments))
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    kind, settings = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs or {}
    schedule = partial(get_scheduler, kind, sgd, num_warmup_steps=0, num_training_steps=1)
    text = f"lr-scheduler-type {_text(kind)} --lr-scheduler-kwargs {settings}"
    _try(text, lambda: schedule(scheduler_specific_kwargs=settings))
    if arguments.torch_compile:
        mode: Any = arguments.torch_compile_mode
        backend = arguments.torch_compile_backend or "inductor"
        compiled = partial(torch.compile, torch.nn.Identity(), backend=backend, mode=mode)
        _try(f"torch-compile with {backend}, {mode}", compiled)


def _optimizer(arguments: TrainingArguments) -> Any:
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    own = kind.__module__.startswith("torch.optim")  # those of other packages may need the model
    return kind([torch.nn.Parameter(torch.zeros(1))], **settings) if own else None


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _try(flags: str, make: Callable[[], object]) -> None:
    try:
        make()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        raise InputError(f"--{flags}: {first_line(error)}") from error
