"""Steps that test the project on Windows, for the Windows jobs of CI, for a person's machine, and for ci/wine.py.

usage: python ci/windows.py [--results FILE] [STEP ...]     in an environment with the project and its extra `test`

Steps run one after the other, each with a time limit. If one fails, the next still runs. FILE is written after each step. If torch has
no Gloo transport (2.8.0 to 2.10.0), only steps without a process group run; one of them tests that a start fails with an error that states
what to install. Before 2.7 torch has no `staged`, and stock's groups, which the tests of `verify` create, fail there. The script prints a table
of the tests by folder, and exits with 1 if a step failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import psutil
from commands import COMMANDS
from common import ROOT

# Tests that start Ray: each kind of start, a start that fails, checkpoints, the command line.
RAY_TESTS = (
    "tests/ray/test_trainer.py",
    "tests/ray/test_checkpoint.py",
    "tests/ray/test_start.py",
    "tests/ray/test_start_failures.py",
    "tests/ray/test_start_fallback.py",
    "tests/ray/test_doctor.py",
    "tests/ray/test_placement.py",
    "tests/ray/test_group_test.py",
    "tests/ray/test_run.py",
    "tests/ray/test_demo.py",
)
_NO_GLOO = re.compile(r"2\.(8|9|10)\.")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: Name on the command line.
        command: Arguments of Python.
        limit_s: Time limit in seconds: at least 1.5 times the time under Wine (ci/wine_results.jsonl). The limits of
            one run add up to less than the time limit of the Windows jobs, which would otherwise end without the table.
        without_gloo: Whether it also runs if torch has no Gloo transport.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    without_gloo: bool = False


def _tests(name: str, *paths: str, limit_s: float, without_gloo: bool = False) -> Step:
    return Step(name, ("-m", "pytest", "-q", *paths), limit_s, without_gloo)


def _command(name: str) -> Step:
    # One minute more than the command has, so that ci/commands.py ends the command and reports it.
    return Step(name, ("ci/commands.py", name), COMMANDS[name].limit_s + 60)


STEPS = (
    Step("imports", ("ci/windows.py", "--import-modules"), 120, without_gloo=True),
    _tests("unit", "tests/unit", limit_s=720),
    _tests("verify", "tests/verify", limit_s=1200),
    _tests("facts", "tests/windows", limit_s=1800, without_gloo=True),
    _tests("net", "tests/net", limit_s=120),
    _tests("staged", "tests/ipc/test_staged.py", limit_s=1200),
    _tests("ray", *RAY_TESTS, limit_s=1800),
    _command("doctor"),
    _command("demo"),
    Step("example", ("examples/windows_laptop.py",), 300),
)


@dataclass
class Counts:
    """Tests of a folder: those that ran, and those that were skipped, marked ``linux`` or for another reason."""

    passed: int = 0
    failed: int = 0
    linux: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)


def count(report: Path) -> Iterator[tuple[str, Counts]]:
    """Read a JUnit report of pytest; return folder and counts of each test."""
    for case in ElementTree.parse(report).iter("testcase"):
        # A file that cannot be imported has its module as the name and no class.
        folder = "/".join((case.get("classname") or case.get("name", "")).split(".")[:2])
        found = Counts(seconds=float(case.get("time", 0)))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found.failed = 1
        elif skipped is None:
            found.passed = 1
        elif (reason := skipped.get("message", "")).startswith("linux: "):
            found.linux = 1
        else:
            found.skipped, found.reasons = 1, [reason]
        yield folder, found


def added(counts: dict[str, Counts], folder: str, more: Counts) -> None:
    """Add the counts of one test to those of its folder."""
    total = counts.setdefault(folder, Counts())
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)


def table(counts: dict[str, Counts]) -> str:
    """Format the counts as a Markdown table."""
    lines = ["| tests | passed | failed | marked `linux` | skipped | seconds |", "|---|---|---|---|---|---|"]
    for folder, found in counts.items():
        numbers = (found.passed, found.failed, found.linux, found.skipped, round(found.seconds))
        lines.append(f"| `{folder}` | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def import_modules() -> None:
    """Import every module of the package, as far as this Ray allows: FracTorchCallback needs the V2 engine."""
    names = []
    for path in sorted((ROOT / "ray_fracbackend").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names += [".".join(parts).removesuffix(".__init__")] if parts[-1] != "__main__" else []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if "a ray-fracbackend that supports this Ray" not in str(error):
                raise
            print(f"{name}: {error}")
    print(f"{len(names)} modules")


def run_step(step: Step) -> tuple[str, list[tuple[str, Counts]]]:
    """Run one step; return ``passed`` or the reason of the failure, and its tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])}
    print(f"=== {step.name}: python {' '.join(step.command)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = [f"--junitxml={report}"] if "pytest" in step.command else []
        process = subprocess.Popen([sys.executable, *step.command, *options], cwd=ROOT, env=environment)
        try:
            code = process.wait(step.limit_s)
            result = f"failed: exit code {code}" if code else "passed"
        except subprocess.TimeoutExpired:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            result = f"failed: no end within {step.limit_s:g} s"
        return result, list(count(report)) if report.exists() else []


def chosen(names: list[str], torch: str) -> list[Step]:
    """Return the steps to run: the given ones, or all that this torch can run.

    Raises:
        SystemExit: A name is not a step.
    """
    if unknown := set(names) - {step.name for step in STEPS}:
        raise SystemExit(f"no step {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
    if names:
        return [step for step in STEPS if step.name in names]
    is_old = re.match(r"2\.[4-6]\.", torch)
    steps = [step for step in STEPS if not (is_old and step.name in ("staged", "verify"))]
    return [step for step in steps if step.without_gloo or not _NO_GLOO.match(torch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all that the installed torch can run")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also write the results there, as JSON")
    parser.add_argument("--import-modules", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.import_modules:
        import_modules()
        return
    versions = {"python": sys.version.split()[0], "torch": version("torch"), "ray": version("ray")}
    print(f"Windows {sys.getwindowsversion()[:3]}" if sys.platform == "win32" else sys.platform, versions, flush=True)
    counts: dict[str, Counts] = {}
    steps = {}
    for step in chosen(options.steps, versions["torch"]):
        started = time.monotonic()
        result, tests = run_step(step)
        steps[step.name] = {"result": result, "seconds": round(time.monotonic() - started)}
        for folder, found in tests:
            added(counts, folder, found)
        print(f"=== {step.name}: {result} in {steps[step.name]['seconds']} s", flush=True)
        if options.results:
            done = {folder: asdict(found) for folder, found in counts.items()}
            options.results.write_text(json.dumps({**versions, "steps": steps, "tests": done}, indent=1))
    print(f"\n{table(counts)}\n")
    for name, found in steps.items():
        print(f"{name}: {found['result']}, {found['seconds']} s")
    if any(found["result"] != "passed" for found in steps.values()):
        raise SystemExit("a step failed, see above")


if __name__ == "__main__":
    main()
