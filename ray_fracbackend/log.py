"""The package's logger."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # which takes no parameter in Python 3.10
    _Adapter = logging.LoggerAdapter


class _PrefixedLogger(_Adapter):
    """Puts the package's name before each line: Ray prints other lines before and after ours, without the names of loggers."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f"ray_fracbackend: {msg}", kwargs


# Ray configures the level and the handlers of "ray.train" in its controller and workers, and of nothing else.
logger = _PrefixedLogger(logging.getLogger("ray.train.fracbackend"), {})
