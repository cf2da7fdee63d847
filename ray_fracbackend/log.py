"""The package's logger."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # it accepts no type parameter in Python 3.10
    _Adapter = logging.LoggerAdapter


class _PrefixedLogger(_Adapter):
    """Put the package's name before each line, because Ray's log shows no logger names."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f"ray_fracbackend: {msg}", kwargs


# Ray configures level and handlers only for "ray.train", in its controller and workers.
logger = _PrefixedLogger(logging.getLogger("ray.train.fracbackend"), {})
