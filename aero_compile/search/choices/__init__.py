"""The kinds of choices that a search knows, one file for those that share a place in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aero_compile.errors import InputError, nearest
from aero_compile.search.choices.activations import Activations
from aero_compile.search.choices.attention import Attention, Temperatures
from aero_compile.search.choices.norms import Norms
from aero_compile.search.choices.sites import Choice

CHOICES: Mapping[str, str] = {
    "norms": "each norm: frozen, or none",
    "heads": "each attention head: the mean of what its mask lets see",
    "static-patterns": "each attention head: its mean attention, by position or by distance",
    "learned-patterns": "each attention head: its mean attention by distance, to be trained further",
    "drops": "each attention head: gone, or its mean output",
    "local": "each attention head: the last 16 positions alone; local:8 for another window",
    "layers": "the attention of a whole layer: the mean of what its mask lets see, gone, or its mean output",
    "activations": "each layer's FFN: ReLU, or none",
    "neurons": "each layer's FFN: the activation, or ReLU, in a half or a quarter of the neurons",
    "temperatures": "each layer's softmax temperatures: one for each head, or none",
}
"""What `choices` may name, and the alternatives that it adds to what is."""

DEFAULT = ("norms", "heads", "activations")
"""What a search chooses among that is told nothing."""

_WINDOW = "16"


def choices_of(names: Sequence[str] | None) -> tuple[Choice, ...]:
    """The choices that `names` mean, in the order of their passes in a recipe: what is measured on text comes first.

    Raises:
        InputError: an unknown name.
    """
    if names is not None and not names:
        raise InputError(f"no kind of choice was named: take some of {', '.join(CHOICES)}, or leave the list out")
    wanted: dict[str, str] = {}
    for name in DEFAULT if names is None else names:
        kind = name.partition(":")[0]
        if wanted.setdefault(kind, name) != name:
            raise InputError(f"{wanted[kind]} and {name}: a head has one window; search with one after the other")
    for kind, name in wanted.items():
        if kind not in CHOICES or (kind != name and kind != "local"):
            raise InputError(f"unknown kind of choice {name!r}{nearest(kind, CHOICES)}")
    found: list[Choice] = [Norms()] if "norms" in wanted else []
    heads = [option for kind, options in _HEADS.items() if kind in wanted for option in options]
    if "local" in wanted:
        heads.insert(0, f"local {_window(wanted['local'])}")
    if heads or "layers" in wanted:
        found.append(Attention(tuple(heads), layers="layers" in wanted))
    if not {"activations", "neurons"}.isdisjoint(wanted):
        found.append(Activations(whole="activations" in wanted, shares="neurons" in wanted))
    if "temperatures" in wanted:
        found.append(Temperatures())
    return tuple(found)


_HEADS: Mapping[str, tuple[str, ...]] = {
    "static-patterns": ("mean", "relative"),
    "learned-patterns": ("learned",),
    "heads": ("uniform",),
    "drops": ("output mean", "none"),
}


def _window(name: str) -> int:
    text = name.partition(":")[2] or _WINDOW
    if not text.isdecimal() or not int(text):
        raise InputError(f"{name!r}: a window is a number of positions, as in local:8")
    return int(text)
