"""Import what a command needs, which may be there and broken, such as a torch for another driver. Standard library only."""

from __future__ import annotations

import importlib

from ray_fracbackend.cli.program import PROGRAM, CommandError
from ray_fracbackend.cli.signals import stopping


def import_or_fail(*names: str) -> None:
    """Import packages.

    Raises:
        CommandError: One cannot be imported.
        Stopped: A signal asked for an end meanwhile.
    """
    with stopping():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                text = (
                    f"{name} cannot be imported ({cause}); {PROGRAM} doctor names what is missing and what to install"
                )
                raise CommandError("missing_package", text) from None
