"""Recipes: ordered lists of passes, by name, by the paper's label, or as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aero_compile.errors import RecipeError, nearest
from aero_compile.graph_pass import GraphPass
from aero_compile.passes.gelu_to_identity import GeluToIdentity
from aero_compile.passes.gelu_to_relu import GeluToRelu
from aero_compile.passes.scaled_ffn import ScaledFFN
from aero_compile.passes.softmax_temperature import SoftmaxTemperature
from aero_compile.passes.strip_layer_norm import StripLayerNorm

PASSES: Mapping[str, type[GraphPass]] = {
    kind.name: kind for kind in (StripLayerNorm, GeluToRelu, GeluToIdentity, ScaledFFN, SoftmaxTemperature)
}
"""All passes by name."""


@dataclass(frozen=True)
class Recipe:
    """An ordered, immutable list of passes.

    Attributes:
        name: short name, or the text itself for a recipe that was written out.
        label: the paper's label, such as `SM+LN+R`; empty for a recipe of one's own.
        passes: the passes, applied in this order.
        remains: nonlinear ops that are left in a GPT-2.
        description: one sentence.
    """

    name: str
    label: str
    passes: tuple[GraphPass, ...]
    remains: tuple[str, ...] = ()
    description: str = ""

    @property
    def text(self) -> str:
        """The passes in text form; `resolve(recipe.text)` has the same passes."""
        return ",".join(str(one) for one in self.passes)

    @property
    def preserves_numerics(self) -> bool:
        """Whether the transformed model computes the same function before it is trained."""
        return all(one.keeps_function for one in self.passes)

    def with_option(self, pass_name: str, **options: Any) -> Recipe:
        """A copy in which the pass `pass_name` has these options; unchanged if the pass does not occur."""
        _known_pass(pass_name)
        fields = {field.name for field in dataclasses.fields(PASSES[pass_name])}
        for key in options:
            if key not in fields:
                raise RecipeError(f"pass {pass_name!r} has no option {key!r}{nearest(key, fields)}")
        changed = tuple(dataclasses.replace(one, **options) if one.name == pass_name else one for one in self.passes)
        return dataclasses.replace(self, passes=changed)


def _named() -> tuple[Recipe, ...]:
    strip, relu, linear = StripLayerNorm(), GeluToRelu(), GeluToIdentity()
    scaled, temperature = ScaledFFN(), SoftmaxTemperature()
    return (
        Recipe("baseline", "SM+LN+G", (), ("SM", "LN", "G"), "The model as it is."),
        Recipe("relu", "SM+LN+R", (relu,), ("SM", "LN", "R"), "ReLU in the FFN."),
        Recipe("linear_ffn", "SM+LN", (linear,), ("SM", "LN"), "No activation in the FFN."),
        Recipe("norm_free_gelu", "SM+G", (strip,), ("SM", "G"), "No LayerNorm."),
        Recipe("norm_free_relu", "SM+R", (strip, relu), ("SM", "R"), "No LayerNorm, ReLU in the FFN."),
        Recipe("norm_free_linear", "SM", (strip, linear), ("SM",), "Softmax is all that is left."),
        Recipe(
            "scaled_ffn",
            "SM+ScFFN",
            (strip, linear, scaled),
            ("SM",),
            "Softmax only, with learnable scales of the FFN and its residual.",
        ),
        Recipe(
            "softmax_only",
            "SM(t)+ScFFN",
            (strip, linear, scaled, temperature),
            ("SM",),
            "Softmax only, with ScaledFFN and a learnable temperature: the paper's final architecture.",
        ),
    )


def recipes() -> dict[str, Recipe]:
    """All named recipes: name → Recipe."""
    return {recipe.name: recipe for recipe in _named()}


def resolve(recipe: str | Recipe) -> Recipe:
    """The recipe meant by a name, a paper label (`SM+R`, `EReg(SM(t)+ScFFN)`) or the text of a pass list.

    Raises:
        RecipeError: neither; the message shows the nearest names.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise RecipeError(f"a recipe is a name, a text or a Recipe, not a {type(recipe).__name__}")
    text = recipe.strip()
    known = recipes()
    wanted = _plain_label(text)
    if not text:
        return known["baseline"]
    for candidate in known.values():
        if text == candidate.name or wanted == _plain_label(candidate.label):
            return candidate
    parts = _split(text)
    names = [part.partition("{")[0].strip() for part in parts]
    if len(parts) == 1 and names[0] not in PASSES:
        labels = [candidate.label for candidate in known.values()]
        raise RecipeError(f"unknown recipe or pass {text!r}{nearest(text, [*known, *labels, *PASSES])}")
    passes = tuple(parse_pass(part) for part in parts)
    same = next((c for c in known.values() if c.passes == passes), None)
    return same or Recipe(text, "", passes)


def _plain_label(text: str) -> str:
    """A label without spaces and without the note that entropy regularization is used in training."""
    plain = text.replace(" ", "").lower()
    match = re.fullmatch(r"ereg\((.*)\)", plain)
    return match.group(1) if match else plain


def _split(text: str) -> list[str]:
    """Split at the commas that are outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip() for part in parts]


def parse_pass(text: str) -> GraphPass:
    """One pass from its text form, `name` or `name{option=value,…}`."""
    match = re.fullmatch(r"([^{}]*)(?:\{(.*)\})?", text.strip(), re.DOTALL)
    if match is None:
        raise RecipeError(f"cannot read {text!r}: write name or name{{option=value}}")
    kind = _known_pass(match.group(1).strip())
    options: dict[str, str] = {}
    for item in _split(match.group(2)) if match.group(2) else []:
        key, equals, value = item.partition("=")
        if not equals:
            raise RecipeError(f"option {item!r} of pass {kind.name!r} has no value: write option=value")
        if key.strip() in options:
            raise RecipeError(f"option {key.strip()!r} of pass {kind.name!r} is given twice")
        options[key.strip()] = value.strip()
    return kind.from_options(options)


def _known_pass(name: str) -> type[GraphPass]:
    if name not in PASSES:
        raise RecipeError(f"unknown pass {name!r}{nearest(name, PASSES)}")
    return PASSES[name]
