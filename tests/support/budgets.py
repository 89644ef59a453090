"""How many examples property tests draw: few, the same every time, or with `-m slow` many, new every time."""

from __future__ import annotations

import functools
import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

MANY = int(os.environ.get("AERO_COMPILE_EXAMPLES", "60"))

_calm: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
few = functools.partial(settings, derandomize=True, phases=(Phase.explicit, Phase.generate), **_calm)
many = functools.partial(settings, **_calm)
