"""Every row of the decision table decides as described, and the docs contain the code's table and figure."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import ROWS, decide_start, deciding_row
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
_IPC = job(gpu(), gpu(), ipc_device_memory_missing=None, ipc_host_memory_missing=None)
_STAGED = "cpu:gloo,cuda:staged"
_WINDOWS = job(gpu(), gpu(), platform="win32", nccl_available=False, nccl_version=None)
_OWN_ON_WINDOWS = job(gpu("a"), gpu("b"), platform="win32", nccl_available=False, nccl_version=None)
_CPU, _MISSING = job(None, None), job(gpu(), gpu(), cuda_missing="no driver")
_CPU_IPC = job(None, None, ipc_host_memory_missing=None)
_MISSING_IPC = job(gpu(), gpu(), cuda_missing="no driver", ipc_host_memory_missing=None)
_ON_CPU = {"on_missing_cuda": "cpu"}

# Jobs and settings that each row decides, by the row's name and in the order of the rows, with their results.
_EXAMPLES = {
    "mixed systems": [([worker(0, platform="win32"), worker(1)], {}, "error")],
    "NCCL without GPUs": [(_CPU, {"backend": "nccl"}, "error")],
    "missing CUDA": [(_MISSING, asked, "error") for asked in ({}, {"backend": "ipc"}, {"backend": "staged"})],
    "compute mode": [
        (job(gpu(compute_mode="prohibited")), {}, "error"),
        (job(gpu(compute_mode="exclusive_process"), gpu(compute_mode="exclusive_process")), {}, "error"),
    ],
    "sharing forbidden": [
        (_SHARED, {"on_shared_device": "error"}, "error"),
        (_SHARED, {"on_shared_device": "error", "backend": "gloo"}, "error"),
    ],
    "mixed NCCL versions": [([_OWN[0], worker(1, gpu("b"), nccl_version=_NEW)], {}, "error")],
    "no GPUs": [
        (_CPU, {}, "gloo"),
        (_CPU, {"backend": "staged"}, "staged"),
        (_CPU_IPC, {"backend": "ipc"}, "ipc"),
        (_CPU, {"backend": "ipc"}, "error"),
        (job(None, nccl_available=True, num_visible_devices=1), {"backend": "nccl"}, "nccl"),
    ],
    "gloo without CUDA": [(_MISSING, {"backend": "gloo"}, "gloo")],
    "training on the CPU": [
        (_MISSING, _ON_CPU, "gloo"),
        (_MISSING, {"backend": "nccl", **_ON_CPU}, "gloo"),
        (_MISSING_IPC, {"backend": "ipc", **_ON_CPU}, "ipc"),
        (_MISSING, {"on_shared_device": "ipc", **_ON_CPU}, "error"),
    ],
    "several ranks per GPU": [
        (_MULTI_RANK, {"on_shared_device": "nccl"}, "nccl"),
        (_SHARED, {"on_shared_device": "nccl", "backend": "nccl"}, "error"),
        (_SWITCHED, {}, "nccl"),
        (_SWITCHED, {"on_shared_device": "ipc"}, "nccl"),
    ],
    "ipc": [
        (_IPC, {"backend": "ipc"}, "ipc"),
        (_SHARED, {"backend": "ipc"}, "error"),
        (_IPC, {"on_shared_device": "ipc"}, "ipc"),
        (_SHARED, {"on_shared_device": "ipc"}, "error"),
    ],
    "staged": [
        (_SHARED, {"backend": "staged"}, "staged"),
        (_OWN, {"backend": _STAGED}, _STAGED),
        (job(gpu(), gpu(), staged_missing="no"), {"backend": "staged"}, "error"),
        (_SHARED, {"on_shared_device": "staged"}, _STAGED),
    ],
    "gloo": [
        (_WINDOWS, {"backend": "gloo"}, "gloo"),
        (_SHARED, {"backend": "gloo"}, "gloo"),
        (_OWN, {"backend": "gloo"}, "gloo"),
        (_SHARED, {"on_shared_device": "gloo"}, "gloo"),
        (_WINDOWS, {"on_shared_device": "gloo"}, _STAGED),
    ],
    "shared": [(workers, {}, "gloo") for workers in (_SHARED, _MULTI_RANK, _IPC)]
    + [(_SHARED, {"backend": "nccl"}, "gloo"), (_WINDOWS, {}, _STAGED)],
    "no NCCL": [
        ([_OWN[0], worker(1, gpu("b"), nccl_available=False, nccl_version=None)], {}, "gloo"),
        (_OWN_ON_WINDOWS, {}, _STAGED),
    ],
    "own devices": [
        (_OWN, {}, "nccl"),
        (_OWN, {"backend": "nccl"}, "nccl"),
        (job(mig("1"), mig("2"), nccl_version=_NEW), {}, "nccl"),
    ],
}


def outcome(workers, settings):
    """Return the result of a job: a backend, or ``error``."""
    try:
        return decide_start(workers, Settings(**settings)).backend
    except FracBackendError:
        return "error"


def test_every_row_has_an_example():
    """The examples are in the order of the rows."""
    assert [row.name for row in ROWS] == list(_EXAMPLES)


@pytest.mark.parametrize(("row", "name"), zip(ROWS, _EXAMPLES, strict=True), ids=list(_EXAMPLES))
def test_row(row, name):
    """The row is the first whose condition is true for its examples, and its result names theirs."""
    for workers, settings, expected in _EXAMPLES[name]:
        assert deciding_row(Job(workers, Settings(**settings))) is row
        assert outcome(workers, settings) == expected
        named = "staged" if expected == _STAGED else expected
        assert named in row.result.casefold() or "as requested" in row.result


@pytest.mark.parametrize(("workers", "settings"), [(_OWN, {"backend": "ucc"}), (job(None, resources={"TPU": 4}), {})])
def test_left_to_ray(workers, settings):
    """The row before all others, which is checked before the workers are called."""
    assert left_to_ray(Settings(**settings).backend, workers[0].resources) is not None


def test_the_docs_have_the_code_s_table_and_picture():
    """Both are as the script generates them; run ``python docs/figures/decision.py``."""
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()
    assert figure.PAGE.read_text(encoding="utf-8") == figure.page()
