"""Tests on Windows and under Wine: the list, its counts, and the tables of results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import windows  # noqa: E402
import wine  # noqa: E402
import wine_setup  # noqa: E402

_REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_plan.TestRows" name="a" time="1.5"/>
<testcase classname="tests.unit.test_plan" name="b" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.unit.test_plan" name="c" time="0"><error message="no"/></testcase>
<testcase classname="" name="tests.unit.test_b" time="0"><error message="collection failure"/></testcase>
<testcase classname="tests.net.test_a" name="d" time="0"><skipped message="linux: needs network namespaces"/></testcase>
<testcase classname="tests.net.test_a" name="e" time="0"><skipped message="no rllib here"/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_by_folder(tmp_path: Path) -> None:
    """Failures are counted, and skipped tests are counted by their reason."""
    path = tmp_path / "report.xml"
    path.write_text(_REPORT)
    counts: dict[str, windows.Counts] = {}
    for folder, found in windows.count(path):
        windows.added(counts, folder, found)
    assert counts == {
        "tests/unit": windows.Counts(passed=1, failed=3, seconds=2.0),
        "tests/net": windows.Counts(linux=1, skipped=1, reasons=["no rllib here"]),
    }
    assert "| `tests/unit` | 1 | 3 | 0 | 0 | 2 |" in windows.table(counts)


@pytest.mark.parametrize(
    ("torch", "has_gloo"), [("2.7.1+cpu", True), ("2.8.0", False), ("2.10.0+cu128", False), ("2.11.0", True)]
)
def test_steps_fit_the_torch(torch: str, has_gloo: bool) -> None:
    """With a torch without Gloo the error is tested instead of starts."""
    names = {step.name for step in windows.chosen([], torch)}
    assert ("smoke" in names, "smoke-without-gloo" in names) == (has_gloo, not has_gloo)
    assert {"imports", "facts"} <= names


def test_steps_by_name() -> None:
    """Steps run in the list's order; an unknown name ends with the valid names."""
    assert [step.name for step in windows.chosen(["demo", "unit"], "2.13.0")] == ["unit", "demo"]
    with pytest.raises(SystemExit, match="no step nothing; there are imports, unit"):
        windows.chosen(["nothing"], "2.13.0")


def test_every_path_of_the_list_exists() -> None:
    """A moved test file would be a failed step only on Windows."""
    paths = [word for step in windows.STEPS for word in step.command if "/" in word]
    assert [path for path in paths if not (_ROOT / path).exists()] == []


def test_the_windows_jobs_run_the_list() -> None:
    """CI's Windows machines and Wine use the same list."""
    workflow = (_ROOT / ".github" / "workflows" / "versions.yml").read_text()
    assert re.search(r"windows'\)\n\s+run: python ci/windows\.py --results windows\.json\n", workflow)
    assert r"ci\windows.py" in (_ROOT / "ci" / "wine.py").read_text()


def test_packages_under_wine_are_pinned() -> None:
    """A run uses the same versions on another day."""
    lines = wine_setup.REQUIREMENTS.read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+|#.*", line)] == []


@pytest.mark.parametrize(
    ("release", "machine", "expected"),
    [
        ({"ID": "debian", "VERSION_ID": "13", "PRETTY_NAME": "Debian 13"}, "x86_64", "this is Debian 13 on x86_64"),
        ({"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian 12"}, "aarch64", "this is Debian 12 on aarch64"),
    ],
)
def test_machines_that_cannot(
    release: dict[str, str], machine: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another system is refused before anything is installed."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(wine_setup.platform, "freedesktop_os_release", lambda: release)
    monkeypatch.setattr(wine_setup.platform, "machine", lambda: machine)
    assert expected in str(wine_setup.why_not())


def test_the_page_has_the_recorded_table() -> None:
    """docs/development/windows-runs.md shows the runs of ci/wine_results.jsonl, in which all passed."""
    cells = wine.read()
    assert wine.table(cells) in wine.PAGE.read_text(encoding="utf-8")
    assert [wine.key_of(cell) for cell in cells] == list(wine.CELLS)
    assert {step["result"] for cell in cells for step in cell["steps"].values()} == {"passed"}
