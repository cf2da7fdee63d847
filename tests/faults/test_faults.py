"""Failing starts in real runs: the error names the rank, the engine does what stock's would, and nothing is left.

Uses the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both. benchmarks/faults.py runs the whole list.
"""

import json
import os
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from ray_fracbackend._ray import v2_enabled
from tests.faults.cases import Case, cases
from tests.faults.runs import problems, run_cases

pytestmark = pytest.mark.timeout(900)

_ROOT = Path(__file__).parents[2]
_ENGINE = "V2" if v2_enabled() else "V1"
# Enough for a start on a busy machine; a hanging case takes this long.
_TIMEOUT_S = 20.0
_LIMIT_S = 180.0
_FEW = [
    Case("kill"),
    Case("raise"),
    Case("wrong", "verify", backend="ipc"),
    Case("device", "probe"),
    Case("kill", is_lasting=True, controller_failure_limit=1),
    Case("raise", is_lasting=True, max_failures=2),
    Case("raise", ray="state tracking", hook="after_worker_group_abort", is_first=True),
    Case("raise", ray="state tracking", hook="before_worker_group_shutdown"),
    Case("memory", ray="little memory"),
    Case("other version", "probe", ray="other version"),
    Case("node", "verify", ray="two nodes"),
]


def run(cells):
    """Check that all cases end as expected."""
    answers = dict(run_cases(cells, _ENGINE, _TIMEOUT_S, _LIMIT_S))
    found = {case: problems(case, _ENGINE, answer, _TIMEOUT_S) for case, answer in answers.items()}
    assert {case: each for case, each in found.items() if each} == {}


@pytest.mark.full
def test_a_few_faults():
    """One of each kind."""
    run(_FEW)


@pytest.mark.full
def test_random_faults():
    """A sample of the list, selected by the seed in FAULTS_SEED."""
    seed = int(os.environ.get("FAULTS_SEED", "7"))
    run(random.Random(seed).sample([case for case in cases() if case.why_not(_ENGINE) is None], 8))


def test_recorded_run():
    """The newest result for docs/development/faults.md has every case with both engines and no problem."""
    result = max((_ROOT / "benchmarks" / "results").glob("faults_*.json"))
    cells = json.loads(result.read_text())["cells"]
    assert [cell for cell in cells if cell.get("problems")] == []
    for engine in ("V1", "V2"):
        found = [{name: cell[name] for name in asdict(Case(""))} for cell in cells if cell["engine"] == engine]
        assert sorted(map(str, found)) == sorted(str(asdict(case)) for case in cases())
