"""Apply the patches to a copy of the installed Ray, and run their tests on stock and on patched Ray.

    python upstream/check.py            in minutes
    python upstream/check.py --apply    only whether each patch and the whole series apply, in seconds; starts no Ray

Rules for each patch: it applies by itself and together with all others; it changes fewer than 80 lines; it passes ruff with
Ray's rules; its reproductions, the `Reproduced-by` lines of its message, fail on stock Ray and pass with only this patch.
The other tests of upstream/tests pass on stock Ray and with the whole series. The exit code is 1 if a rule is broken, and
the output names the rule.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

# The release that the patches are made for.
RAY = "2.60.0"

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TESTS = "python/ray/train/v2/tests"
# Tests of ray_fracbackend that have to pass where Ray has the patches.
PACKAGE_TESTS = ("test_trainer.py", "test_start_failures.py", "test_jobs.py")
MAX_CHANGED_LINES = 80
STOCK, SERIES = "stock", "series"
# Seconds for one test, and for one call of pytest.
_TEST_LIMIT_S, _LIMIT_S = 600, 2400
_TWO_FILES_AT_A_TIME = ("-n", "2", "--dist", "loadfile")
_GIT_ENV = {
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "check"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "check@localhost"),
    # The user's hooks, signatures and line ends are none of this.
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
}


class CheckError(Exception):
    """A rule that a patch breaks, as the message."""


@dataclass(frozen=True)
class Patch:
    """One file of upstream/patches."""

    path: Path

    @property
    def name(self) -> str:
        """Return the file name without its suffix: the branch of the tree with only this patch."""
        return self.path.stem

    @property
    def reproductions(self) -> list[str]:
        """Return the tests that fail without the patch, as pytest ids in the folder of the tests."""
        return re.findall(rf"^Reproduced-by: {TESTS}/(\S+)$", self.path.read_text(), re.MULTILINE)

    @property
    def num_changed_lines(self) -> int:
        """Return the number of added and removed lines."""
        return len(re.findall(r"^(?:\+(?!\+\+ )|-(?!--(?: |$)))", self.path.read_text(), re.MULTILINE))


class Tree:
    """A copy of the Python files of the installed Ray in a git repository, with a branch for each patch.

    Files that are not Python are links to the installed Ray. Its processes therefore start from the copy.
    """

    def __init__(self, folder: Path, patches: list[Patch]) -> None:
        self.folder = folder
        _copy_ray(folder / "python" / "ray")
        self._git("init", "--quiet", "--initial-branch", STOCK)
        (folder / ".gitignore").write_text("*\n!*/\n!*.py\n")
        self._git("add", "python")
        self._git("commit", "--quiet", "--message", "installed")
        for patch in patches:
            self._apply(patch)
        self._git("checkout", "--quiet", "-b", SERIES, STOCK)
        for patch in patches:
            done = self._run("cherry-pick", patch.name)
            if done.returncode:
                raise CheckError(f"{patch.name} applies alone, not after the others:\n{self._git('diff')}")

    def switch(self, branch: str) -> None:
        """Switch the copy to stock Ray, to Ray with one patch, or to Ray with all patches."""
        self._git("checkout", "--quiet", branch)
        # Compiled modules are compared by seconds and size only.
        for path in self.changed_files(SERIES):
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)

    def changed_files(self, branch: str) -> list[Path]:
        """Return the files that differ from stock Ray."""
        return [self.folder / name for name in self._git("diff", "--name-only", STOCK, branch).split()]

    def _apply(self, patch: Patch) -> None:
        self._git("checkout", "--quiet", "-b", patch.name, STOCK)
        if self._run("am", "--quiet", str(patch.path)).returncode == 0:
            return
        self._run("am", "--abort")
        told = self._run("apply", "--reject", str(patch.path)).stderr
        hunks = "\n".join(path.read_text() for path in sorted(self.folder.rglob("*.rej")))
        raise CheckError(f"{patch.path.name} does not apply:\n{hunks or told}")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env={**os.environ, **_GIT_ENV},
            capture_output=True,
            text=True,
            check=False,
        )

    def _git(self, *arguments: str) -> str:
        done = self._run(*arguments)
        if done.returncode:
            raise CheckError(f"git {' '.join(arguments)}: {done.stderr}")
        return done.stdout


def _copy_ray(to: Path) -> None:
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        raise CheckError("Ray is not installed for this Python: pip install 'ray[train]'")
    ray = Path(spec.origin).parent
    for folder, folders, files in os.walk(ray):
        here = to / Path(folder).relative_to(ray)
        here.mkdir(parents=True)
        for name in list(folders):
            if name == "__pycache__":
                folders.remove(name)
            # dashboard/client and the like
            elif not any((Path(folder) / name).rglob("*.py")):
                (here / name).symlink_to(Path(folder, name))
                folders.remove(name)
        for name in files:
            if name.endswith(".py"):
                shutil.copy(Path(folder, name), here / name)
            else:
                (here / name).symlink_to(Path(folder, name))


def check_patches(tree: Tree, patches: list[Patch]) -> None:
    """Check size and style, without Ray."""
    for patch in patches:
        if patch.num_changed_lines >= MAX_CHANGED_LINES:
            raise CheckError(f"{patch.name} changes {patch.num_changed_lines} lines, the bound is {MAX_CHANGED_LINES}")
        if not patch.reproductions:
            raise CheckError(f"{patch.name} names no test that fails without it (Reproduced-by: {TESTS}/...)")
        for test in patch.reproductions:
            if not (HERE / "tests" / test.partition("::")[0]).is_file():
                raise CheckError(f"{patch.name}: no file of upstream/tests has {test}")
        print(f"{patch.name}: applies, {patch.num_changed_lines} changed lines", flush=True)
    if importlib.util.find_spec("ruff") is None:
        print("ruff is not installed: the style of the patched files was not checked", flush=True)
        return
    tree.switch(SERIES)
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "--config", str(HERE / "tests" / "ruff.toml")]
    files = map(str, tree.changed_files(SERIES))
    done = subprocess.run([*ruff, *files], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"ruff with Ray's rules:\n{done.stdout}{done.stderr}")
    print(f"{SERIES}: applies, clean by Ray's rules of ruff", flush=True)


@dataclass(frozen=True)
class Outcome:
    """Result of one test."""

    test: str
    how: str
    """"passed", "failed", "error" or "skipped"."""
    reason: str
    """First and last line of the error, or why it was skipped."""


def run_tests(tree: Tree, branch: str, folder: Path, tests: list[str]) -> tuple[list[Outcome], str]:
    """Run tests of a folder on a branch, two files at a time; return the test results and the output of pytest."""
    tree.switch(branch)
    report = tree.folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    if len({test.partition("::")[0] for test in tests}) > 1:
        command += _TWO_FILES_AT_A_TIME
    env = {
        "PYTHONPATH": str(tree.folder / "python"),
        "RAY_TRAIN_V2_ENABLED": "1",
        # Ray gives its workers nice 15: beside anything else they hardly run at all.
        "RAY_worker_niceness": "0",
        # Compile the copy once, not in every process.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{branch}: pytest did not end within {_LIMIT_S} s: {error.output}") from None
    if not report.exists():
        raise CheckError(f"{branch}: pytest did not run:\n{done.stdout}")
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")], done.stdout


def _outcome(case: ElementTree.Element) -> Outcome:
    test = f"{case.get('classname')}::{case.get('name')}"
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            first = (child.get("message") or "").strip().partition("\n")[0]
            # The error of a worker is at the end of Ray's, of which the message has the beginning.
            last = re.findall(r"^E +(\S.*)$", child.text or "", re.MULTILINE)[-1:]
            reason = " ... ".join(dict.fromkeys([first, *last]))
            return Outcome(test, {"failure": "failed"}.get(child.tag, child.tag), reason)
    return Outcome(test, "passed", "")


def expect(tree: Tree, branch: str, folder: Path, tests: list[str], wanted: str) -> bool:
    """Run tests on a branch and print the results; after an unexpected one also print the output of pytest."""
    found, output = run_tests(tree, branch, folder, tests)
    others = [outcome for outcome in found if outcome.how not in (wanted, "skipped")]
    skipped = sum(outcome.how == "skipped" for outcome in found)
    good = len(found) - len(others) - skipped
    if others or not good:
        print(output, flush=True)
    files = ", ".join(dict.fromkeys(Path(test.partition("::")[0]).name for test in tests))
    print(f"{branch}: {good} {wanted}, {skipped} skipped, {len(others)} otherwise, in {files}", flush=True)
    for outcome in found:
        if outcome.how != "passed" or outcome in others:
            print(f"    {outcome.test} {outcome.how}: {outcome.reason[:200]}", flush=True)
    return good > 0 and not others


def check_behaviour(tree: Tree, patches: list[Patch]) -> None:
    """Run all tests where they must fail and where they must pass."""
    folder = tree.folder / TESTS
    shutil.copytree(HERE / "tests", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text(f"[pytest]\ntimeout = {_TEST_LIMIT_S}\n")
    everything = sorted(path.name for path in folder.glob("test_*.py"))
    behaviour = [name for name in everything if name.startswith("test_behaviour_")]
    reproductions = sorted({test for patch in patches for test in patch.reproductions})
    right = [
        expect(tree, STOCK, folder, reproductions, "failed"),
        *(expect(tree, patch.name, folder, patch.reproductions, "passed") for patch in patches),
        expect(tree, STOCK, folder, behaviour, "passed"),
        expect(tree, SERIES, folder, everything, "passed"),
        expect(tree, SERIES, ROOT, [f"tests/ray/{name}" for name in PACKAGE_TESTS], "passed"),
    ]
    if not all(right):
        raise CheckError("not all tests ended as they have to, see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--apply", action="store_true", help="start no Ray")
    options = parser.parse_args()
    patches = [Patch(path) for path in sorted((HERE / "patches").glob("*.patch"))]
    with tempfile.TemporaryDirectory(prefix="ray-patched-", ignore_cleanup_errors=True) as folder:
        try:
            tree = Tree(Path(folder), patches)
            installed = importlib.metadata.version("ray")
            print(f"patches for Ray {RAY}, Ray {installed} is installed", flush=True)
            check_patches(tree, patches)
            if not options.apply:
                check_behaviour(tree, patches)
        except CheckError as error:
            sys.exit(f"upstream/check.py: {error}")


if __name__ == "__main__":
    main()
