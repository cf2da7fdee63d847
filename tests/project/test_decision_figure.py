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
_IPC = job(gpu(), gpu(), ipc_device_memory_missing=None, ipc_host_memory_missing=None)
_STAGED = "cpu:gloo,cuda:staged"
_WINDOWS = job(gpu(), gpu(), platform="win32", nccl_available=False, nccl_version=None)
_OWN_ON_WINDOWS = job(gpu("a"), gpu("b"), platform="win32", nccl_available=False, nccl_version=None)
_CPU, _MISSING = job(None, None), job(gpu(), gpu(), cuda_missing="no driver")
_CPU_IPC = job(None, None, ipc_host_memory_missing=None)
_MISSING_IPC = job(gpu(), gpu(), cuda_missing="no driver", ipc_host_memory_missing=None)
_ON_CPU = {"on_missing_cuda": "cpu"}

# Jobs and settings that each row decides, by the row's name and in the order of the rows, and what each comes to.
_EXAMPLES = {
    "left to Ray": [(_OWN, {"backend": "ucc"}, "ray"), (job(None, resources={"TPU": 4}), {}, "ray")],
    "_mixed_systems": [([worker(0, platform="win32"), worker(1)], {}, "error")],
    "_ipc_without_gpus": [(_CPU_IPC, {"backend": "ipc"}, "ipc"), (_CPU, {"backend": "ipc"}, "error")],
    "_nccl_without_gpus": [
        (job(None, nccl_available=True, num_visible_devices=1), {"backend": "nccl"}, "nccl"),
        (_CPU, {"backend": "nccl"}, "error"),
    ],
    "_gloo_without_gpus": [(_CPU, {}, "gloo"), (_CPU, {"backend": "staged"}, "staged")],
    "_asked_without_cuda": [(_MISSING, {"backend": "gloo"}, "gloo")],
    "_error_without_cuda": [(_MISSING, asked, "error") for asked in ({}, {"backend": "ipc"}, {"backend": "staged"})],
    "_cpu_with_ipc": [
        (_MISSING_IPC, {"backend": "ipc", **_ON_CPU}, "ipc"),
        (_MISSING, {"on_shared_device": "ipc", **_ON_CPU}, "error"),
    ],
    "_cpu_with_gloo": [(_MISSING, _ON_CPU, "gloo"), (_MISSING, {"backend": "nccl", **_ON_CPU}, "gloo")],
    "_prohibited": [(job(gpu(compute_mode="prohibited")), {}, "error")],
    "_exclusive": [(job(gpu(compute_mode="exclusive_process"), gpu(compute_mode="exclusive_process")), {}, "error")],
    "_shared_error": [
        (_SHARED, {"on_shared_device": "error"}, "error"),
        (_SHARED, {"on_shared_device": "error", "backend": "gloo"}, "error"),
    ],
    "_ipc_asked": [(_IPC, {"backend": "ipc"}, "ipc"), (_SHARED, {"backend": "ipc"}, "error")],
    "_staged_asked": [
        (_SHARED, {"backend": "staged"}, "staged"),
        (_OWN, {"backend": _STAGED}, _STAGED),
        (job(gpu(), gpu(), staged_missing="no"), {"backend": "staged"}, "error"),
    ],
    "_asked_on_devices": [
        (_WINDOWS, {"backend": "gloo"}, "gloo"),
        (_SHARED, {"backend": "gloo"}, "gloo"),
        (_OWN, {"backend": "gloo"}, "gloo"),
    ],
    "_shared_nccl": [
        (_MULTI_RANK, {"on_shared_device": "nccl"}, "nccl"),
        (_SHARED, {"on_shared_device": "nccl", "backend": "nccl"}, "error"),
    ],
    "_shared_nccl_by_user": [(_SWITCHED, {}, "nccl"), (_SWITCHED, {"on_shared_device": "ipc"}, "nccl")],
    "_shared_ipc": [
        (_IPC, {"on_shared_device": "ipc"}, "ipc"),
        (_SHARED, {"on_shared_device": "ipc"}, "error"),
    ],
    "_shared_ipc_by_auto": [(_IPC, {}, "ipc")],
    "_shared_staged": [(_SHARED, {"on_shared_device": "staged"}, _STAGED)],
    "_shared_staged_by_auto": [(_SHARED, {}, _STAGED)],
    "_shared_gloo": [
        (_SHARED, {"on_shared_device": "gloo"}, "gloo"),
        (_WINDOWS, {"on_shared_device": "gloo"}, _STAGED),
    ],
    "_shared_auto": [(workers, {}, "gloo") for workers in (_SHARED, _MULTI_RANK, _IPC)]
    + [(_SHARED, {"backend": "nccl"}, "gloo"), (_WINDOWS, {}, _STAGED)],
    "_own_without_nccl": [
        ([_OWN[0], worker(1, gpu("b"), nccl_available=False, nccl_version=None)], {}, "gloo"),
        (_OWN_ON_WINDOWS, {}, _STAGED),
    ],
    "_mixed_nccl": [([_OWN[0], worker(1, gpu("b"), nccl_version=_NEW)], {}, "error")],
    "_own_slices": [(job(mig("1"), mig("2"), nccl_version=_NEW), {}, "nccl")],
    "_own_nccl": [(_OWN, {}, "nccl"), (_OWN, {"backend": "nccl"}, "nccl")],
}


def outcome(row, workers, settings):
    """What a row makes of a job: a backend, ``error``, or ``ray``."""
    if row.decide is None:
        return "ray"
    try:
        return row.decide(Job(workers, Settings(**settings))).backend
    except FracBackendError:
        return "error"


def test_every_row_has_an_example():
    """In the order of the rows."""
    assert [row.decide.__name__ if row.decide else "left to Ray" for row in ROWS] == list(_EXAMPLES)


@pytest.mark.parametrize(("row", "name"), zip(ROWS, _EXAMPLES, strict=True), ids=list(_EXAMPLES))
def test_row(row, name, monkeypatch):
    """The row is the first whose condition holds for its examples, and comes to what they say, which its result names."""
    monkeypatch.setattr("ray_fracbackend.decide.table.AUTO_TAKES_DEVICE_IPC", name == "_shared_ipc_by_auto")
    monkeypatch.setattr("ray_fracbackend.decide.table.AUTO_TAKES_STAGED", name == "_shared_staged_by_auto")
    for workers, settings, expected in _EXAMPLES[name]:
        assert deciding_row(Job(workers, Settings(**settings))) is row
        assert outcome(row, workers, settings) == expected
        named = "staged" if expected == _STAGED else expected
        assert named in row.result.casefold() or "as asked for" in row.result


def test_the_docs_have_the_code_s_table_and_picture():
    """Both are as the script makes them; run ``python docs/figures/decision.py``."""
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.svg()
    assert figure.PAGE.read_text(encoding="utf-8") == figure.page()
