"""What can be set: Hugging Face's TrainingArguments with fitting defaults, and which of them decide what is learned."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from aero_compile.errors import InputError
from aero_compile.training.learning_rates import USUAL_RATE
from aero_compile.training.ranges import BELOW_ONE, SOME_STEPS, STEPS, Range, check_ranges, number, whole


def _like(name: str, default: Any) -> Any:
    base = {f.name: f for f in dataclasses.fields(TrainingArguments)}[name]
    return field(default=default, metadata=dict(base.metadata))


def spread_by(arguments: TrainingArguments) -> str | None:
    """What spreads a model's weights or its optimizer over processes: "fsdp", "deepspeed", or None where nothing does.

    It is asked for by a flag of Trainer or by the configuration that `accelerate launch` was given.
    """
    for name in ("fsdp", "deepspeed"):
        launched = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true"
        if getattr(arguments, name) or launched:
            return name
    return None


_SEED = whole(0, 2**32 - 1)
TRAINER_RANGES: Mapping[str, Range] = {
    "per_device_train_batch_size": whole(1),
    "per_device_eval_batch_size": whole(1),
    "gradient_accumulation_steps": whole(1),
    "max_steps": whole(0, also=-1),
    "num_train_epochs": number(0),
    "learning_rate": number(0),
    "weight_decay": number(0),
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "adam_epsilon": number(0),
    "max_grad_norm": number(0),
    "warmup_steps": SOME_STEPS,
    "logging_steps": STEPS,
    "eval_steps": SOME_STEPS,
    "eval_delay": number(0),
    "save_steps": STEPS,
    "save_total_limit": whole(1),
    "seed": _SEED,
    "data_seed": _SEED,
    "eval_accumulation_steps": whole(1),
    "torch_empty_cache_steps": whole(1),
    "dataloader_num_workers": whole(0),
    "dataloader_prefetch_factor": whole(1),
    "ddp_timeout": whole(1),
    "ddp_bucket_cap_mb": whole(1),
}
"""Flags of Trainer that it takes out of their range, or refuses in words of its own."""


@dataclass
class RetrainArguments(TrainingArguments):
    """Hugging Face's TrainingArguments with defaults for training small language models."""

    _argument_group_name = "Hugging Face TrainingArguments"

    output_dir: str | None = _like("output_dir", "runs/retrain")
    per_device_train_batch_size: int = _like("per_device_train_batch_size", 16)
    per_device_eval_batch_size: int = _like("per_device_eval_batch_size", 16)
    num_train_epochs: float = _like("num_train_epochs", 1.0)
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Peak of the learning rate. Default: 1e-3, or, from scratch by --init auto, 1e-3 to 1e-2 by the "
            "model's width and number of layers."
        },
    )
    lr_scheduler_type: SchedulerType | str = _like("lr_scheduler_type", "cosine")  # noqa: RUF009
    warmup_steps: float = _like("warmup_steps", 0.05)
    weight_decay: float = _like("weight_decay", 0.1)
    logging_steps: float = _like("logging_steps", 20)
    logging_first_step: bool = _like("logging_first_step", True)
    eval_strategy: IntervalStrategy | str = _like("eval_strategy", "steps")  # noqa: RUF009
    eval_steps: float | None = _like("eval_steps", 200)
    dataloader_pin_memory: bool = _like("dataloader_pin_memory", torch.cuda.is_available())
    save_strategy: SaveStrategy | str = _like("save_strategy", "steps")  # noqa: RUF009
    save_steps: float = _like("save_steps", 200)
    save_total_limit: int | None = _like("save_total_limit", 2)
    # None first: HfArgumentParser drops the first member of the union and reads text for the rest.
    report_to: None | str | list[str] = field(  # noqa: RUF036
        default="auto",
        metadata={
            "help": "Where metrics go beside the run's own files: tensorboard, wandb, mlflow … or none. "
            "auto: tensorboard if it is installed."
        },
    )

    def __post_init__(self) -> None:
        check_ranges(self, TRAINER_RANGES)
        if self.ddp_backend is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise InputError(
                "--ddp-backend is for several processes, and this is the only one: start them with `torchrun "
                "--nproc-per-node N -m aero_compile.retrain …` (`accelerate launch` starts one process on CPUs)"
            )
        if spread_by(self) == "deepspeed" and find_spec("deepspeed") is None:
            raise InputError(
                "DeepSpeed is asked for and not installed: pip install deepspeed, or spread the weights by --fsdp, "
                "which needs nothing more"
            )
        if self.learning_rate is None and self.deepspeed:  # whose configuration is filled in now
            self.learning_rate = USUAL_RATE
        if self.report_to in ("auto", ["auto"]):
            self.report_to = "tensorboard" if find_spec("tensorboard") else "none"
        super().__post_init__()


# What a resumed run may set anew: where and how often it is looked at and written, and how fast it is computed.
# Everything else decides what is learned.
_FREE = frozenset(
    {
        *("output_dir", "resume_from_checkpoint", "local_rank", "do_train", "do_eval", "do_predict", "debug"),
        *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
        *("logging_dir", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "include_num_input_tokens_seen"),
        *(
            "eval_strategy",
            "eval_steps",
            "eval_delay",
            "eval_on_start",
            "eval_accumulation_steps",
            "batch_eval_metrics",
        ),
        *("per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics", "eval_do_concat_batches"),
        *("eval_use_gather_object", "save_strategy", "save_steps", "save_total_limit", "save_on_each_node"),
        *("enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        *("use_cpu", "torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "skip_memory_metrics"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph"),
        *("bf16_full_eval", "fp16_full_eval", "restore_callback_states_from_checkpoint", "push_to_hub"),
    }
)
_LENGTH = ("max_steps", "num_train_epochs")


def settings_that_matter(arguments: TrainingArguments, any_length: bool = True) -> dict[str, Any]:
    """The flags of Trainer that decide what is learned, with the number of processes: part of a run's identity.

    The length of a run is among them where the learning rate depends on it, or, without `any_length`, something else;
    with a constant one, a run may be lengthened.
    """
    plain: Any = arguments
    settings = {key: value for key, value in plain.to_dict().items() if key not in _FREE}
    constant = settings["lr_scheduler_type"] == "constant"
    warmed = settings["lr_scheduler_type"] == "constant_with_warmup" and not 0 < float(arguments.warmup_steps or 0) < 1
    if any_length and (constant or warmed):
        for key in _LENGTH:
            settings.pop(key)
    precision = getattr(arguments, "mixed_precision", None)
    return {**settings, "processes": arguments.world_size, "mixed_precision": precision}
