"""Apply the patches to a copy of the installed Ray, and run their tests on stock Ray and on the patched one.

    python upstream/check.py            in minutes
    python upstream/check.py --apply    only whether each patch and the whole series apply, in seconds; starts no Ray

What holds of each patch: it applies alone, and with all others; it changes less than 80 lines; ruff finds nothing with
Ray's rules; its reproductions, the `Reproduced-by` lines of its message, fail on stock Ray and pass with it alone. The
other tests of upstream/tests pass on stock Ray and with the whole series. Ends with 1 and what does not hold otherwise.
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
TESTS = "python/ray/train/v2/tests"
MAX_CHANGED_LINES = 80
STOCK, SERIES = "stock", "series"
# Seconds for one call of pytest.
_LIMIT_S = 900
_GIT_ENV = {
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "check"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "check@localhost"),
    # The user's hooks, signatures and line ends are none of this.
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
}


class CheckError(Exception):
    """What does not hold, in words."""


@dataclass(frozen=True)
class Patch:
    """One file of upstream/patches."""

    path: Path

    @property
    def name(self) -> str:
        """File name without its suffix; the branch of the tree that has this patch alone."""
        return self.path.stem

    @property
    def reproductions(self) -> list[str]:
        """Tests that fail without the patch, as pytest knows them in the folder of the tests."""
        return re.findall(rf"^Reproduced-by: {TESTS}/(\S+)$", self.path.read_text(), re.MULTILINE)

    @property
    def num_changed_lines(self) -> int:
        """Lines that it adds, and those that it removes."""
        return len(re.findall(r"^(?:\+(?!\+\+ )|-(?!--(?: |$)))", self.path.read_text(), re.MULTILINE))


class Tree:
    """A copy of the Python files of the installed Ray in a git repository, with a branch for each patch.

    Whatever is not Python is a link to the installed Ray, whose processes therefore start from the copy.
    """

    def __init__(self, folder: Path, patches: list[Patch]) -> None:
        self.folder = folder
        self._patches = patches
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
        """Turn the copy into stock Ray, into Ray with one patch, or with all."""
        self._git("checkout", "--quiet", branch)
        # Compiled modules are compared by seconds and size only.
        for name in self._git("diff", "--name-only", STOCK, SERIES).split():
            shutil.rmtree((self.folder / name).parent / "__pycache__", ignore_errors=True)

    def changed_files(self, branch: str) -> list[Path]:
        """Files that differ from those of stock Ray."""
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
    """Size and style, without Ray."""
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
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "--config", str(HERE / "ruff.toml")]
    done = subprocess.run(
        [*ruff, *map(str, tree.changed_files(SERIES))], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckError(f"ruff with Ray's rules:\n{done.stdout}{done.stderr}")
    print(f"{SERIES}: applies, clean by Ray's rules of ruff", flush=True)


def outcomes(tree: Tree, branch: str, tests: list[str]) -> tuple[dict[str, str], str]:
    """Run tests on a branch: "passed", "failed", "error" or "skipped" by test, and what pytest printed."""
    tree.switch(branch)
    folder = tree.folder / TESTS
    shutil.copytree(HERE / "tests", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = tree.folder / "report.xml"
    report.unlink(missing_ok=True)
    env = {
        **os.environ,
        "PYTHONPATH": str(tree.folder / "python"),
        "RAY_TRAIN_V2_ENABLED": "1",
        # Ray gives its workers nice 15, and beside anything else they hardly run at all.
        "RAY_worker_niceness": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--junitxml={report}", *tests],
            cwd=folder,
            env=env,
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
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ended = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found[name] = {"failure": "failed"}.get(ended[0], ended[0]) if ended else "passed"
    return found, done.stdout


def expect(tree: Tree, branch: str, tests: list[str], wanted: str, what: str) -> bool:
    """Run tests on a branch, print one line, and all that pytest printed where a test ended otherwise than wanted."""
    found, output = outcomes(tree, branch, tests)
    good = sum(outcome == wanted for outcome in found.values())
    skipped = sum(outcome == "skipped" for outcome in found.values())
    others = {test: outcome for test, outcome in found.items() if outcome not in (wanted, "skipped")}
    right = not others and good > 0
    print(f"{branch}: {what}: {good} {wanted}, {skipped} skipped, {len(others)} otherwise", flush=True)
    if not right:
        print(output, flush=True)
        print("\n".join(f"{branch}: {test} {outcome}, not {wanted}" for test, outcome in others.items()), flush=True)
    return right


def check_behaviour(tree: Tree, patches: list[Patch]) -> None:
    """All tests, each where it has to fail and where it has to pass."""
    behaviour = sorted(path.name for path in (HERE / "tests").glob("test_behaviour_*.py"))
    own = sorted({path.name for path in (HERE / "tests").glob("test_*.py")} - set(behaviour))
    reproductions = sorted({test for patch in patches for test in patch.reproductions})
    right = [
        expect(tree, STOCK, reproductions, "failed", "reproductions"),
        *(expect(tree, patch.name, patch.reproductions, "passed", "reproductions") for patch in patches),
        expect(tree, STOCK, behaviour, "passed", "behaviour"),
        expect(tree, SERIES, behaviour, "passed", "behaviour"),
        expect(tree, SERIES, own, "passed", "tests of the patches"),
    ]
    if not all(right):
        raise CheckError("not all tests ended as they have to, see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--apply", action="store_true", help="start no Ray")
    options = parser.parse_args()
    patches = [Patch(path) for path in sorted((HERE / "patches").glob("*.patch"))]
    with tempfile.TemporaryDirectory(prefix="ray-patched-") as folder:
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
