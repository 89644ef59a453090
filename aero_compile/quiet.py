"""Keep warnings and log messages of libraries away from the user."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def quiet(names: Iterable[str], level: int = logging.ERROR) -> Iterator[None]:
    """Keep the loggers called `names` from anything below `level`, and hide warnings."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
