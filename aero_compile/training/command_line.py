"""The command line of retraining: one parser for our options and those of Hugging Face's Trainer."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
from transformers import HfArgumentParser

from aero_compile.errors import InputError, first_line
from aero_compile.plain_help import PlainHelp
from aero_compile.training.options import RetrainOptions
from aero_compile.training.presets import with_preset
from aero_compile.training.trainer_arguments import RetrainArguments

logger = logging.getLogger("aero_compile.retrain")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there is one, and the examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # One spelling of each flag is enough for a reader; lambda is the name people know.
        flags = [flag for flag in action.option_strings if "_" not in flag] or list(action.option_strings)
        values = "" if action.nargs == 0 else " " + self._format_args(action, flags[-1].strip("-").upper())
        return ", ".join(flags) + values if action.option_strings else super()._format_action_invocation(action)


_EXAMPLES = """\
examples:
  # a small GPT-2 without LayerNorm and GELU on Python code, entropy-regularized; a few minutes on a CPU
  aero-compile retrain --output-dir runs/tiny

  # continue it after it was stopped
  aero-compile retrain --output-dir runs/tiny --resume

  # the shape of GPT-2 small from scratch on your own files, with the paper's temperature
  aero-compile retrain --model gpt2 --from-scratch --dataset 'src/**/*.py' --temperature-init 0.01 \\
      --recipe 'EReg(SM(t)+ScFFN)' --lambda 0.05 --gamma 0.1 --output-dir runs/gpt2-softmax-only

  # a pretrained model from the Hub with ReLU instead of GELU, 8 GPUs
  accelerate launch -m aero_compile.retrain --model gpt2 --recipe relu --dataset wikitext \\
      --dataset-config wikitext-2-raw-v1 --learning-rate 1e-4 --output-dir runs/gpt2-relu

  # the paper's training on CodeParrot, a hundredth of it
  aero-compile retrain --preset codeparrot --scale 0.01 --output-dir runs/codeparrot

  # norms frozen one at a time, with the model as it was as a teacher
  aero-compile retrain --model gpt2 --stages '20: each freeze-layer-norm; 500:' --distill kl=1 --learning-rate 1e-4

written to --output-dir:
  checkpoint-*/      for --resume          metrics.jsonl    one line per log event
  artifact/          the trained model     entropies.jsonl  headwise entropies [layers][heads] over time
  run.json           settings, versions, data fingerprint, how it ended

Every flag may be written with dashes or underscores. Exit code 2: an input that cannot be used, or NaN.
"""


class _Parser(PlainHelp, HfArgumentParser):
    """Options by dataclasses, those of Hugging Face with the markup of their documentation."""


def make_parser() -> HfArgumentParser:
    """The command line: our options first, then every flag of TrainingArguments."""
    kinds: Any = (RetrainOptions, RetrainArguments)
    return _Parser(
        kinds,
        prog="aero-compile retrain",
        usage="%(prog)s [options]",
        description="Transform a GPT-2-like model for private inference and train it.",
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )


def _with_bf16(arguments: list[str]) -> list[str]:
    """Add --bf16 on a GPU that computes in it, unless the command line says something about precision."""
    said = any(a.lstrip("-").replace("-", "_").startswith(("bf16", "no_bf16", "fp16", "use_cpu")) for a in arguments)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
    if said or launched or not torch.cuda.is_available() or not torch.cuda.is_bf16_supported():
        return arguments
    return [*arguments, "--bf16"]


def parse_command_line(arguments: list[str]) -> tuple[RetrainOptions, RetrainArguments]:
    """Both sets of options; argparse exits with 2 on an unknown flag, InputError for a value out of range."""
    arguments, notes = with_preset(arguments)
    for note in notes:
        logger.info(note)
    try:
        options, training_args = make_parser().parse_args_into_dataclasses(_with_bf16(arguments))
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    except (OSError, TypeError, KeyError, AttributeError) as error:  # of flags that name files or hold JSON
        raise InputError(f"a flag cannot be read: {first_line(error)}") from error
    return options, training_args
