"""Text to training blocks: load, hold out, tokenize, pack.

Held-out text is chosen by document before anything is cut into blocks, so no document is on both sides.
Nothing here depends on a seed: the same text gives the same blocks, and runs with different seeds are
compared on the same held-out text.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aero_compile.errors import DataError, InputError
from aero_compile.training.sources import load_hub, load_local, local_files, standard_library
from aero_compile.training.tokenizer import load_tokenizer, train_tokenizer

_TOKENIZER_TRAINING_CHARACTERS = 50_000_000


@dataclass(frozen=True)
class Documents:
    """Texts before tokenizing: datasets with one `text` column; `validation` None means: hold out."""

    name: str
    train: Any
    validation: Any | None = None


def load_text(name: str, *, column: str | None = None, config: str | None = None) -> Documents:
    """Load documents by `name`.

    `"stdlib"` is the source code of the running Python's standard library. A path, folder, glob or
    comma-separated list of `.txt`/`.md`/`.py` (one document each), `.json`/`.jsonl`,
    `.parquet` or `.csv` files is read from disk. Anything else is a Hub dataset (`config` picks one
    of its configurations, its validation split is used if it has one). `column`: the text column.

    Raises DataError for a missing, empty or unreadable dataset and an unclear or absent column.
    """
    if not name.strip():
        raise DataError("the dataset's name is empty")
    validation = None
    if name == "stdlib":
        train = standard_library()
    elif files := local_files(name):
        train = load_local(files, column)
    else:
        train, validation = load_hub(name, config, column)
    for part, documents in (("", train), ("validation split of ", validation)):
        if documents is not None and not any(_texts(documents)):
            raise DataError(f"the {part}dataset {name!r} is empty")
    return Documents(name, train, validation)


def _texts(dataset: Any) -> Iterator[str]:
    for batch in dataset.iter(batch_size=1000):
        for text in batch["text"]:
            yield text or ""


def split_documents(documents: Documents, fraction: float = 0.1) -> tuple[Any, Any]:
    """Train and validation documents, each in the order of the hash of their content.

    The first documents of that order, about `fraction` of all characters, are held out (of a few large
    documents: the smallest); identical documents stay on one side. The order by hash makes every prefix
    a fair sample. A single document is cut at a line: its end is held out. A validation split that came
    with the dataset is used. Documents without text are on neither side. Raises InputError for a fraction outside
    (0, 1).
    """
    import datasets

    if not 0 < fraction < 1:
        raise InputError(f"the held-out fraction must be between 0 and 1, not {fraction}")
    hashes, sizes = _hashes(documents.train, documents.name)
    order = sorted(range(len(hashes)), key=lambda index: (hashes[index], index))
    order = [index for index in order if sizes[index] > 0]
    if documents.validation is not None:
        held_out_rows = [row for row, text in enumerate(_texts(documents.validation)) if text]
        return documents.train.select(order), documents.validation.select(held_out_rows)

    groups = [list(same) for _, same in itertools.groupby(order, key=lambda index: hashes[index])]
    if len(groups) == 1:
        text = documents.train[order[0]]["text"]
        cut = int(len(text) * (1 - fraction))
        line = text.rfind("\n", 0, cut) + 1
        cut = line if line > cut // 2 else cut
        first, last = (datasets.Dataset.from_dict({"text": [part]}) for part in (text[:cut], text[cut:]))
        return first, last

    wanted = fraction * sum(sizes)
    held_out: set[int] = set()
    characters = 0
    for group in groups:
        size = sum(sizes[index] for index in group)
        if characters < wanted and characters + size <= 1.5 * wanted:
            held_out.update(group)
            characters += size
    if not held_out:
        held_out.update(min(groups, key=lambda group: sum(sizes[index] for index in group)))
    train = [index for index in order if index not in held_out]
    return documents.train.select(train), documents.train.select([i for i in order if i in held_out])


def without_text(documents: Documents) -> int:
    """How many documents are empty (or null, in a table): they are left out."""
    parts = [part for part in (documents.train, documents.validation) if part is not None]
    return sum(not text for part in parts for text in _texts(part))


def _hashes(dataset: Any, name: str) -> tuple[list[bytes], list[int]]:
    from tqdm.auto import tqdm

    hashes, sizes = [], []
    progress = tqdm(_texts(dataset), total=len(dataset), desc=f"reading {name}", unit=" docs", leave=False)
    for text in progress:
        hashes.append(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        sizes.append(len(text))
    return hashes, sizes


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive, non-overlapping blocks of `context` tokens of one long token array.

    An item is `{"input_ids": [context], "labels": the same}` (int64); the shift is the model's.
    The tokens after the last full block are not used.
    """

    def __init__(self, tokens: np.ndarray[Any, Any], context: int) -> None:
        if context < 2:
            raise InputError(f"the context must be at least 2 tokens, not {context}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise InputError(f"tokens must be integers, not {tokens.dtype}")
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = self.tokens[index * self.context : (index + 1) * self.context].astype(np.int64)
        ids = torch.from_numpy(block)
        return {"input_ids": ids, "labels": ids.clone()}

    def sample(self, batches: int, size: int) -> list[Tensor]:
        """At most `batches` batches of token ids `[size, context]`, the last one perhaps smaller, evenly spread."""
        count = min(batches * size, len(self))
        chosen = [self[index * len(self) // count]["input_ids"] for index in range(count)]
        return [torch.stack(chosen[start : start + size]) for start in range(0, count, size)]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError if a token id is outside `0 .. vocab_size - 1`."""
        if len(self.tokens) == 0:
            return
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            raise InputError(
                f"the text has token id {low if low < 0 else high}, but the model's vocabulary has "
                f"{vocab_size} entries (ids 0 to {vocab_size - 1}): another tokenizer belongs to this model"
            )


@dataclass(frozen=True)
class TrainingData:
    """Blocks to train on and to evaluate on, and the tokenizer they were made with; can serve many runs.

    `fingerprint` is a hash of the tokens, the context and the tokenizer; `info` tells the sizes.
    """

    name: str
    train: Blocks
    validation: Blocks
    tokenizer: Any
    fingerprint: str
    info: dict[str, Any] = field(default_factory=dict)


def prepare(
    documents: Documents,
    *,
    context: int,
    tokenizer: Any = None,
    vocab_size: int = 4096,
    validation_fraction: float = 0.1,
    max_train_tokens: int | None = None,
    max_validation_tokens: int | None = None,
) -> TrainingData:
    """Split, tokenize and pack `documents` into blocks of `context` tokens.

    `tokenizer`: a fast Hugging Face tokenizer or the name of one; None trains a byte-level BPE of
    `vocab_size` entries on the training side. Documents are joined by the end-of-sequence token.
    The limits keep a fair sample (whole documents in hash order, the last one cut).

    Raises DataError if either side is shorter than one block, InputError for arguments out of range.
    """
    if context < 2:
        raise InputError(f"the context must be at least 2 tokens, not {context}")
    train_texts, validation_texts = split_documents(documents, validation_fraction)
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    elif tokenizer is None:
        tokenizer = train_tokenizer(_limited(train_texts, _TOKENIZER_TRAINING_CHARACTERS), vocab_size)
    sides = {}
    for side, texts, limit in (
        ("train", train_texts, max_train_tokens),
        ("validation", validation_texts, max_validation_tokens),
    ):
        if limit is not None and limit < context:
            raise InputError(f"a limit of {limit} {side} tokens is less than one block of {context}")
        tokens = tokenize_documents(texts, tokenizer, limit, f"{documents.name} ({side})")
        if len(tokens) < context:
            raise DataError(
                f"the {side} part of {documents.name!r} has {len(tokens)} tokens, fewer than one block of "
                f"{context}: use more text or a shorter context"
            )
        sides[side] = Blocks(tokens, context)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{context} {tokenizer.backend_tokenizer.to_str()}".encode())
    for blocks in sides.values():
        digest.update(np.ascontiguousarray(blocks.tokens, dtype=np.int32).data)
    info = {
        "dataset": documents.name,
        "context": context,
        "vocabulary": len(tokenizer),
        "train_tokens": len(sides["train"].tokens),
        "validation_tokens": len(sides["validation"].tokens),
        "documents_without_text": without_text(documents),
    }
    return TrainingData(documents.name, sides["train"], sides["validation"], tokenizer, digest.hexdigest(), info)


def _limited(dataset: Any, characters: int) -> Iterator[str]:
    left = characters
    for text in _texts(dataset):
        if left <= 0:
            return
        yield text
        left -= len(text)


def tokenize_documents(
    dataset: Any, tokenizer: Any, limit: int | None = None, name: str = "text"
) -> np.ndarray[Any, Any]:
    """All documents as one token array (uint16 or int32), each followed by the end-of-sequence token.

    `limit`: stop after this many tokens. Tokenizing a dataset that lies on disk is cached by
    `datasets` beside it; one in memory is tokenized in memory.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("a fast tokenizer (one with a tokenizer.json) is needed")
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    backend = tokenizer.backend_tokenizer
    # 8 characters a token is more than any usual tokenizer reaches: one pass suffices for nearly all text.
    documents, characters = len(dataset), None if limit is None else 8 * limit
    while True:
        if characters is not None:
            documents = min(len(dataset), sum(1 for _ in _limited(dataset, characters)))
        pieces = _encode(dataset.select(range(documents)), backend, end, name)
        total = sum(len(piece) for piece in pieces)
        if limit is None or characters is None or total >= limit or documents == len(dataset):
            break
        characters *= 4
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    tokens = np.concatenate(pieces) if pieces else np.zeros(0)
    return tokens[:limit].astype(dtype)


def _encode(dataset: Any, backend: Any, end: list[int], name: str) -> list[np.ndarray[Any, Any]]:
    from datasets import Features, Sequence, Value

    def encode(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in batch["text"]]
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return {"ids": [list(itertools.chain(item.ids, end)) for item in encoded]}

    mapped = dataset.map(
        encode,
        batched=True,
        batch_size=256,
        remove_columns=dataset.column_names,
        features=Features({"ids": Sequence(Value("int32"))}),
        desc=f"tokenizing {name}",
    )
    chunks = mapped.with_format("arrow")[:]["ids"].chunks
    return [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
