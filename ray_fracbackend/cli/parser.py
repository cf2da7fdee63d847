"""The command line: the program and its commands. Standard library only."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ray_fracbackend import __version__
from ray_fracbackend.cli.commands import demo, doctor, plan, run, test
from ray_fracbackend.cli.program import PROGRAM, wrong_usage


class _Parser(argparse.ArgumentParser):
    def __init__(self, **arguments: Any) -> None:
        # No abbreviations: a new option would change what they mean.
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        command = self.prog if self.prog != PROGRAM else f"{PROGRAM} COMMAND"
        raise wrong_usage(f"{message}. `{command} --help` lists the options")


def parser() -> argparse.ArgumentParser:
    """Return the parser, which raises CommandError; ``execute`` of its result runs the command."""
    whole = _Parser(prog=PROGRAM, description="Ray Train on fractions of a GPU.")
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in (doctor, test, plan, run, demo):
        command.register(commands)
    return whole
