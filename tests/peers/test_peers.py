"""torch's and Ray's own tests pass with our backend and config as with stock's; mistakes that would make the sides equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.peers import differences
from tests.peers.runner import HERE, Run, Suite, run, worse
from tests.peers.suites import ALL


@pytest.mark.full
@pytest.mark.timeout(0)  # each of its tests has a limit
@pytest.mark.parametrize("suite", ALL, ids=[suite.name for suite in ALL])
def test_tests_that_pass_on_stock_pass_on_ours(suite: Suite) -> None:
    """Every test of the suite runs on each side; a difference needs a line in differences.py."""
    if suite.missing():
        pytest.skip(suite.missing())
    stock, *others = suite.sides
    runs = {side: run(suite, side) for side in suite.sides}
    if not runs[stock].passed():
        assert set(runs[stock].outcomes.values()) == {"skipped"}, runs[stock].output
        pytest.skip("the suite itself skips all of its tests here; most such need GPUs")
    for side in others:
        found = worse(runs[stock], runs[side])
        unknown = {test: outcome for test, outcome in found.items() if differences.reason(suite.name, test) is None}
        assert unknown == {}, runs[side].output


def test_the_list_of_differences_is_that_of_the_recorded_run() -> None:
    """Each difference has its reason, and no line of the list belongs to a fixed difference."""
    newest = max((HERE.parents[1] / "benchmarks" / "results").glob("peers_*.json"))
    found = [
        (row["suite"], each["test"])
        for row in json.loads(newest.read_text())["rows"]
        for side in row["sides"].values()
        for each in side["differences"]
    ]
    assert [each for each in found if differences.reason(*each) is None] == []
    assert differences.unused(found) == []
    rest = [each for each in found if "ddp_logging" not in each[1]]
    assert [line[:2] for line in differences.unused(rest)] == [("DistributedTest*", "*::test_ddp_logging_data_cpu")]


def test_a_test_that_differs_is_found() -> None:
    """A test that passes on stock's side and fails, is skipped, aborts or is missing on ours is detected."""
    stock = Run(dict.fromkeys(["A::a", "A::b", "A::c", "A::d"], "passed") | {"A::e": "failed: x"}, 1.0, "")
    ours = Run({"A::a": "passed", "A::b": "failed: y", "A::c": "skipped", "A::e": "failed: x"}, 1.0, "")
    assert worse(stock, ours) == {"A::b": "failed: y", "A::c": "skipped", "A::d": "did not run"}


def test_a_side_that_cannot_be_made_is_an_error() -> None:
    """Without our part the process would compare stock with stock."""
    environment = {**os.environ, "PYTHONPATH": str(HERE / "site"), "PEERS_RAY": "ours"}
    environment.pop("RAY_CHECKOUT", None)
    done = subprocess.run([sys.executable, "-c", "print('went on')"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('new_group(backend="gloo")', 'new_group(backend="ipc")'),
        ("init_pg('gloo')", "init_pg('ipc')"),
        ('"cpu:gloo,cuda:nccl"', '"cpu:ipc,cuda:nccl"'),
        ("    x = dist.Backend.GLOO", "    x = dist.Backend.IPC"),
        ("    dist.Backend.GLOO,", "    dist.Backend.GLOO,"),
        ('"cpu:gloo,cuda:gloo"', '"cpu:ipc,cuda:ipc"'),
        ("c10d.ProcessGroupGloo(store, 0, 2)", '__import__("replaced_gloo").group(store, 0, 2)'),
        ("class ProcessGroupGlooTest(Base):", "class ProcessGroupGlooTest(Base):"),
    ],
)
def test_gloo_is_read_as_ipc(source: str, expected: str) -> None:
    """The backend's name is replaced in tests, but not in words, class names or lists of profile entries."""
    script = "import sys, torch_tests; sys.stdout.write(torch_tests.on_ipc(sys.stdin.read().encode()).decode())"
    environment = {**os.environ, "PYTHONPATH": str(HERE / "site")}
    done = subprocess.run(
        [sys.executable, "-c", script], input=source, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == expected
