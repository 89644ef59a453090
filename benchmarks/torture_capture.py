"""Capture under torture: random decoders that behave otherwise in training, cache, and mask, in every combination.

    python -m benchmarks.torture_capture --runs 500 --first-seed 0 --out torture_capture.json
    python -m benchmarks.torture_capture --zoo

For each seed: the transformed model equals its source in evaluation, and in training given the same random numbers, at
several shapes; or it is refused by an error of ours. Either way the source is bit for bit what it was, and so are the
random generators. Anything else is a miss or a crash, reported with its seed. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import random
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aero_compile
from aero_compile.errors import AeroError
from benchmarks import zoo

VOCAB, POSITIONS = 23, 24
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Largest difference relative to the largest logit; sums may be taken in another order."""

CACHES = ("none", "function", "method", "attribute", "buffer", "number", "lengths", "class", "file", "object")
SWITCHED = ("dropout", "functional", "in place", "channels", "path", "added in place")
"""What has to be kept."""
REFUSED = ("noise", "alpha", "floor path", "temperature", "layer drop", "batch norm", "extra", "zero branch", "weights")
"""What may be refused, and must not be frozen."""
PLACES = ("embeddings", "attention", "ffn", "logits")


# -- where a table is kept -----------------------------------------------------------------------------------------


def table_of(kind: str, heads: int, length: Any) -> Tensor:
    """A causal mask `[1, T, T]`, or ALiBi's biases with the mask in them, `[H, T, T]`."""
    hidden = torch.full((length, length), float("-inf")).triu(1)
    if kind == "mask":
        return hidden[None]
    places = torch.arange(length)
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    return hidden + slopes[:, None, None] * (places[None, :] - places[:, None])


cached_table = functools.lru_cache(table_of)
TABLES: dict[Any, Tensor] = {}


class Holder:
    """Keeps a table outside of the module."""

    def __init__(self) -> None:
        self.table: Tensor | None = None


class Table(nn.Module):
    """The table that the attentions of a model add to their scores, kept in one of `CACHES`."""

    shared: dict[Any, Tensor] = {}  # noqa: RUF012

    def __init__(self, cache: str, kind: str, heads: int) -> None:
        super().__init__()
        self.cache, self.kind, self.heads = cache, kind, heads
        self.seen, self.lengths, self.holder = 0, dict[Any, Tensor](), Holder()
        self.kept: Tensor | None
        if cache == "buffer":
            self.register_buffer("kept", None, persistent=False)
        else:
            self.kept = None

    def make(self, length: Any) -> Tensor:
        """The table of one length."""
        return table_of(self.kind, self.heads, length)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def made_by_method(self, length: Any) -> Tensor:
        """The same from a cached method."""
        return self.make(length)

    def forward(self, length: Any) -> Tensor:
        key = (self.kind, self.heads)
        if self.cache == "function":
            return cached_table(self.kind, self.heads, length)
        if self.cache == "method":
            return self.made_by_method(length)
        if self.cache in ("attribute", "buffer"):
            if self.kept is None or self.kept.shape[-1] < length:
                self.kept = self.make(length)
            return self.kept[:, :length, :length]
        if self.cache == "number":
            if length > self.seen:
                self.seen, self.kept = length, self.make(length)
            return self.kept[:, :length, :length]  # type: ignore[index]
        if self.cache in ("lengths", "class"):
            known, name = (self.lengths, length) if self.cache == "lengths" else (self.shared, (*key, length))
            if name not in known:
                known[name] = self.make(length)
            return known[name]
        if self.cache == "file":
            if key not in TABLES or TABLES[key].shape[-1] < length:
                TABLES[key] = self.make(length)
            return TABLES[key][:, :length, :length]
        if self.cache == "object":
            if self.holder.table is None or self.holder.table.shape[-1] != length:
                self.holder.table = self.make(length)
            return self.holder.table
        return self.make(length)


def emptied() -> None:
    """Forget the tables that outlive a model."""
    cached_table.cache_clear()
    Table.made_by_method.cache_clear()
    TABLES.clear()
    Table.shared.clear()


# -- what a model does in training ---------------------------------------------------------------------------------


