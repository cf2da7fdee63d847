"""The fallback of a plan after the first choice has failed on real workers."""

from __future__ import annotations

import re
import sys
from dataclasses import fields

import pytest
import ray

from ray_fracbackend import SharedDeviceError, get_start_report
from ray_fracbackend.decide.device_sharing import shared_devices
from ray_fracbackend.decide.plan import FallBack
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.ipc._torch import HAS_PYTHON_GROUPS
from tests.processes import free_port
from tests.ray.starts import START_S, group_state, replace_in_worker, start
from tests.unit.builders import gpu, job
from tests.unit.test_error_texts import DUPLICATE, torch_text

# On Windows Gloo does not notice that a peer has left its group: rank 1 waits for half of the time.
_BUDGET = {"start_timeout_s": 24} if sys.platform == "win32" else {}


@pytest.mark.parametrize("fixed_port", [False, pytest.param(True, marks=pytest.mark.full)])
def test_second_choice_after_a_failed_verification(pair, monkeypatch, first_choice, fixed_port):
    """The first backend fails its verification, then the fallback is started, verified and reported, also on the same port."""
    first_choice()
    pair.execute_single(0, replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 1)
    pair.execute_single(0, replace_in_worker, "ray_fracbackend.worker.process_group", "_check_network", "nap", 1)
    seconds = []
    monkeypatch.setattr(
        "ray_fracbackend.start.backend.save_report", lambda group, report: seconds.append(report["seconds"]["start"])
    )
    start(pair, **_BUDGET, **({"master_port": free_port()} if fixed_port else {}))
    report = pair.execute(get_start_report)[1]
    assert report.backend == "gloo"
    assert "cpu:gloo failed its verification, fell back to gloo" in report.warnings[0]
    assert report.verification is not None
    assert seconds[0] > 3  # the first one's nap


def test_workers_are_probed_once(pair, monkeypatch, first_choice):
    """Two calls of each; for the fallback rank 0 opens another store. No worker is probed again or receives the other workers' reports."""
    first_choice()
    pair.execute_single(0, replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 1)
    sent, execute = [], pair.execute_single_async

    def recorded(rank, function, *arguments):
        sent.append((function.__name__, rank, arguments))
        return execute(rank, function, *arguments)

    monkeypatch.setattr(pair, "execute_single_async", recorded)
    for other in ("execute", "execute_async", "execute_single"):
        monkeypatch.setattr(pair, other, None)
    start(pair, **_BUDGET)
    assert [(name, rank) for name, rank, _ in sent] == [
        *(("probe_worker", rank) for rank in range(2)),
        *(("start_worker", rank) for rank in range(2)),
        ("hold_store", 0),
        *(("start_worker", rank) for rank in range(2)),
    ]
    plans, reports = zip(*(arguments for name, _, arguments in sent if name == "start_worker"), strict=True)
    assert {type(reference) for report in reports for reference in report} == {ray.ObjectRef}
    assert plans[0].master_port != plans[-1].master_port
    fields_of = (getattr(plan, field.name) for plan in plans for field in fields(plan))
    assert not [value for value in fields_of if isinstance(value, WorkerInfo)]


@pytest.mark.skipif(not HAS_PYTHON_GROUPS, reason="needs a torch with process groups written in Python: 2.7")
def test_second_choice_after_a_stall(pair, first_choice, caplog):
    """A first choice that hangs in its first collective, and that only an abort ends, is abandoned in time and reported once."""
    first_choice("stall")
    pair.execute(register_stalling)
    with caplog.at_level("WARNING", logger="ray.train"):
        start(pair, start_timeout_s=12)
    assert {state["backend"] for state in pair.execute(group_state)} == {"gloo"}
    told = [record.getMessage() for record in caplog.records if "fell back to gloo" in record.getMessage()]
    assert len(told) == 1
    assert re.search(r"stall failed its verification, fell back to gloo, .*barrier failed on rank", told[0])


@pytest.mark.full
def test_second_choice_after_no_answer(pair, first_choice):
    """A rank that does not answer within the first choice's quarter of the time leaves the rest to the fallback."""
    first_choice()
    pair.execute_single(0, replace_in_worker, "ray_fracbackend.worker.process_group", "_check_network", "nap 15", 1)
    start(pair, start_timeout_s=22)
    assert {state["backend"] for state in pair.execute(group_state)} == {"gloo"}


def test_gloo_after_a_refusal_of_nccl(pair, first_choice):
    """NCCL's duplicate-GPU error is reported with the ranks, and a plan with a fallback uses it."""
    first_choice("nccl", share_groups=shared_devices(job(gpu(), gpu())))
    pair.execute(refuse_once, torch_text(DUPLICATE))
    start(pair)
    report = pair.execute(get_start_report)[1]
    assert report.backend == "gloo"
    assert re.search(
        r"NCCL refused the ranks, fell back to gloo, .*ranks 0,1 share GPU-a .*Duplicate GPU detected",
        report.warnings[0],
    )


def test_refusal_of_nccl_without_a_fallback(pair, first_choice):
    """An explicit NCCL ends in one error that names the ranks and the advice."""
    never = {"fallback": None, "falls_back": FallBack.NEVER}
    first_choice("nccl", share_groups=shared_devices(job(gpu(), gpu())), **never)
    pair.execute(refuse_once, torch_text())
    with pytest.raises(SharedDeviceError, match=r"ranks 0,1 share .*\(ncclInvalidUsage\)\. .*gloo"):
        start(pair, start_timeout_s=START_S)


def register_stalling():
    """Register a backend whose calls and shutdown end only by its abort, like NCCL's when a peer hangs."""
    import threading

    import torch.distributed as dist

    class Stalling(dist.ProcessGroup):
        def __init__(self, rank, size):
            super().__init__(rank, size)
            self.aborted = threading.Event()

        def getBackendName(self):
            return "stall"

        def barrier(self, *args, **kwargs):
            self.aborted.wait()
            raise RuntimeError("aborted")

        def shutdown(self):
            self.aborted.wait()

        def abort(self):
            self.aborted.set()

    dist.Backend.register_backend("stall", lambda store, rank, size, timeout: Stalling(rank, size), devices=["cpu"])


def refuse_once(text):
    """Make the next group of this worker fail as NCCL does for ranks that share a GPU."""
    import torch.distributed as dist

    original = dist.init_process_group

    def refuse(*args, **kwargs):
        dist.init_process_group = original
        raise dist.DistBackendError(text)

    dist.init_process_group = refuse
