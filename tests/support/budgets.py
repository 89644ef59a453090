"""What runs by default and what with `-m slow` alone: few examples, the same every time, or many, new every time."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

MANY = int(os.environ.get("AERO_COMPILE_EXAMPLES", "60"))

_calm: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
few = functools.partial(settings, derandomize=True, phases=(Phase.explicit, Phase.generate), **_calm)
many = functools.partial(settings, **_calm)


def by_default(cases: Iterable[str], *kept: str) -> list[Any]:
    """Parameters of a test: what is `kept` runs by default, the rest of `cases` with `-m slow`."""
    names = tuple(cases)
    assert set(kept) <= set(names), set(kept) - set(names)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
