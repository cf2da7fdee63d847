"""The picture of the decision says what the table and the code say."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.options import StartOptions
from ray_fracbackend.plan import left_to_ray, plan_start
from tests.unit.builders import gpu, job, worker

_DOCS = Path(__file__).parents[2] / "docs"


def load_figure():
    spec = importlib.util.spec_from_file_location("decision_figure", _DOCS / "figures" / "decision.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figure = load_figure()
_OUTCOMES = [(step.question, outcome) for step in figure.STEPS for outcome in step.outcomes]
_SHARED, _OWN, _NEW = job(gpu(), gpu()), job(gpu("a"), gpu("b")), (2, 30, 7)
_MULTI_RANK = job(gpu(), gpu(), nccl_version=_NEW)
_SWITCHED = job(gpu(), gpu(), nccl_version=_NEW, env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
_IPC = job(gpu(), gpu(), ipc_device_memory_missing=None)

# Jobs and settings that end in each outcome of the picture, in its order: all results that it has.
_EXAMPLES = [
    [(_OWN, {"backend": "ucc"})],
    [([worker(0, platform="win32"), worker(1)], {})],
    [(job(None, None), {})],
    [(job(gpu(), gpu(), cuda_missing="no driver"), {"on_missing_cuda": choice}) for choice in ("error", "cpu")],
    [(job(gpu(compute_mode="exclusive_process"), gpu(compute_mode="exclusive_process")), {})],
    [(_SHARED, {"on_shared_device": "error"})],
    [(_SHARED, {"on_shared_device": "gloo"})],
    [*((workers, {"on_shared_device": "nccl"}) for workers in (_SHARED, _MULTI_RANK)), (_SWITCHED, {})],
    [(workers, {"on_shared_device": "ipc"}) for workers in (_SHARED, _IPC)],
    [(workers, {}) for workers in (_SHARED, _MULTI_RANK, _IPC)],
    [
        (_SHARED, {"backend": "nccl"}),
        (_SHARED, {"backend": "nccl", "on_shared_device": "error"}),
        (_MULTI_RANK, {"backend": "nccl", "on_shared_device": "nccl"}),
        (_IPC, {"backend": "nccl", "on_shared_device": "ipc"}),
    ],
    [([_OWN[0], worker(1, gpu("b"), nccl_available=False, nccl_version=None)], {})],
    [([_OWN[0], worker(1, gpu("b"), nccl_version=_NEW)], {})],
    [(_OWN, {})],
]


def result_of(workers, settings):
    """What the code makes of a job: a backend, ``error``, or ``ray``."""
    options = StartOptions(**settings)
    if left_to_ray(options.backend, workers[0].resources):
        return "ray"
    try:
        return plan_start(workers, options).backend
    except FracBackendError:
        return "error"


@pytest.mark.parametrize(
    ("outcome", "examples"),
    [(outcome, examples) for (_, outcome), examples in zip(_OUTCOMES, _EXAMPLES, strict=True)],
    ids=[f"row {outcome.row}: {question}".replace("\n", " ") for question, outcome in _OUTCOMES],
)
def test_outcome(outcome, examples):
    """The code ends in the results that the picture gives for the row, and the row's text names each of them."""
    assert {result_of(*example) for example in examples} == set(outcome.results)
    words = outcome.text.replace("as above", " ".join(outcome.results))
    assert all(result.casefold() in words.casefold() for result in outcome.results)


def test_rows_of_the_table():
    """Every row of the table is in the picture, and no other."""
    table = re.findall(r"^\| (\d+) \|", (_DOCS / "how-it-decides.md").read_text(), flags=re.MULTILINE)
    assert {outcome.row for _, outcome in _OUTCOMES} == {int(row) for row in table} == set(range(1, 13))


def test_picture_is_up_to_date():
    """The committed picture is the one that the script makes; run ``python docs/figures/decision.py``."""
    assert figure.TARGET.read_text() == figure.svg()
