"""Tokenizers: loaded from the Hub or a folder, or trained here as byte-level BPE."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aero_compile.errors import DataError, InputError
from aero_compile.files import artifact_folder
from aero_compile.training.gguf_header import is_gguf
from aero_compile.training.hub_access import NO_COPY, copies_alone, is_offline
from aero_compile.training.sources import cause_line

END_OF_TEXT = "<|endoftext|>"
# 256 byte symbols and the end-of-text mark: every text can be written with these alone.
SMALLEST_VOCABULARY = 257


def load_tokenizer(name: str | Path) -> Any:
    """A fast Hugging Face tokenizer from a Hub name, a folder, a `tokenizer.json`, or a GGUF file.

    Raises DataError if it is not there or cannot be read, InputError of a GGUF file.
    """
    from transformers import AutoTokenizer

    path = tokenizer_folder(name)
    if path.is_dir() and (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        path = path / "tokenizer.json"
    try:
        if is_gguf(path):
            from aero_compile.training.gguf_models import gguf_tokenizer

            found = gguf_tokenizer(path)
        elif path.is_file():
            from tokenizers import Tokenizer

            raw = Tokenizer.from_file(str(path))
            eos = END_OF_TEXT if raw.token_to_id(END_OF_TEXT) is not None else None
            found = _wrap(raw, eos)
        else:
            offline, place = is_offline(path), str(path if path.is_dir() else name)
            with copies_alone(offline):
                found = AutoTokenizer.from_pretrained(place, local_files_only=offline)
        written = found("def text", add_special_tokens=False)["input_ids"]
    except InputError:
        raise
    # The tokenizers library raises bare Exception for a damaged file.
    except Exception as error:
        reason = cause_line(error)
        if not path.exists():
            is_file = str(name).startswith((".", "/", "~")) or path.suffix == ".json"
            reason = "no such file or folder" if is_file else NO_COPY if is_offline(path) else reason
        raise DataError(f"no tokenizer could be loaded from {str(name)!r}: {reason}") from error
    if not written:  # of a folder with a configuration alone transformers makes a tokenizer without entries
        raise DataError(f"no tokenizer could be loaded from {str(name)!r}: what is there turns text into nothing")
    return found


_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def has_tokenizer(folder: str | Path) -> bool:
    """True if a local folder, or the artifact in a run's folder, holds a tokenizer that `load_tokenizer` can read."""
    return any((tokenizer_folder(folder) / name).is_file() for name in _FILES)


def tokenizer_folder(name: str | Path) -> Path:
    """Return the folder that the files of a tokenizer are in: that of the artifact where a run's folder is named."""
    path = Path(name)
    return path if any((path / each).is_file() for each in _FILES) else artifact_folder(path)


def train_tokenizer(texts: Iterable[str], vocab_size: int, show_progress: bool | None = None) -> Any:
    """Train a byte-level BPE on `texts` with at most `vocab_size` entries.

    Deterministic: the same texts in the same order give the same tokenizer. Id 0 is `<|endoftext|>`,
    the end-of-sequence mark put between documents. Raises InputError below 257 entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(f"a byte-level vocabulary needs at least {SMALLEST_VOCABULARY} entries, not {vocab_size}")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty() if show_progress is None else show_progress,
    )
    raw.train_from_iterator(texts, trainer)
    return _wrap(raw, END_OF_TEXT)


def _wrap(raw: Any, eos_token: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=raw, eos_token=eos_token)
