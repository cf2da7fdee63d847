"""Set environment variables for a start in a worker's process and distinguish them from the user's own.

One process may run several starts, after a failure or in a new worker group. The second start must not treat the
variables of the first one as settings of the user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ray_fracbackend.worker.state import STATE


def set_default(values: Mapping[str, str]) -> None:
    """Set variables that the user did not set, and record them as set by the start."""
    own = user_environment()
    set_always({name: value for name, value in values.items() if name not in own})


def set_always(values: Mapping[str, str]) -> None:
    """Set variables, overriding the user's, and record them as set by the start."""
    for name, value in values.items():
        # A value that the user has already set stays the user's, even if the start would set the same value.
        if os.environ.get(name) != value or name in STATE.variables:
            STATE.variables[name] = value
        os.environ[name] = value


def user_environment() -> dict[str, str]:
    """Return the process's variables without those that still have the value that a start set."""
    return {name: value for name, value in os.environ.items() if STATE.variables.get(name) != value}


def clear(names: Iterable[str] | None = None) -> None:
    """Remove variables that starts have set: all of them, as before the next start, or only some."""
    for name in list(STATE.variables if names is None else names):
        value = STATE.variables.pop(name, None)
        if value is not None and os.environ.get(name) == value:
            del os.environ[name]
