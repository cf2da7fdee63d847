"""Command line ``ray-fracbackend``.

Exit code 0: good, 1: a problem was found, 2: wrong usage; 128 plus the signal's number if a signal ended it. Results go to
standard output and errors to standard error; with ``--json`` both are one document on standard output.
"""

from __future__ import annotations

import io
import json
import sys
import traceback
from collections.abc import Sequence

from ray_fracbackend.cli.output import emit, say
from ray_fracbackend.cli.parser import parser
from ray_fracbackend.cli.program import PROGRAM, CommandError, Outcome
from ray_fracbackend.cli.signals import to_its_end
from ray_fracbackend.shown import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Command line without the program's name, by default that of the process.

    Returns:
        The exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # on Windows a pipe has the ANSI code page, which lacks most letters
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else list(arguments)
    return to_its_end(PROGRAM, lambda: _main(words))


def _main(words: Sequence[str]) -> int:
    # After run, --json may be an option of the script.
    who, as_json = PROGRAM, "--json" in words and "run" not in words
    try:
        options = parser().parse_args(words or ["--help"])
        who += f" {options.command}"
        if options.command in ("run", "demo"):  # these run a script
            code: int = options.execute(options)
            return code
        return _show(options.execute(options), as_json)
    except CommandError as error:
        if as_json:
            return _show(Outcome(error=error), as_json)
        say(who, str(error))
        return error.code
    except Exception as error:  # a bug of this package: print the document and the traceback
        if not as_json:
            raise
        traceback.print_exc()
        return _show(Outcome(error=CommandError("internal_error", f"{type(error).__name__}: {error}")), as_json)


def _show(outcome: Outcome, as_json: bool) -> int:
    emit(json.dumps(printable(outcome.document()), indent=1) if as_json else outcome.text)
    return outcome.error.code if outcome.error else 0
