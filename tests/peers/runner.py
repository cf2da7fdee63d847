"""Runs a suite that others wrote with stock's part or with ours, and compares what passed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil

from tests.processes import processes_with

HERE = Path(__file__).parent
# Bounds on one test and on one side of a suite, in seconds.
TEST_LIMIT_S = 420
SUITE_LIMIT_S = 3600
# How long pytest may take to end once it has written its report.
_END_S = 20


@dataclass(frozen=True)
class Suite:
    """One file of tests.

    Args:
        name: As in the tables.
        of: Whose it is.
        file: Path below `checkout`; several where it has moved from release to release.
        checkout: The environment variable that names the checkout which has it; empty for this folder.
        sides: Name of each side and the variables that make it; stock's is first.
        select: Arguments of pytest that choose the tests.
        env: Variables for all sides.
        plugins: Whether the suite's own conftest.py takes part.
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
        """Where the file is; None where its checkout, or the file in it, is not here."""
        if not self.checkout:
            return HERE / str(self.file)
        if self.checkout not in os.environ:
            return None
        root = Path(os.environ[self.checkout]).resolve()
        files = (self.file,) if isinstance(self.file, str) else self.file
        return next((root / file for file in files if (root / file).exists()), None)

    def missing(self) -> str:
        """What a run lacks, for a test that is skipped; empty where it has all."""
        if self.path() is not None:
            return ""
        if self.checkout in os.environ:
            return f"{self.checkout}={os.environ[self.checkout]} has no {self.file}"
        what = "Ray" if self.checkout == "RAY_CHECKOUT" else "PyTorch"
        return f"set {self.checkout} to a checkout of {what}, at the tag of the installed release"


@dataclass(frozen=True)
class Run:
    """What one side did.

    Attributes:
        outcomes: ``passed``, ``skipped`` or the error's last line, by test.
        seconds: Wall time, with the start of pytest.
        output: The end of what it printed.
    """

    outcomes: dict[str, str]
    seconds: float
    output: str

    def passed(self) -> set[str]:
        """Names of the tests that passed."""
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


def run(suite: Suite, side: str, tests: Sequence[str] = ()) -> Run:
    """Run a suite on one side.

    Args:
        suite: What to run; its file must be here.
        side: A name of `Suite.sides`.
        tests: Some of its tests, as pytest names them; by default all that `Suite.select` leaves.

    Raises:
        RuntimeError: pytest did not come to its end.
    """
    path = suite.path()
    assert path is not None, suite.missing()
    with tempfile.TemporaryDirectory(prefix="peers_", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "barrier").touch()  # torch's DistributedTest wants it
        report = Path(folder) / "report.xml"
        environment = {
            **os.environ,
            # The file's own folder too: its helpers, and Ray's workers import the tests by the name that pytest gave them.
            "PYTHONPATH": os.pathsep.join(
                [str(HERE / "site"), str(path.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TEMP_DIR": folder,
            # What a suite leaves goes with the folder, and Ray does not find the cluster of another program.
            **dict.fromkeys(("TMPDIR", "RAY_TMPDIR", "HOME"), folder),
            "PEERS_TESTS": str(path.parent) if suite.checkout else "",
            **suite.env,
            **suite.sides[side],
        }
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(path.parent), "--assert=plain"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}"]
        command += ["--quiet", "-rf", "--disable-warnings", *(tests or [str(path), *suite.select])]
        command += [] if suite.plugins else ["--noconftest"]
        started = time.perf_counter()
        with (Path(folder) / "output").open("w+", errors="replace") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None and not report.exists() and time.perf_counter() - started < SUITE_LIMIT_S:
                    time.sleep(0.5)
                # With the report written, it waits for processes of tests that were broken off.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S if report.exists() else 0.1)
            finally:
                seconds = time.perf_counter() - started
                _end_all(folder)
                process.wait()
            output.seek(0)
            text = output.read()[-20_000:]
        # 1 says that tests failed, 5 that none was chosen; less than 0 that it was ended here.
        if not report.exists() or process.returncode not in (*range(-64, 2), 5):
            raise RuntimeError(f"{suite.name} on {side} ended with {process.returncode} in {seconds:.0f} s:\n{text}")
        return Run(_outcomes(report), seconds, text)


def _end_all(folder: str) -> None:
    """Ends what a run left: a test that was broken off leaves its ranks, and Ray its daemons."""
    for process in processes_with("TEMP_DIR", folder):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _outcomes(report: Path) -> dict[str, str]:
    """By test, out of a report in JUnit's form."""
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
    """Tests that pass on the stock side and not on ours, with what happened."""
    return {name: ours.outcomes.get(name, "did not run") for name in sorted(stock.passed() - ours.passed())}