class Behaviour(nn.Module):
    """x `[B, T, C]` → x, with one of `SWITCHED` or `REFUSED`, at a rate of 0.3."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        modules: dict[str, nn.Module] = {
            "dropout": nn.Dropout(0.3),
            "in place": nn.Dropout(0.3, inplace=True),
            "channels": nn.Dropout1d(0.3),
        }
        modules |= {"alpha": nn.AlphaDropout(0.3), "batch norm": nn.BatchNorm1d(width)}
        self.module = modules.get(kind)
        if kind in ("zero branch", "weights"):
            self.weight = nn.Parameter(torch.zeros(width, width))
            self.averaged = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:  # one line for each kind
        kind = self.kind
        if kind == "batch norm":
            return self.module(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[misc, no-any-return]
        if self.module is not None:
            return self.module(x)  # type: ignore[no-any-return]
        if kind == "functional":
            return F.dropout(x, 0.3, self.training)
        if kind == "added in place":
            y = F.dropout(x, 0.3, self.training)
            y += 0.5
            return y
        if kind == "temperature":
            return x if self.training else x / 0.7
        if kind == "weights":
            return x + x @ (self.weight if self.training else self.averaged)
        if not self.training:
            return x
        if kind == "path":
            return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)
        if kind == "floor path":
            return x / 0.7 * (0.7 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)).floor()
        if kind == "noise":
            return x + torch.empty_like(x).uniform_(-0.1, 0.1)
        if kind == "zero branch":
            return x + x @ self.weight
        if kind == "layer drop":
            return x if random.random() < 0.3 else 0.5 * x
        return x


class Tortured(nn.Module):
    """A decoder drawn from a seed; `plain` if nothing of it may be refused."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.heads = draw.choice((1, 2, 3))
        self.width = self.heads * draw.choice((2, 5, 7))
        hidden = draw.choice((9, 16, 21))
        self.norm_first, self.returns = draw.random() < 0.7, draw.choice(("logits", "tuple", "dict", "loss"))
        self.attention_form = draw.choice(("written", "fused", "in place"))
        self.attention_rate = draw.choice((0.0, 0.2))
        self.activation = draw.choice((F.gelu, F.relu, F.silu))
        norms: tuple[Callable[[int], nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
        norm = draw.choice(norms)
        self.table = Table(draw.choice(CACHES), draw.choice(("mask", "alibi")), self.heads)
        self.warm = draw.choice((0, 0, 5, 11, 13))
        kinds = [draw.choice(SWITCHED if draw.random() < 0.75 else REFUSED) for _ in range(draw.randrange(4))]
        where = draw.sample(PLACES, len(kinds))
        self.extra = "extra" in kinds
        self.plain = not set(kinds) & set(REFUSED)
        self.embed = nn.Embedding(VOCAB, self.width)
        self.position = nn.Embedding(POSITIONS, self.width)
        layers = draw.choice((1, 2))
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            parts: dict[str, nn.Module] = {"norm1": norm(self.width), "norm2": norm(self.width)}
            parts |= {"qkv": nn.Linear(self.width, 3 * self.width), "out": nn.Linear(self.width, self.width)}
            parts |= {"up": nn.Linear(self.width, hidden), "down": nn.Linear(hidden, self.width)}
            self.blocks.append(nn.ModuleDict(parts))
        self.head = nn.Linear(self.width, VOCAB)
        sizes = dict.fromkeys(PLACES, self.width) | {"logits": VOCAB}
        self.behaviours = nn.ModuleDict(
            {place: Behaviour(kind, sizes[place]) for place, kind in zip(where, kinds, strict=True)}
        )

    def behave(self, place: str, x: Tensor) -> Tensor:
        """What the model does at one of its places."""
        return self.behaviours[place](x) if place in self.behaviours else x

    def attend(self, x: Tensor, block: Any) -> Tensor:
        """Causal attention `[B, T, C]`, its dropout on the weights."""
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in block["qkv"](x).chunk(3, -1))
        table = self.table(length).to(x.dtype)
        rate = self.attention_rate if self.training else 0.0
        if self.attention_form == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=table, dropout_p=rate)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            scores = scores.add_(table) if self.attention_form == "in place" else scores + table
            mixed = F.dropout(scores.softmax(-1), self.attention_rate, self.training) @ v
        return block["out"](mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        places = torch.arange(ids.shape[1])
        x = self.behave("embeddings", self.embed(ids) + self.position(places))
        for block in self.blocks:
            parts: Any = block
            if self.norm_first:
                x = x + self.behave("attention", self.attend(parts["norm1"](x), parts))
                x = x + self.behave("ffn", parts["down"](self.activation(parts["up"](parts["norm2"](x)))))
            else:
                x = parts["norm1"](x + self.behave("attention", self.attend(x, parts)))
                x = parts["norm2"](x + self.behave("ffn", parts["down"](self.activation(parts["up"](x)))))
        logits = self.behave("logits", self.head(x))
        if self.extra and self.training:
            return logits, logits.square().mean()
        if self.returns == "loss":
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits, "tuple": (logits, x), "dict": {"logits": logits, "hidden": x}}[self.returns]


# -- judging -------------------------------------------------------------------------------------------------------


