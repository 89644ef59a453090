"""Sets of layers as text, for the options of passes: `all`, `even`, `1/2`, `last:3`, `0-5`, `0+3+7-9`."""

from __future__ import annotations

import re
from collections.abc import Callable

from aero_compile.errors import RecipeError

_NAMED: dict[str, Callable[[int, int], bool]] = {
    "all": lambda layer, count: True,
    "none": lambda layer, count: False,
    "even": lambda layer, count: layer % 2 == 0,
    "odd": lambda layer, count: layer % 2 == 1,
}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_END = re.compile(r"(first|last):(\d+)")
_PART = re.compile(r"(\d+)/(\d+)")


def parse_layers(text: str) -> str:
    """Check the syntax of a set of layers and return it without spaces.

    The terms, joined by `+`, are `all`, `none`, `even`, `odd`, `first:N`, `last:N`, `2/4` (the second of four parts,
    as equal as can be), a layer `3` counted from 0, or a range `0-5` with both ends.

    Raises:
        RecipeError: any other text.
    """
    plain = text.replace(" ", "")
    for term in plain.split("+"):
        if term in _NAMED or _END.fullmatch(term):
            continue
        span, part = _RANGE.fullmatch(term), _PART.fullmatch(term)
        if part and 1 <= int(part[1]) <= int(part[2]):
            continue
        if not span or (span[2] is not None and int(span[1]) > int(span[2])):
            raise RecipeError(
                f"{text!r} is no set of layers: write {', '.join(_NAMED)}, first:3, last:3, "
                "2/4 (the second quarter), 4, 0-5, or several of them joined by +"
            )
    return plain


def chosen_layers(text: str, count: int, name: str) -> frozenset[int]:
    """The layers, out of `count`, that `text` means; `name` is who asks, for the message.

    Raises:
        RecipeError: wrong syntax, or a layer that the model does not have.
    """
    chosen: set[int] = set()
    for term in parse_layers(text).split("+"):
        chosen |= _layers_of(term, count, name)
    return frozenset(chosen)


def _layers_of(term: str, count: int, name: str) -> set[int]:
    if term in _NAMED:
        return {layer for layer in range(count) if _NAMED[term](layer, count)}
    end, part, span = (pattern.fullmatch(term) for pattern in (_END, _PART, _RANGE))
    if part:
        number, parts = int(part[1]), int(part[2])
        return set(range((number - 1) * count // parts, number * count // parts))
    if end:
        number = int(end[2])
        layers = set(range(number)) if end[1] == "first" else set(range(count - number, count))
    else:
        assert span is not None
        layers = set(range(int(span[1]), int(span[2] or span[1]) + 1))
    if layers and not layers <= set(range(count)):
        raise RecipeError(f"{name}: {term} is outside the model's {count} layers, 0 to {count - 1}")
    return layers
