"""ci/commands.py: the result for a command that passes, fails, prints something else, or does not end."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until

sys.path.append(str(Path(__file__).parents[2] / "ci"))

import commands

_PYTHON = (sys.executable, "-c")


@pytest.mark.parametrize(
    ("code", "prints", "exit_code", "expected"),
    [
        ("print('one'); print('accuracy 0.97')", (r"^accuracy 0\.9",), 0, "passed"),
        ("print('one')", ("^two",), 0, "failed: no line with ^two"),
        ("import sys; print('one', file=sys.stderr)", ("^one$",), 0, "passed"),
        ("raise SystemExit(3)", (), 0, "failed: exit code 3, not 0"),
        ("raise SystemExit(3)", (), 3, "passed"),
    ],
)
def test_a_command_that_ends(code: str, prints: tuple[str, ...], exit_code: int, expected: str) -> None:
    """The exit code and the lines of both outputs are as expected, or the result names the differences."""
    command = commands.Command((code,), 60, prints, exit_code)
    assert commands.run_command(command, _PYTHON) == expected


def test_a_command_that_does_not_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is ended after its time limit together with its child processes, and the next one runs."""
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}, {str(tmp_path / 'pid')!r}]); "
        "print('started', flush=True); time.sleep(600)"
    )
    hangs, good = commands.Command((code,), 5, ("^started",)), commands.Command(("print('good')",), 60, ("^good",))
    assert commands.run_commands([hangs, good], _PYTHON) is False
    assert "failed: no end within 5 s" in capfd.readouterr().out
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert commands.run_commands([good], _PYTHON) is True
