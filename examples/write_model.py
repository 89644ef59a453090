"""Write a model of another family at size, with random weights and the tokenizer of a model that you have.

What it says means nothing; what it costs, and how close private logits are to its own, is as of trained weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it would know its own folder alone
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from aero_compile.console import exit_code
from aero_compile.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHAPES = {
    "gpt2": {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "qwen2": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "tie_word_embeddings": True,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "gemma3_text": {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    },
}
"""Shapes of GPT-2 small, Qwen2.5-0.5B and Gemma 3 270M, but for the vocabulary, which is the tokenizer's."""

SPREAD = 0.05
"""Of the first weights: about 1/√d, so that heads do not all attend alike."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    found = argparse.ArgumentParser(prog="write_model.py", description=(__doc__ or "").split("\n\n")[0])
    found.add_argument("family", choices=sorted(SHAPES), help="GPT-2 small, Qwen2.5-0.5B or Gemma 3 270M in shape")
    found.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="new folder of a Hugging Face model")
    text = "GGUF file or folder whose tokenizer and chat template are taken"
    found.add_argument("--tokenizer", required=True, metavar="PATH", help=text)
    found.add_argument("--layers", type=int, metavar="N", help="fewer layers than the shape's")
    found.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: %(default)s)")
    return found


def config_of(family: str, tokenizer: Any, layers: int | None) -> PretrainedConfig:
    """The configuration of a family's shape, with a tokenizer's tokens and so many layers."""
    from transformers import AutoConfig

    asked = {**SHAPES[family], "vocab_size": len(tokenizer), "initializer_range": SPREAD}
    asked |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if layers is not None:
        asked["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
    return AutoConfig.for_model(family, **asked)


def run(args: argparse.Namespace) -> int:
    """Write the folder, and print its path."""
    import torch
    from transformers import AutoModelForCausalLM

    from aero_compile.training.data.tokens import load_tokenizer

    if args.to.exists():
        raise InputError(f"--to {args.to} is there already")
    if args.layers is not None and args.layers < 1:
        raise InputError(f"--layers {args.layers}: a model has one or more")
    tokenizer = load_tokenizer(args.tokenizer)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config_of(args.family, tokenizer, args.layers))
    model.save_pretrained(args.to, safe_serialization=True)
    tokenizer.save_pretrained(args.to)
    print(args.to)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0, or 2 for what cannot be read or written."""
    args = parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
