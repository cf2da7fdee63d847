"""Starting and ending a worker's process group without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, set_debug_level

from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.errors import (
    BackendUnavailableError,
    GroupFormationError,
    MissingDeviceError,
    RendezvousError,
    UnreachableMasterError,
    VerificationError,
)
from ray_fracbackend.timeouts import Deadline
from ray_fracbackend.worker import missing_cuda, process_group, start_failure
from ray_fracbackend.worker.process_group import start_worker
from ray_fracbackend.worker.store import connect_store, hold_store, release_store
from tests.processes import CONTEXT, free_port, loopback_name, run_processes, wait_for_port
from tests.unit.builders import worker_plan
from tests.unit.test_missing_cuda import RELEASES, recorded


def start_after_a_failure(rank: int, num_processes: int, port: int, first_port: int) -> int:
    """Both ranks begin a start, which rank 1 leaves before the group is created; then both start again."""
    if rank == 0:
        with pytest.raises(GroupFormationError):
            # Enough time for the other process to connect; the rest passes before the timeout.
            start_worker(cpu_plan(rank, first_port, budget_s=20))
    else:
        wait_for_port(first_port)
        connect_store(rank, num_processes, "127.0.0.1", first_port, 20, "first")
        wait_for_port(port)
    start_worker(cpu_plan(rank, port, budget_s=90))
    return dist.get_world_size()


def cpu_plan(rank: int, port: int, budget_s: float) -> WorkerPlan:
    if rank == 0:
        hold_store(port, one_node=True)
    return worker_plan(rank=rank, master_port=port, interface=loopback_name(), budget_s=budget_s)


@pytest.mark.full
def test_a_rank_whose_last_start_failed_can_start_with_a_new_one() -> None:
    """After a group that did not form, torch's count of groups is the same on all ranks again."""
    assert run_processes(start_after_a_failure, 2, free_port(), timeout_s=120) == [2, 2]


def test_a_rank_that_reaches_no_store() -> None:
    with pytest.raises(UnreachableMasterError, match=r"refused|no answer"):
        start_worker(cpu_plan(1, free_port(), budget_s=0.5))


def test_a_rank_that_does_not_connect_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"rank 1 did not connect to rank 0's store at 127\.0\.0\.1:") as caught:
        start_worker(cpu_plan(0, free_port(), budget_s=0.5))
    assert caught.value.ranks == (1,)


def test_the_advice_after_a_rendezvous_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is about the store's address and port, because Gloo has not connected yet. The cap on the worker's memory is gone."""
    release_store()  # of a start that failed in this process
    caps: list[Any] = []
    monkeypatch.setattr(process_group.memory_cap, "set_cap", lambda *args: caps.append(args))
    with pytest.raises(RendezvousError, match="Check that every node reaches that address and port") as caught:
        start_worker(worker_plan(device="cuda:1", memory_fraction=0.5, budget_s=1))  # rank 0, which has no store
    assert "Gloo" not in str(caught.value)
    assert caps == [(0.5, "cuda:1"), (None,)]


def test_a_rank_whose_trial_fails_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for its answer, otherwise to the deadline."""
    store = MagicMock()
    monkeypatch.setenv(process_group._HANDLING, "1")
    monkeypatch.setattr(process_group, "_form", MagicMock(side_effect=VerificationError("x")))
    with pytest.raises(VerificationError):
        process_group._try_nccl(worker_plan(), store, Deadline(5))
    store.set.assert_called_once_with("ray_fracbackend/tried/0", "failed")


_SERVER = """
import os, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.platform != "win32")
print(store.port, os.getpid(), flush=True)
input()
"""


def test_a_store_that_falls_silent_ends_the_start() -> None:
    """torch's client would wait without a timeout: the store's process is stopped, but its kernel still accepts connections."""
    before = set(threading.enumerate())
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            port, pid = map(int, server.stdout.readline().split())
            psutil.Process(pid).suspend()  # in a virtual environment of Windows its parent is server
            says = rf"127.0.0.1:{port} failed \(no answer within .* Rank 0 hangs"
            with pytest.raises(RendezvousError, match=says) as caught:
                start_worker(cpu_plan(1, port, budget_s=1))
        finally:
            server.kill()
    # The abandoned client continues now.
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    assert caught.value.ranks == (1,)


def time_limits(rank: int, num_processes: int, port: int, detail: bool) -> list[float]:
    """Return the time limits of a Gloo group in seconds, after its start and after a change with warnings as errors."""
    if detail:
        set_debug_level(DebugLevel.DETAIL)
    start_worker(cpu_plan(rank, port, budget_s=60))
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    gloo = backend.wrapped_pg if detail else backend
    started_s = gloo.options._timeout.total_seconds()
    warnings.simplefilter("error")
    process_group._set_group_timeout(worker_plan(), 5)
    return [started_s, gloo.options._timeout.total_seconds()]


