"""Sets of attention heads as text, for the options of passes: `all`, `3.0`, `3.2-5`, `3.*`, joined by `+`.

A head is `layer.number`, both counted from 0 as in the source model: the numbers stay what they were when other heads
lose their softmax. Before the point may stand any set of layers, `*` for all of them, behind it the numbers or a part
of the layer's heads: `last:3.*`, `even.0-1`, `*.1/2` (the first half of the heads of each layer).

`entropy>0.9` are the heads whose entropy is more than this share of the largest that a causal head can have,
`entropy:8` the eight of the highest share, `entropy:-8` all but the eight of the lowest; these are measured on text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from aero_compile.analysis.layer_sets import chosen_layers, parse_layers
from aero_compile.errors import InputError, RecipeError

Head = tuple[int, int]
"""(layer, number)."""

Shares = Mapping[Head, float]
"""Entropy of heads, in parts of the largest causal entropy."""

_MEASURED = re.compile(r"entropy(?:>(\d*\.?\d+)|:(-?\d+))")
_LISTED = re.compile(r"(\d+)\.(\d+)(?:-(\d+))?")
_TERM = re.compile(r"([^.]+)\.(?:(\*)|(\d+)/(\d+)|(\d+)(?:-(\d+))?)")


def parse_heads(text: str) -> str:
    """Check the syntax of a set of heads and return it without spaces.

    Raises:
        RecipeError: any other text.
    """
    plain = text.replace(" ", "")
    for term in plain.split("+"):
        if term not in ("all", "none") and not _MEASURED.fullmatch(term) and not _is_term(term):
            raise RecipeError(
                f"{text!r} is no set of heads: write all, 3.0 (layer 3, head 0), 3.2-5, 3.*, last:2.*, *.1/2 (half of "
                "each layer's), entropy>0.9, entropy:8, or several of them joined by +"
            )
    return plain


def _is_term(term: str) -> bool:
    match = _TERM.fullmatch(term)
    if match is None:
        return False
    layers, _, part, parts, first, last = match.groups()
    try:
        parse_layers(_layers(layers))
    except RecipeError:
        return False
    return 1 <= int(part) <= int(parts) if part else last is None or int(first) <= int(last)


def _layers(text: str) -> str:
    return "all" if text == "*" else text


def is_measured(text: str) -> bool:
    """Whether a set of heads depends on their entropies."""
    return any(_MEASURED.fullmatch(term) for term in parse_heads(text).split("+"))


def chosen_heads(text: str, heads: Sequence[int], name: str, shares: Shares | None = None) -> frozenset[Head]:
    """The heads that `text` means in a model with `heads[layer]` heads; `name` is who asks, for the message.

    `shares`: of the heads that entropies may choose from.

    Raises:
        RecipeError: wrong syntax, or a head that the model does not have.
        InputError: the set depends on entropies, and `shares` is None.
    """
    chosen: set[Head] = set()
    for term in parse_heads(text).split("+"):
        measured = _MEASURED.fullmatch(term)
        if measured is None:
            chosen |= _heads_of(term, heads, name)
        elif shares is None:
            raise InputError(
                f"{name}: heads={term} needs text to measure entropies on: give transform(model, recipe, "
                "calibration=tokens) token ids [B, T], or an iterable of such batches"
            )
        elif measured[2]:
            count = int(measured[2])
            wanted = count if count >= 0 else max(0, len(shares) + count)
            chosen |= set(sorted(shares, key=lambda head: (-shares[head], head))[:wanted])
        else:
            chosen |= {head for head, share in shares.items() if share > float(measured[1])}
    return frozenset(chosen)


def heads_text(heads: Collection[Head]) -> str:
    """The explicit text of a set of heads, `0.1+2.3-5`, the same for equal sets; `none` for the empty one."""
    terms: list[str] = []
    ordered = sorted(heads)
    while ordered:
        layer, first = ordered.pop(0)
        last = first
        while ordered and ordered[0] == (layer, last + 1):
            last = ordered.pop(0)[1]
        terms.append(f"{layer}.{first}" if first == last else f"{layer}.{first}-{last}")
    return "+".join(terms) or "none"


def listed_heads(text: str) -> frozenset[Head]:
    """The heads that `heads_text` wrote.

    Raises:
        RecipeError: any other text, or one of more than a million heads in a row.
    """
    found: set[Head] = set()
    for term in parse_heads(text).split("+"):
        match = _LISTED.fullmatch(term)
        if term == "none":
            continue
        if match is None or max(map(len, filter(None, match.groups()))) > 6:
            raise RecipeError(f"{text!r} is no list of heads")
        first, last = int(match[2]), int(match[3] or match[2])
        found |= {(int(match[1]), number) for number in range(first, last + 1)}
    return frozenset(found)


def _heads_of(term: str, heads: Sequence[int], name: str) -> set[Head]:
    if term == "none":
        return set()
    if term == "all":
        return {(layer, number) for layer, count in enumerate(heads) for number in range(count)}
    match = _TERM.fullmatch(term)
    assert match is not None
    layers = chosen_layers(_layers(match[1]), len(heads), f"{name}: {term}")
    return {(layer, number) for layer in layers for number in _numbers_of(term, match, layer, heads[layer], name)}


def _numbers_of(term: str, match: re.Match[str], layer: int, count: int, name: str) -> range:
    """The numbers that a term means among the `count` heads of a layer."""
    _, every, part, parts, first, last = match.groups()
    if every:
        return range(count)
    if part:
        return range((int(part) - 1) * count // int(parts), int(part) * count // int(parts))
    if int(last or first) >= count:
        raise RecipeError(f"{name}: {term} is outside the {count} heads of layer {layer}, 0 to {count - 1}")
    return range(int(first), int(last or first) + 1)
