"""Errors for a class, a dict or another value in place of a configuration. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class _ClassGivenError(TypeError, AttributeError):
    """The class was passed in place of an object. An AttributeError too, which inspect.getmembers() and completion expect."""


class property_of_an_object(property):
    """A property that raises an error with the fix if read on the class. Ray would report that a property is not callable."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            raise _ClassGivenError(not_a_config(owner))
        return super().__get__(instance, owner)


def not_a_config(given: object) -> str:
    """Return the message for a value that is no configuration of a backend."""
    if isinstance(given, type):
        name = given.__name__
        return f"torch_config={name}: it must be an object and not the class. Add parentheses: torch_config={name}()."
    settings = given if isinstance(given, Mapping) and all(isinstance(name, str) for name in given) else {}
    call = f"FracTorchConfig({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    return f"torch_config={given!r}: it must be a TorchConfig. Write torch_config={call}."
