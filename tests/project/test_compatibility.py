"""The version matrix: its table is that of the recorded runs."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "ci"))

import compatibility
import matrix

PASSED = {
    "python": "3.11",
    "torch_asked": "2.13.0",
    "torch": "2.13.0+cpu",
    "cuda": None,
    "nccl": None,
    "ray": "2.60.0",
    "result": "passed",
    "v1": "passed",
    "v2": "passed",
    "date": "2026-01-02",
    "system": "Linux x86_64",
}


def row_of(cells, python="3.11", torch="2.13.0"):
    """Return the columns of one Python and torch."""
    lines = compatibility.table(cells).splitlines()
    return next(line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {python} | {torch}"))


def test_the_table_is_that_of_the_runs():
    """docs/compatibility.md contains the table of ci/matrix_results.jsonl; after a run: python3 ci/compatibility.py."""
    text = compatibility.PAGE.read_text()
    assert compatibility.page(text, matrix.read()) == text


def test_content_of_a_cell():
    """Passing engines, failures, wheels that do not exist, and cells that did not run."""
    failed = {**PASSED, "ray": "2.40.0", "result": "failed", "v1": "failed: test_gpu_script"}
    del failed["v2"]
    missing = {**PASSED, "ray": "2.44.1", "result": "not installable", "reason": "no wheel of ray==2.44.1"}
    cells = [PASSED, failed, missing]
    assert row_of(cells) == [
        *("3.11", "2.13.0+cpu", "neither"),
        *("failed (1)", "no wheel", "not run", "not run", "not run", "V1, V2"),
    ]
    assert "\n1. V1 failed: test_gpu_script" in compatibility.table(cells)
    assert "Not run: Python 3.10 with torch 2.4.1; " in compatibility.table(cells)


def test_full_build():
    """A torch with CUDA and NCCL is listed with both versions."""
    assert row_of([{**PASSED, "cuda": "13.0", "nccl": "2.30.7"}])[2] == "CUDA 13.0, NCCL 2.30.7"


def test_record(tmp_path, monkeypatch):
    """A repeated cell replaces its line; lines are in order of versions."""
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.jsonl")
    for ray in ("2.60.0", "2.9.0", "2.60.0"):
        matrix.record({**PASSED, "ray": ray})
    assert [cell["ray"] for cell in matrix.read()] == ["2.9.0", "2.60.0"]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("ERROR: No matching distribution found for ray==2.40.0\n", "no wheel of ray==2.40.0"),
        ("The conflict is caused by:\n    a 1 depends on b<2\n    c 3 depends on b>2\n\nTo", "conflict: a 1 depends"),
        ("ERROR: Could not install packages due to an OSError", None),
    ],
)
def test_why_not_installed(told, reason):
    """A wheel that does not exist is distinguished from a failed installation."""
    found = matrix.why_not_installed(told)
    assert found is None if reason is None else found.startswith(reason)


def test_the_smoke_tests_exist():
    """The named tests exist, and the Ray of CI's second environment is the lowest supported one."""
    source = (matrix.ROOT / matrix.SMOKE[0].split("::")[0]).read_text()
    assert all(f"def {test.split('::')[1]}(" in source for test in matrix.SMOKE)
    assert f'"ray[train]>={matrix.RAYS[0].removesuffix(".0")}"' in (matrix.ROOT / "pyproject.toml").read_text()
