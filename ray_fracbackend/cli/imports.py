"""Import packages that a command needs and that may be broken, such as torch built for another driver. Standard library only."""

from __future__ import annotations

import importlib

from ray_fracbackend.cli.program import PROGRAM, CommandError


def import_or_fail(*names: str) -> None:
    """Import packages.

    Raises:
        CommandError: A package cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            text = f"{name} cannot be imported ({cause}); run {PROGRAM} doctor to see what is missing and how to install it"
            raise CommandError("missing_package", text) from None
