"""The contract of a graph pass, and the text form of its options."""

from __future__ import annotations

import ast
import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from aero_compile.errors import RecipeError, nearest
from aero_compile.model import TransformedModel


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back: the model it edited in place, and whether it changed anything."""

    model: TransformedModel
    modified: bool


@dataclass(frozen=True)
class GraphPass(ABC):
    """One rewrite of a canonical graph. Subclasses are frozen dataclasses whose fields are their options.

    Class attributes:
        name: kebab-case, as written in a recipe.
        preserves_numerics: True if the function is unchanged to 1e-6 in float64 with the default options.
        needs_calibration: True if it measures the model on `model.calibration`, which `transform` is given.
    """

    name: ClassVar[str]
    preserves_numerics: ClassVar[bool]
    needs_calibration: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(field.default) is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not type(field.default):
                raise _wrong_type(self.name, field.name, value, field.default)

    @abstractmethod
    def call(self, model: TransformedModel) -> PassResult:
        """Edit `model` in place.

        Returns a truthful `modified`: False when the model already is what this pass makes.

        Raises:
            UnsupportedGraphError: the model has nothing this pass looks for and never had.
        """

    @property
    def keeps_function(self) -> bool:
        """Whether the pass, with these options, leaves the function unchanged to 1e-6 in float64."""
        return self.preserves_numerics and self == type(self)()

    def was_applied(self, model: TransformedModel) -> bool:
        """Whether a pass of this kind is in the model's history."""
        return any(text.partition("{")[0] == self.name for text in model.history)

    def __str__(self) -> str:
        """Text form: the name, with the options that differ from their defaults in braces."""
        options = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        inner = ",".join(f"{key}={_value_text(value)}" for key, value in options.items())
        return f"{self.name}{{{inner}}}" if inner else self.name

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Self:
        """Make the pass from the options of its text form.

        Raises:
            RecipeError: an unknown option, or a value of the wrong type.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, text in options.items():
            if key not in fields:
                hint = nearest(key, fields) if fields else " (it has no options)"
                raise RecipeError(f"pass {cls.name!r} has no option {key!r}{hint}")
            values[key] = _parse_value(cls.name, key, text, fields[key].default)
        return cls(**values)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value).replace(" ", "")


def _parse_value(name: str, key: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if default is not None and type(value) is not type(default):
        raise _wrong_type(name, key, text, default)
    return value


def _wrong_type(name: str, key: str, value: Any, default: Any) -> RecipeError:
    return RecipeError(
        f"option {key!r} of pass {name!r} takes a {type(default).__name__}, got {value!r} (default: {default!r})"
    )
