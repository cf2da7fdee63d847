"""Environment variables that a start sets in a worker's process, kept separate from the user's own.

One process may start more than once, after a failure or in a new worker group: the second start must not take the first
one's choice for a setting of the user.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ray_fracbackend.worker.state import STATE


def set_default(values: Mapping[str, str]) -> None:
    """Set variables where the user did not, and record them as set by the start."""
    for name, value in values.items():
        if name not in user_environment():
            _set(name, value)


def set_always(values: Mapping[str, str]) -> None:
    """Set variables, also where the user did, and record them as set by the start."""
    for name, value in values.items():
        _set(name, value)


def user_environment() -> dict[str, str]:
    """Return the process's variables without those that still have the value that a start set."""
    return {name: value for name, value in os.environ.items() if STATE.variables.get(name) != value}


def clear() -> None:
    """Remove what earlier starts set, so that the next one begins with the user's own variables."""
    for name, value in STATE.variables.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    STATE.variables.clear()


@contextmanager
def during(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the body alone; a value that the user already set stays."""
    set_always(values)
    try:
        yield
    finally:
        for name, value in values.items():
            if STATE.variables.get(name) == value == os.environ.get(name):
                del os.environ[name], STATE.variables[name]


@dataclass(frozen=True)
class Snapshot:
    """The environment at one time.

    Attributes:
        variables: All variables.
        set_by_us: Those that a start had set, with the values that it set.
    """

    variables: Mapping[str, str]
    set_by_us: Mapping[str, str]


def snapshot() -> Snapshot:
    """Copy the environment, to restore it after a failure."""
    return Snapshot(dict(os.environ), dict(STATE.variables))


def restore(before: Snapshot) -> None:
    """Restore only the variables that changed: threads of libraries may read the others meanwhile."""
    for name in {*os.environ, *before.variables}:
        value = before.variables.get(name)
        if os.environ.get(name) == value:
            continue
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    STATE.variables.clear()
    STATE.variables.update(before.set_by_us)


def _set(name: str, value: str) -> None:
    # A value that the user already set, and that the start would set too, stays the user's.
    if os.environ.get(name) != value or name in STATE.variables:
        STATE.variables[name] = value
    os.environ[name] = value
