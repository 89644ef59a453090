"""Named tuples that source models return: the class itself where it is known, else one like it."""

from __future__ import annotations

import collections
import keyword
from collections.abc import Sequence
from typing import Any

from aero_compile.errors import InputError

_CLASSES: dict[tuple[str, tuple[str, ...]], Any] = {}


def remember_tuple(cls: Any) -> str:
    """Note the class of a named tuple that was met while a model was captured; returns its name."""
    _CLASSES[cls.__name__, tuple(cls._fields)] = cls
    return str(cls.__name__)


def tuple_class(name: str, fields: Sequence[str]) -> Any:
    """The class that was captured in this process, or one that is called like it, with the same fields.

    Nothing is imported for it: a model that was loaded does not need the source's library.

    Raises:
        InputError: a name that no class or field can have, or the same field twice.
    """
    key = (name, tuple(fields))
    if key not in _CLASSES:
        for each in (name, *fields):
            if not isinstance(each, str) or not each.isidentifier() or keyword.iskeyword(each) or each.startswith("_"):
                raise InputError(f"a named tuple {name!r} cannot have the name {each!r}")
        if len(set(fields)) < len(fields):
            raise InputError(f"the named tuple {name} has a field twice")
        _CLASSES[key] = collections.namedtuple(name, fields)
    return _CLASSES[key]
