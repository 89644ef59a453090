"""Presets: the settings of published trainings as flags of `aero-compile retrain`, in full or in small.

Sources: AERO (its section on training hyperparameters, and its appendix on the tolerance margin, for γ); the code of
He & Hofmann 2024 for CodeParrot; the code of Stanić et al. 2023 for Languini, GPT small in the class of 6 hours, which
is 1.2 billion tokens; the schedule `gpt2_standard` of the code of Baroni et al. 2025 for GPT-2 without LayerNorm,
which shortens that of Heimersheim 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aero_compile.errors import InputError, nearest
from aero_compile.training.stages import parse_stages

Value = str | int | float | bool


@dataclass(frozen=True)
class Preset:
    """Flags with their values; `needs` is a flag that only the user can give, and why.

    `each`: how many norms a stage of `each` stands for in its model.
    """

    flags: Mapping[str, Value]
    needs: tuple[str, str] | None = None
    each: int = 12


PRESETS: Mapping[str, Preset] = {
    "codeparrot": Preset(
        {
            "model": "gpt2",
            "from_scratch": True,
            "config_overrides": "n_positions=128,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
            "init": "default",
            "recipe": "EReg(SM(t)+ScFFN)",
            "temperature_init": 0.01,
            "entropy_reduction": "listing",
            "lambda": 1e-5,
            "gamma": 0.2,
            "dataset": "huggingface-course/codeparrot-ds-train",
            "tokenizer": "huggingface-course/code-search-net-tokenizer",
            "context": 128,
            "max_train_tokens": 2_100_000_000,
            "num_train_epochs": 1,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "polynomial",
            "warmup_steps": 0.05,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }
    ),
    "languini": Preset(
        {
            "model": "gpt2",
            "from_scratch": True,
            "config_overrides": "n_positions=512,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
            "init": "default",
            "recipe": "EReg(SM(t)+ScFFN)",
            "temperature_init": 0.1,
            "entropy_reduction": "listing",
            "lambda": 5e-5,
            "gamma": 0.2,
            "vocab_size": 16384,
            "context": 512,
            "max_steps": 18265,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 4,
            "learning_rate": 6e-4,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": '{"min_lr": 6e-06}',
            "warmup_steps": 200,
            "adam_beta2": 0.95,
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
        },
        needs=("dataset", "the Languini books are not on the Hub: name a folder with their text"),
    ),
    "ln-free-gpt2": Preset(
        {
            "model": "gpt2",
            "dataset": "Skylion007/openwebtext",
            "context": 1024,
            "stages": "20: ; 2: each freeze-layer-norm{first_token=True} ffn; "
            "2: each freeze-layer-norm{first_token=True} qk; 3: each freeze-layer-norm{first_token=True} v; "
            "196: freeze-layer-norm{norms=final,first_token=True}",
            "max_train_tokens": 160_000_000,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 16,
            "learning_rate": 6e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 25,
            "weight_decay": 0.01,
        }
    ),
    "tiny": Preset({"model": "tiny", "dataset": "stdlib", "context": 128, "vocab_size": 4096, "max_steps": 600}),
}

_COUNTS = ("max_train_tokens", "max_steps", "warmup_steps")
"""Flags that `--scale` multiplies, where they count something; a share stays."""


def with_preset(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line with the flags of its preset in front, which later ones replace, and what to tell of it.

    Raises:
        InputError: an unknown preset, a scale that is none or stands alone, or a flag that the preset needs.
    """
    name, text = (_value(arguments, flag) for flag in ("--preset", "--scale"))
    if name is None:
        if text is not None:
            raise InputError("--scale shrinks a preset: give --preset too")
        return list(arguments), []
    try:
        scale = 1.0 if text is None else float(text)
    except ValueError:
        raise InputError(f"--scale {text} is no number") from None
    given = {each.partition("=")[0].lstrip("-").replace("-", "_") for each in arguments if each.startswith("--")}
    flags, changed = preset_flags(name, scale, given)
    texts = [part for flag, value in flags.items() for part in (f"--{flag.replace('_', '-')}", str(value))]
    shown = " ".join(f"'{text}'" if " " in text or "{" in text else text for text in texts)
    notes = [f"preset {name}: {shown}"]
    if given & set(flags):
        notes.append(f"replaced by the command line: {', '.join(sorted(given & set(flags)))}")
    if changed:
        notes.append(f"scaled by {scale:g}: {', '.join(changed)}")
    return [*texts, *arguments], notes


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The value of the last `flag` on a command line; None without it, or without a value, which the parser refuses."""
    found = None
    for each, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = each.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def preset_flags(name: str, scale: float, given: set[str]) -> tuple[dict[str, Value], list[str]]:
    """The flags of a preset, shrunk by `scale`, and in words what that changed; `given` are flags of the user."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: unknown{nearest(name, PRESETS)}")
    if not (math.isfinite(scale) and 0 < scale <= 1):
        raise InputError(f"--scale must be above 0 and at most 1, not {scale}")
    needs = PRESETS[name].needs
    if needs is not None and needs[0] not in given:
        raise InputError(f"--preset {name} needs --{needs[0]}: {needs[1]}")
    flags, changed, share = dict(PRESETS[name].flags), [], scale
    stages = flags.get("stages")
    if scale < 1 and isinstance(stages, str):
        flags["stages"] = "; ".join(_shorter(stage, scale) for stage in stages.split(";"))
        steps = [[one.steps for one in parse_stages(str(text))] for text in (stages, flags["stages"])]
        totals = [_steps_of(str(text), PRESETS[name].each) for text in (stages, flags["stages"])]
        share = totals[1] / totals[0]  # a stage keeps a step at least, and its steps need their text
        changed.append(f"steps of stages {steps[0]} → {steps[1]}, of all {totals[0]} → {totals[1]}")
    for flag in _COUNTS:
        value = flags.get(flag)
        if scale < 1 and isinstance(value, int):
            flags[flag] = max(1, round(value * share))
            changed.append(f"{flag} {value:,} → {flags[flag]:,}")
    return flags, changed


def _steps_of(stages: str, each: int) -> int:
    return sum(one.steps * (1 if one.each is None else each) for one in parse_stages(stages))


def _shorter(stage: str, scale: float) -> str:
    steps, colon, rest = stage.strip().partition(":")
    return f"{max(1, round(int(steps) * scale))}{colon}{rest}"