@pytest.mark.parametrize("detail", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_users_time_limit_holds_once_the_group_runs(detail: bool) -> None:
    """Also with TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch's wrapper cannot change the limit later."""
    assert run_processes(time_limits, 2, detail, timeout_s=120) == [[1800.0, 1800.0 if detail else 5.0]] * 2


def late_message(rank: int, num_processes: int, port: int, backend: str) -> float:
    start_worker(replace(cpu_plan(rank, port, budget_s=4), backend=backend))
    value = torch.full((4,), float(rank))
    if rank == 1:
        time.sleep(6)
        dist.send(value, 0)
    else:
        dist.recv(value, 1)
    dist.barrier()
    return value[0].item()


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("ipc", marks=[pytest.mark.full, pytest.mark.linux(reason="needs the ipc backend")])],
)
def test_send_and_recv_have_the_users_time_limit(backend: str) -> None:
    """Gloo's send and recv keep the timeout with which the group was created."""
    assert run_processes(late_message, 2, backend, timeout_s=120) == [1.0, 1.0]


def pair_half(rank: int, num_processes: int, port: int, backend: str, started: Any) -> tuple[str, int] | None:
    """Verify a backend for one device type on a worker that trains on the CPU."""
    result = start_worker(replace(cpu_plan(rank, port, budget_s=60), backend=backend))
    # No collective has confirmed that the other rank is connected: Gloo fails there if this process ends earlier.
    started.wait(60)
    return (result.device, result.world_size) if result else None


@pytest.mark.parametrize(("backend", "verified"), [("cpu:gloo", ("cpu", 2)), ("cuda:gloo", None)])
def test_a_group_is_verified_on_the_devices_of_its_backend(backend: str, verified: tuple[str, int] | None) -> None:
    """A group without a backend for the CPU starts on a worker without CUDA, as with stock, and is not verified."""
    assert run_processes(pair_half, 2, backend, CONTEXT.Barrier(2), timeout_s=120) == [verified, None]


def start_and_look(rank: int, num_processes: int, port: int) -> tuple[bool, bool]:
    """Return whether the interface was set while the group was created, and whether it is set afterwards."""
    original, seen = dist.init_process_group, []

    def recorded(*args: object, **kwargs: object) -> None:
        seen.append("GLOO_SOCKET_IFNAME" in os.environ)
        original(*args, **kwargs)

    dist.init_process_group = recorded
    start_worker(replace(cpu_plan(rank, port, budget_s=60), drop_interface=True))
    return seen[0], "GLOO_SOCKET_IFNAME" in os.environ


def test_variables_of_the_start_are_removed_before_training() -> None:
    """Processes that the train function starts do not inherit the loopback interface."""
    assert run_processes(start_and_look, 2, timeout_s=120) == [(True, False)] * 2


def failing_verification(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    """Make the verification fail with this torch error, and NVML hang as with a broken GPU."""

    def fail(**options: Any) -> None:
        raise VerificationError("all_reduce of 1 KiB failed on rank 0 (<...>). Look at nvidia-smi.") from cause

    monkeypatch.setattr(process_group, "verify_process_group", fail)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("hangs", [False, True])
def test_a_device_that_cuda_refuses_is_no_failure_of_the_group(
    release: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verification creates the first context: its error has the cause and the advice, and there is no search."""
    failing_verification(monkeypatch, RuntimeError(recorded("mps_clients", release)))
    monkeypatch.setattr(start_failure, "_NVML_S", 0.2)
    why = threading.Event().wait if hangs else lambda: "MPS has no room; let fewer ranks share it"
    monkeypatch.setattr(missing_cuda, "why_no_cuda", lambda error: why())
    with pytest.raises(MissingDeviceError) as caught:
        process_group._verify(worker_plan(device="cuda:0"), Deadline(10))
    says = "all_reduce of 1 KiB failed on rank 0 (<...>). Look at nvidia-smi." if hangs else "MPS has no room; let"
    assert str(caught.value).startswith(f"cuda:0 cannot be used: {says}")
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [("Connection closed by peer", VerificationError), (recorded("no_pinned_memory"), BackendUnavailableError)],
)
def test_a_group_that_fails_is_no_refused_device(
    cause: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the network stays unchanged; without pinned memory Gloo cannot send CUDA tensors."""
    failing_verification(monkeypatch, RuntimeError(cause))
    with pytest.raises(kind, match="all_reduce of 1 KiB failed on rank 0"):
        process_group._verify(worker_plan(device="cuda:0"), Deadline(10))


@pytest.mark.parametrize(("device", "bound"), [("cuda:1", torch.device("cuda:1")), ("cuda", None)])
def test_nccl_connects_on_the_workers_own_device(monkeypatch: Any, device: str, bound: torch.device | None) -> None:
    """With torch 2.15, which connects when the group is made; a worker without a device of Ray's keeps torch's choice."""
    monkeypatch.setattr(process_group._torch, "CONNECTS_NCCL_AT_ONCE", True)
    monkeypatch.setattr(dist, "init_process_group", made := MagicMock())
    process_group._create(worker_plan(backend="nccl", device=device), dist.HashStore(), "default_pg")
    assert made.call_args.kwargs["device_id"] == bound


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_that_does_not_connect_is_not_the_networks_fault(monkeypatch: Any, backend: str) -> None:
    """Nor that of Gloo, which connects before it in a pair; a hang in a pair may be either's."""
    monkeypatch.setattr(start_failure, "CONNECTS_NCCL_AT_ONCE", True)
    failed, pair = RuntimeError("Failed to initialize NCCL communicator: internal error"), backend != "nccl"
    for error, advice in ((failed, "NCCL fails"), (TimeoutError(), "Gloo connects" if pair else "NCCL hangs")):
        step = start_failure.named_step("x", worker_plan(backend=backend), GroupFormationError)
        with pytest.raises(GroupFormationError, match=advice), step:
            raise error