def fingerprint(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that an object holds, down to the bytes of tensors, as nested tuples."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, int | float | str | bytes | torch.dtype | torch.device):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        kind = (type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, value.is_leaf)
        if kind[0] == "FakeTensor" or value.device.type == "meta":
            return kind
        return (*kind, hashlib.sha256(value.detach().flatten().view(torch.uint8).numpy().tobytes()).hexdigest())
    if isinstance(value, dict):
        return tuple((fingerprint(k, seen), fingerprint(v, seen)) for k, v in dict.items(value))
    if isinstance(value, list | tuple):
        return tuple(fingerprint(item, seen) for item in value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, types.FunctionType):
        return (id(value), tuple(fingerprint(cell.cell_contents, seen) for cell in value.__closure__ or ()))
    if isinstance(value, nn.Module) or hasattr(value, "__dict__"):
        return (id(type(value)), fingerprint(getattr(value, "__dict__", {}), seen))
    return str(value)


def generators() -> Any:
    """States of the random generators of torch, Python and NumPy."""
    import numpy as np

    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def leaves(value: Any) -> list[Tensor]:
    """Floating-point tensors of what a model returns, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts: Iterable[Any] = value.values() if hasattr(value, "values") else value if value is not None else ()
    return [leaf for part in parts for leaf in leaves(part)]


def difference(source: nn.Module, result: nn.Module, calls: Iterable[dict[str, Tensor]]) -> float:
    """Largest difference relative to the largest value, with the same random numbers; infinite if a shape differs."""
    worst = 0.0
    for call in calls:
        found = []
        for model in (source, result):
            torch.manual_seed(5)
            random.seed(5)
            with torch.no_grad():
                found.append(leaves(model(**call)))
        if [x.shape for x in found[0]] != [x.shape for x in found[1]]:
            return float("inf")
        for a, b in zip(*found, strict=True):
            error = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
            worst = max(worst, error) if error == error else float("inf")
    return worst


def judged(source: nn.Module, calls: list[dict[str, Tensor]], tolerance: float) -> tuple[str, str]:
    """("same", ""), ("refused", why), or ("missed", what is wrong)."""
    shared = (cached_table.cache_info, Table.made_by_method.cache_info)
    before = fingerprint(source), fingerprint((TABLES, Table.shared)), [info() for info in shared], generators()
    verdict, why = "same", ""
    try:
        result = aero_compile.transform(source, "baseline")
    except AeroError as error:
        verdict, why = "refused", str(error)
    if (fingerprint(source), fingerprint((TABLES, Table.shared)), [info() for info in shared], generators()) != before:
        return "missed", "the source, a cache or a random generator is not what it was"
    if verdict == "refused":
        return verdict, why
    for mode in (False, True):
        off = difference(source.train(mode), result.train(mode), calls)
        if not off <= tolerance:
            return "missed", f"{'training' if mode else 'evaluation'}: {off:.1e}"
    copy.deepcopy(result)
    return "same", ""


def tortured(seed: int) -> tuple[str, str]:
    """The verdict on the decoder of a seed."""
    emptied()
    source = Tortured(seed)
    draw = random.Random(seed + 1)
    dtype = draw.choice((torch.float64, torch.float64, torch.float32))
    source = zoo.randomize(source, seed).to(dtype).train(draw.random() < 0.5)
    shapes = [(1, 1), (2, 9), (3, draw.randrange(2, POSITIONS)), (2, POSITIONS)]
    ids = [torch.randint(VOCAB, shape) for shape in shapes]
    if source.warm:
        source(ids[-1][:, : source.warm])
    calls = [{"ids": x, "targets": x.flip(-1)} if source.returns == "loss" else {"ids": x} for x in ids]
    verdict, why = judged(source, calls, TOLERANCE[dtype])
    if verdict == "refused" and source.plain:
        return "refused though plain", why
    return verdict, why


def of_the_zoo(name: str, build: Callable[[], nn.Module]) -> tuple[str, str]:
    """The verdict on a model of the zoo."""
    try:
        source = build()
    except zoo.NotTried as error:
        return "not built", str(error)
    token_name = "input_ids" if hasattr(source, "config") else next(iter(zoo_arguments(source)))
    calls = [{token_name: torch.randint(zoo.VOCAB, shape)} for shape in ((2, 9), (1, 1))]
    return judged(source, calls, 1e-4)  # families compute masks and rotary tables in float32


def zoo_arguments(model: nn.Module) -> list[str]:
    """Names of the arguments of forward."""
    import inspect

    return list(inspect.signature(model.forward).parameters)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--zoo", action="store_true", help="the families of the zoo instead of random decoders")
    parser.add_argument("--out", type=Path, help="JSON file for verdicts by seed or family")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    work: dict[str, Callable[[], tuple[str, str]]] = {
        str(seed): functools.partial(tortured, seed)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs)
    }
    if arguments.zoo:
        entries = [*zoo.plain_entries(), *zoo.hugging_face_entries(), *zoo.foreign_entries()]
        work = {entry.name: functools.partial(of_the_zoo, entry.name, entry.build) for entry in entries}
    counts: Counter[str] = Counter()
    verdicts: dict[str, tuple[str, str]] = {}
    start = time.monotonic()
    for name, run in work.items():
        try:
            verdicts[name] = run()
        except Exception as error:
            verdicts[name] = "crashed", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        counts[verdicts[name][0]] += 1
        if verdicts[name][0] not in ("same", "refused", "not built"):
            print(f"{name}: {' — '.join(verdicts[name])[:300]}", flush=True)
    print(f"{sum(counts.values())} runs in {time.monotonic() - start:.0f} s: {dict(counts)}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"counts": counts, "verdicts": verdicts}, indent=1), encoding="utf-8")
    return 1 if counts["missed"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
