"""torch's and Ray's own tests pass with our backend and config as with stock's; tests of the runner itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.peers import differences, runner
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


def test_a_test_that_differs_is_found(tmp_path: Path) -> None:
    """A test that passes on stock's side and fails, is skipped, aborts or is missing on ours is detected."""
    stock = Run(dict.fromkeys(["A::a", "A::b", "A::c", "A::d"], "passed") | {"A::e": "failed: x"}, 1.0, "")
    ours = Run({"A::a": "passed", "A::b": "failed: y", "A::c": "skipped", "A::e": "failed: x"}, 1.0, "")
    assert worse(stock, ours) == {"A::b": "failed: y", "A::c": "skipped", "A::d": "did not run"}


SOURCE = """
import multiprocessing, os, time, unittest
class Test(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.assertEqual(1, 2)
    @unittest.skip("why")
    def test_left_out(self): pass
    def test_that_leaves_a_process(self):
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        process.start()
        with open(os.environ["PID_FILE"], "w") as file:
            file.write(str(process.pid))
    def test_side(self): assert os.environ["SIDE"] == "ours"
"""


def test_outcomes_of_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner reads passed, failed and skipped tests, with the side's variables set, and ends processes that are left."""
    (tmp_path / "test_it.py").write_text(SOURCE)
    monkeypatch.setenv("SOME_CHECKOUT", str(tmp_path))
    monkeypatch.setattr(runner, "_END_S", 1)  # pytest would wait for the process
    side = {"SIDE": "ours", "PID_FILE": str(tmp_path / "pid")}
    suite = Suite("it", "torch", ("gone.py", "test_it.py"), "SOME_CHECKOUT", {"ours": side})
    outcomes = run(suite, "ours").outcomes
    assert outcomes.pop("Test::test_bad").startswith("failed: ")
    assert outcomes.pop("Test::test_left_out") == "skipped"
    assert outcomes == dict.fromkeys([f"Test::test_{n}" for n in ("good", "side", "that_leaves_a_process")], "passed")
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int((tmp_path / "pid").read_text()))
        assert left.status() == psutil.STATUS_ZOMBIE or left.wait(10) is None


def test_a_suite_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise two sides without tests would be equal."""
    (tmp_path / "test_it.py").write_text("import nowhere")
    monkeypatch.setenv("SOME_CHECKOUT", str(tmp_path))
    with pytest.raises(RuntimeError, match="No module named 'nowhere'"):
        run(Suite("it", "torch", "test_it.py", "SOME_CHECKOUT", {"ours": {}}), "ours")


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
