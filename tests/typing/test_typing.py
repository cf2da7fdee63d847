"""Type checkers find wrong settings in users' code and accept right ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("user_code.py")


@pytest.mark.full
def test_mypy(tmp_path):
    """mypy reports exactly the lines with a comment, each with its error code."""
    pytest.importorskip("mypy", reason="needs mypy")
    lines = _SCRIPT.read_text().splitlines()
    expected = {
        (number, found[1]) for number, line in enumerate(lines, 1) if (found := re.search(r"# error: ([\w-]+)$", line))
    }
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        os.devnull,
        "--cache-dir",
        tmp_path,
        "--ignore-missing-imports",
    ]
    environment = {**os.environ, "MYPYPATH": str(_ROOT)}
    done = subprocess.run(
        [*map(str, command), str(_SCRIPT)], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    reported = re.findall(r"user_code\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    assert {(int(number), code) for number, code in reported} == expected, done.stdout + done.stderr


def test_the_package_has_types():
    """The marker of PEP 561 is beside the modules."""
    assert (_ROOT / "ray_fracbackend" / "py.typed").exists()
