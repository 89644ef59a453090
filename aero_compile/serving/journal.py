"""What a server tells its operator: one JSON object a line, and counts; never tokens, logits, tickets or keys."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

LOGGER = logging.getLogger("aero_compile.serving")


class Lines(logging.Formatter):
    """Records as JSON objects, with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        said = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said)


def note(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write down what happened."""
    LOGGER.log(level, event, extra={"fields": fields})
