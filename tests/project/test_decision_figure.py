"""Every row of the decision table decides what it says, and the docs have the table and the picture of the code."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import ROWS, Job, deciding_row
from ray_fracbackend.errors import FracBackendError
from tests.unit.builders import gpu, job, mig, worker

_DOCS = Path(__file__).parents[2] / "docs"


def load_figure():
    spec = importlib.util.spec_from_file_location("decision_figure", _DOCS / "figures" / "decision.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figure = load_figure()
_SHARED, _OWN, _NEW = job(gpu(), gpu()), job(gpu("a"), gpu("b")), (2, 30, 7)
_MULTI_RANK = job(gpu(), gpu(), nccl_version=_NEW)
_SWITCHED = job(gpu(), gpu(), nccl_version=_NEW, env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
_IPC = job(gpu(), gpu(), ipc_device_memory_missing=None)
_CPU, _MISSING = job(None, None), job(gpu(), gpu(), cuda_missing="no driver")
_CPU_IPC = job(None, None, ipc_host_memory_missing=None)
_MISSING_IPC = job(gpu(), gpu(), cuda_missing="no driver", ipc_host_memory_missing=None)
_ON_CPU = {"on_missing_cuda": "cpu"}

# Jobs and settings that each row decides, in the order of the rows: all outcomes that it has.
_EXAMPLES = [
    [(_OWN, {"backend": "ucc"}), (job(None, resources={"TPU": 4}), {})],
    [([worker(0, platform="win32"), worker(1)], {})],
    [(_CPU_IPC, {"backend": "ipc"}), (_CPU, {"backend": "ipc"})],
    [(job(None, nccl_available=True, num_visible_devices=1), {"backend": "nccl"}), (_CPU, {"backend": "nccl"})],
    [(_CPU, {})],
    [(_MISSING, {"backend": "gloo"})],
    [(_MISSING, {}), (_MISSING, {"backend": "ipc"})],
    [(_MISSING_IPC, {"backend": "ipc", **_ON_CPU}), (_MISSING, {"on_shared_device": "ipc", **_ON_CPU})],
    [(_MISSING, _ON_CPU), (_MISSING, {"backend": "nccl", **_ON_CPU})],
    [(job(gpu(compute_mode="prohibited")), {})],
    [(job(gpu(compute_mode="exclusive_process"), gpu(compute_mode="exclusive_process")), {})],
    [(_SHARED, {"on_shared_device": "error"}), (_SHARED, {"on_shared_device": "error", "backend": "gloo"})],
    [(_IPC, {"backend": "ipc"}), (_SHARED, {"backend": "ipc"})],
    [(_SHARED, {"backend": "gloo"}), (_OWN, {"backend": "gloo"})],
    [(_MULTI_RANK, {"on_shared_device": "nccl"}), (_SHARED, {"on_shared_device": "nccl", "backend": "nccl"})],
    [(_SWITCHED, {}), (_SWITCHED, {"on_shared_device": "ipc"})],
    [(_IPC, {"on_shared_device": "ipc"}), (_SHARED, {"on_shared_device": "ipc"})],
    [(_IPC, {})],
    [(_SHARED, {"on_shared_device": "gloo"})],
    [(_SHARED, {}), (_MULTI_RANK, {}), (_IPC, {}), (_SHARED, {"backend": "nccl"})],
    [([_OWN[0], worker(1, gpu("b"), nccl_available=False, nccl_version=None)], {})],
    [([_OWN[0], worker(1, gpu("b"), nccl_version=_NEW)], {})],
    [(job(mig("1"), mig("2"), nccl_version=_NEW), {})],
    [(_OWN, {}), (_OWN, {"backend": "nccl"})],
]
_PROVEN = next(row for row in ROWS if "proven" in row.case)


def outcome(row, workers, settings):
    """What a row makes of a job: a backend, ``error``, or ``ray``."""
    if row.decide is None:
        return "ray"
    try:
        return row.decide(Job(workers, Settings(**settings))).backend
    except FracBackendError:
        return "error"


@pytest.mark.parametrize(
    ("row", "examples"), zip(ROWS, _EXAMPLES, strict=True), ids=[f"{n} {row.case}" for n, row in enumerate(ROWS, 1)]
)
def test_row(row, examples, monkeypatch):
    """The row is the first whose condition holds for its examples, and comes to the outcomes that it names."""
    monkeypatch.setattr("ray_fracbackend.decide.table.AUTO_TAKES_DEVICE_IPC", row is _PROVEN)
    assert [deciding_row(Job(workers, Settings(**settings))) for workers, settings in examples] == [row] * len(examples)
    assert {outcome(row, *example) for example in examples} == set(row.outcomes)


def test_the_docs_have_the_code_s_table_and_picture():
    """Both are as the script makes them; run ``python docs/figures/decision.py``."""
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()
    assert figure.PAGE.read_text(encoding="utf-8") == figure.page()
