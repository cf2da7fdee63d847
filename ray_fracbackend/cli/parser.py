"""The command line: the program and its commands. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ray_fracbackend import __version__
from ray_fracbackend.cli.commands import demo, doctor, plan, run, test
from ray_fracbackend.cli.program import PROGRAM
from ray_fracbackend.decide.suggestions import nearest


class UsageError(Exception):
    """The command line is wrong.

    Args:
        message: What is wrong.
        program: Program and command.
        usage: How the command is used.
    """

    def __init__(self, message: str, program: str, usage: str) -> None:
        super().__init__(message)
        self.program, self.usage = program, usage


class _Parser(argparse.ArgumentParser):
    def __init__(self, **arguments: Any) -> None:
        # No abbreviations: a new option would change what they mean.
        super().__init__(allow_abbrev=False, **arguments)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Report an unknown option before a missing one, with the usage of this command; argparse would print that of the program."""
        self._check_options(args)
        parsed, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return parsed, others

    def _check_options(self, words: Sequence[str]) -> None:
        takes_value = False
        for word in words:
            if takes_value:
                takes_value = False
                continue
            if not word.startswith("-") or word == "--":  # a command or a script; its own arguments follow
                return
            name, is_joined, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is not None:
                takes_value = not is_joined and action.nargs != 0
            elif name.startswith("--"):
                self.error(f"there is no option {name}{did_you_mean(name, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.prog, self.format_usage())


class _Program(_Parser):
    """The parser of the program, which knows the names of its commands."""

    commands: Mapping[str, argparse.ArgumentParser]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """List the commands if the command is missing or misspelled."""
        if not args:
            raise UsageError("name a command, such as ray-fracbackend doctor", self.prog, f"{self.format_help()}\n")
        self._check_options(args)
        command = next((word for word in args if not word.startswith("-")), None)
        if command is not None and command not in self.commands:
            listed = did_you_mean(command, self.commands) or f"; the commands are {', '.join(self.commands)}"
            self.error(f"there is no command {command}{listed}")
        return super().parse_known_args(args, namespace)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the most similar known word, or nothing."""
    meant = nearest(word, known)
    return f"; did you mean {meant}?" if meant else ""


def parser() -> argparse.ArgumentParser:
    """Return the parser, which raises UsageError; ``execute`` of its result runs the command."""
    whole = _Program(prog=PROGRAM, description="Ray Train on fractions of a GPU.")
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = whole.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, parser_class=_Parser
    )
    for command in (doctor, test, plan, run, demo):
        command.register(commands)
    whole.commands = commands.choices
    return whole
