"""One rank fails in one phase of a real run: the fit ends, the error of a start names the rank, and nothing is left.

Uses the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both. benchmarks/faults.py runs the whole table, with stock Ray and
durations.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from ray_fracbackend._ray import v2_enabled
from tests.faults.planted import Planting
from tests.faults.runs import PHASES, START_PHASES, plantings, problems, run_cells

pytestmark = pytest.mark.timeout(900)

_ROOT = Path(__file__).parents[2]
_ENGINE = "V2" if v2_enabled() else "V1"
# Enough for a start on a busy machine; a hanging cell takes this long.
_TIMEOUT_S = 20.0
_LIMIT_S = 180.0
_KILLED = Planting("ours", "gloo", "rendezvous", "kill")
_FEW = [Planting("ours", "ipc", "verify", "wrong"), _KILLED, Planting("ours", "ipc", "train", "kill")]


def run(cells):
    """Return the user's view of each cell, after checking that all ended as expected."""
    answers = dict(run_cells(cells, _ENGINE, _TIMEOUT_S, _LIMIT_S))
    wrong = {planting: found for planting, answer in answers.items() if (found := problems(planting, answer))}
    assert wrong == {}, [answers[planting] for planting in wrong]
    return answers


@pytest.mark.full
def test_a_few_faults():
    """A wrong result, and a rank killed in training and in the rendezvous, after which V2 restarts the workers."""
    error = run(_FEW)[_KILLED]["error"]
    assert (error and error["cause_class"]) == (None if v2_enabled() else "WorkerDiedError")


@pytest.mark.full
def test_random_faults():
    """A sample of the table, selected by the seed in FAULTS_SEED."""
    seed = int(os.environ.get("FAULTS_SEED", "7"))
    cells = [planting for planting in plantings() if planting.config == "ours"]
    run(random.Random(seed).sample(cells, 8))


def test_recorded_run():
    """In the newest result for docs/development/faults.md every start of ours failed in time, named the rank and left nothing."""
    result = max((_ROOT / "benchmarks" / "results").glob("faults_*.json"))
    cells = [cell for cell in json.loads(result.read_text())["cells"] if cell["config"] == "ours"]
    assert [cell for cell in cells if cell["problems"] and cell["phase"] in START_PHASES] == []
    assert {cell["phase"] for cell in cells} == set(PHASES)
