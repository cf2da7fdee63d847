"""ci/cuda.py as a program that runs commands: a signal ends it with the running step, and a command leaves no process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import cuda_steps  # noqa: E402

_RIG = """
import sys, types
sys.path.insert(0, sys.argv[1])
import cuda, cuda_steps
from pathlib import Path
folder = Path(sys.argv[2])
def step(*code):
    return cuda_steps.Step("", [sys.executable, "-c", "; ".join(code)], float(sys.argv[3]))
started = f"open({str(folder / 'started')!r}, 'w').close()"
cuda_steps.STEPS = {
    "first": step("import time", started, "time.sleep(60)"),
    "second": step(f"open({str(folder / 'second')!r}, 'w').close()"),
}
cuda.environment = lambda *args: {}
options = types.SimpleNamespace(command=[], torch=next(iter(cuda.CELLS)), record=False)
sys.exit(cuda.run_steps(cuda.Command(), types.SimpleNamespace(folder=folder), options))
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ci/cuda.py is for Linux")


def start(folder, limit_s):
    """Start two steps, the first of which sleeps."""
    command = [sys.executable, "-c", _RIG, str(_ROOT / "ci"), str(folder), str(limit_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_steps(tmp_path, number):
    """The signal ends the running step, and the other steps are not started."""
    process = start(tmp_path, 50)
    assert wait_until((tmp_path / "started").exists)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"first: stopped by signal {number:d}" in output
    assert not (tmp_path / "second").exists()


def test_a_step_that_takes_too_long(tmp_path):
    """The step ends at its time limit, and the next one runs."""
    process = start(tmp_path, 2)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "first: timed out" in output
    assert "second: passed" in output
    assert (tmp_path / "second").exists()


def test_the_page_has_the_recorded_table():
    """docs/development/gpu-runs.md shows the runs of ci/cuda_results.jsonl between the marks that a new record replaces."""
    table = f"{cuda_steps._BEGIN}{cuda_steps.table(cuda_steps.read())}\n{cuda_steps._END}"
    assert table in cuda_steps.PAGE.read_text(encoding="utf-8")


def test_all_tests_of_cuda_tensors_are_in_a_step():
    """A file that no step names would run nowhere."""
    named = {word for step in cuda_steps.STEPS.values() for word in step.command if word.endswith(".py")}
    files = {
        f"tests/{folder}/{path.name}"
        for folder in ("cuda", "gpu")
        for path in (_ROOT / "tests" / folder).glob("test_*.py")
    }
    assert files <= named
    assert all((_ROOT / name).is_file() for name in named)
