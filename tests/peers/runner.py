"""Run a test suite of another project with stock's part or with ours, and compare the passing tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil

from tests.processes import processes_with

HERE = Path(__file__).parent
# Time limits for one test and for one side of a suite, in seconds.
TEST_LIMIT_S = 420
SUITE_LIMIT_S = 3600
# Time for pytest to end after it has written its report.
_END_S = 20


@dataclass(frozen=True)
class Suite:
    """One file of tests.

    Args:
        name: Name in the tables.
        of: Project of the suite.
        file: Path below `checkout`; several if it was moved between releases.
        checkout: Environment variable that names the checkout; empty for this folder.
        sides: Name of each side and its environment variables; stock's is first.
        select: Arguments of pytest that choose the tests.
        env: Variables for all sides.
        plugins: Whether the suite's own conftest.py is used.
    """

    name: str
    of: str
    file: str | tuple[str, ...]
    checkout: str
    sides: Mapping[str, Mapping[str, str]]
    select: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: bool = False

    def path(self) -> Path | None:
        """Path of the file; None if its checkout, or the file in it, is missing."""
        if not self.checkout:
            return HERE / str(self.file)
        if self.checkout not in os.environ:
            return None
        root = Path(os.environ[self.checkout]).resolve()
        files = (self.file,) if isinstance(self.file, str) else self.file
        return next((root / file for file in files if (root / file).exists()), None)

    def missing(self) -> str:
        """What a run lacks, for a skipped test; empty if nothing is missing."""
        if self.path() is not None:
            return ""
        if self.checkout in os.environ:
            return f"{self.checkout}={os.environ[self.checkout]} has no {self.file}"
        what = "Ray" if self.checkout == "RAY_CHECKOUT" else "PyTorch"
        return f"set {self.checkout} to a checkout of {what}, at the tag of the installed release"


@dataclass(frozen=True)
class Run:
    """Result of one side.

    Attributes:
        outcomes: ``passed``, ``skipped`` or the error's last line, by test.
        seconds: Wall time, including the start of pytest.
        output: The end of the output.
    """

    outcomes: dict[str, str]
    seconds: float
    output: str

    def passed(self) -> set[str]:
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


def run(suite: Suite, side: str) -> Run:
    """Run a suite, whose file must exist, on one side of `Suite.sides`.

    Raises:
        RuntimeError: pytest did not finish.
    """
    path = suite.path()
    assert path is not None, suite.missing()
    with tempfile.TemporaryDirectory(prefix="peers_", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "barrier").touch()  # torch's DistributedTest requires it
        report = Path(folder) / "report.xml"
        environment = {
            **os.environ,
            # Also the file's own folder: its helpers and Ray's workers import the tests by pytest's module names.
            "PYTHONPATH": os.pathsep.join(
                [str(HERE / "site"), str(path.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TEMP_DIR": folder,
            # Files of a suite are removed with the folder, and Ray does not find another program's cluster.
            **dict.fromkeys(("TMPDIR", "RAY_TMPDIR", "HOME"), folder),
            "PEERS_TESTS": str(path.parent) if suite.checkout else "",
            **suite.env,
            **suite.sides[side],
        }
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(path.parent), "--assert=plain"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}"]
        command += ["--quiet", "-rf", "--disable-warnings", str(path), *suite.select]
        command += [] if suite.plugins else ["--noconftest"]
        started = time.perf_counter()
        with (Path(folder) / "output").open("w+", errors="replace") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None and not report.exists() and time.perf_counter() - started < SUITE_LIMIT_S:
                    time.sleep(0.5)
                # After writing the report, pytest waits for processes of interrupted tests.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S if report.exists() else 0.1)
            finally:
                seconds = time.perf_counter() - started
                _end_all(folder)
                process.wait()
            output.seek(0)
            text = output.read()[-20_000:]
        # 1 means that tests failed, 5 that none was selected; a negative code that it was ended here.
        if not report.exists() or process.returncode not in (*range(-64, 2), 5):
            raise RuntimeError(f"{suite.name} on {side} ended with {process.returncode} in {seconds:.0f} s:\n{text}")
        return Run(_outcomes(report), seconds, text)


def _end_all(folder: str) -> None:
    """End the processes that a run left: an interrupted test leaves its ranks, and Ray its daemons."""
    for process in processes_with("TEMP_DIR", folder):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _outcomes(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = "passed"
        for result in case:
            if result.tag == "skipped":
                outcome = "skipped"
            elif result.tag in ("failure", "error"):
                lines = [line for line in (result.text or result.get("message") or "").splitlines() if line.strip()]
                errors = [line for line in lines if re.match(r"(E\s+)?[\w.]*(Error|Exception|Failure): .", line)]
                outcome = f"failed: {(errors or lines or [result.tag])[-1].removeprefix('E').strip()}"
        found[name] = outcome
    return found


def worse(stock: Run, ours: Run) -> dict[str, str]:
    """Return tests that pass on stock's side but not on ours, with their outcomes."""
    return {name: ours.outcomes.get(name, "did not run") for name in sorted(stock.passed() - ours.passed())}
