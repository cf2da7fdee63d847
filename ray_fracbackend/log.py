"""The package's logger."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from ray_fracbackend.shown import printable


class _PrefixedLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # it accepts none in Python 3.10
    """Put the package's name before each line, because Ray's log shows no logger names."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f"ray_fracbackend: {msg}", kwargs


def _printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


# Ray configures level and handlers only for "ray.train", in its controller and workers.
logger = _PrefixedLogger(logging.getLogger("ray.train.fracbackend"), {})
logger.logger.addFilter(_printable)


@contextmanager
def slow_logged(limit_s: float, text: str) -> Iterator[None]:
    """Log a warning, with the seconds that the block took in place of its ``%``, if these are more than the limit."""
    started = time.monotonic()
    yield
    if (seconds := time.monotonic() - started) > limit_s:
        logger.warning(text, seconds)
