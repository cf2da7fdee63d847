"""check_devices with real processes and stores, without Ray; the devices are simulated, because this machine has no GPU."""

import functools
import json
import re
import subprocess
import sys
import uuid
from dataclasses import asdict
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ray_fracbackend import IncompatibleWorkersError, MissingDeviceError, RendezvousError, check_devices
from ray_fracbackend.decide.plain import from_plain
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import NetworkInfo, WorkerInfo
from ray_fracbackend.worker import device_check
from ray_fracbackend.worker.store import open_store, uses_libuv
from tests.processes import run_processes
from tests.unit.builders import gpu, job, mig, worker


def tcp_store(rank, port):
    options = {"wait_for_workers": False, "timeout": timedelta(seconds=20), "use_libuv": uses_libuv()}
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, **options)


def check(rank, size, port, workers, rounds=1):
    """Run check_devices in simulated processes with a store; return the results of the last round, or its error."""
    store = tcp_store(rank, port)
    with mock.patch.object(device_check, "_probe_process", lambda rank, device: workers[rank]):
        for _ in range(rounds):
            found = check_devices(store=store, rank=rank, world_size=size, timeout_s=20.0)
    return found


@pytest.mark.parametrize(
    ("devices", "facts"),
    [("aa", {}), ("abc", {}), ("aa", {"nccl_version": (2, 30, 7), "env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}})],
    ids=["shared", "own", "flags"],
)
def test_the_decision_is_that_of_a_start(devices, facts):
    """Every rank receives it, and the devices by rank."""
    workers = job(*map(gpu, devices), **facts)
    start = decide_start(workers, Settings())
    for found in run_processes(check, len(workers), workers):
        assert (found.backend, found.reason) == (start.backend, start.reason)
        assert (found.share_groups, found.env) == (start.share_groups, start.env_defaults)
        assert found.devices == tuple(map(gpu, devices))


def test_errors_are_those_of_all_ranks():
    """A rank that is not at fault raises it too, although rank 0 hosts the store and ends at once."""
    lost = worker(1, cuda_missing="the driver is lost; restart the node")
    found = run_processes(check, 2, [worker(0, gpu("a")), lost])
    assert [(type(error), error.ranks) for error in found] == [(MissingDeviceError, (1,))] * 2
    says = r"^rank 1 cannot use a CUDA device \(rank 1 \(node 10\.0\.0\.1, pid 0\): the driver is lost; restart the node\)\. Every process"
    assert all(re.match(says, str(error)) for error in found)


def test_calls_one_after_the_other_in_one_store():
    """Each call has its own answer, with any number of ranks."""
    workers = [worker(rank, gpu(str(rank // 2))) for rank in range(5)]
    found = run_processes(check, 5, workers, 3)
    assert [group.ranks for group in found[4].share_groups] == [(0, 1), (2, 3)]


def absent(rank, size, port, missing):
    """All ranks except one call it; they keep the store until all have the result."""
    store = tcp_store(rank, port)
    error = None
    if rank != missing:
        with mock.patch.object(device_check, "_probe_process", lambda rank, device: worker(rank, gpu("a"))):
            try:
                check_devices(store=store, rank=rank, world_size=size, timeout_s=1)
            except RendezvousError as failed:
                error = failed
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < size:
        pass
    return error


@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_process_that_does_not_come(missing):
    """All others name the missing rank within the time limit, also if it is rank 0."""
    found = run_processes(absent, 3, missing)
    for rank, error in enumerate(found):
        if rank != missing:
            assert str(error).startswith(f"check_devices: rank {missing} did not call within 1 s. All 3 processes must")
            assert error.ranks == (missing,)


VERSION = device_check.__version__
INFO = asdict(worker(1, gpu("a")))


@functools.cache
def local_store():
    return open_store(host="127.0.0.1")


def told_to_rank_0(value):
    """Return the error of rank 0 for this value of rank 1; tests/unit/test_strangers_values.py has any other value."""
    store = dist.PrefixStore(uuid.uuid4().hex, local_store())
    store.set("ray_fracbackend/check_devices/2/1/rank/1", value)
    with (
        mock.patch.object(device_check, "_probe_process", lambda rank, device: worker(rank, gpu("a"))),
        mock.patch.object(device_check, "_ANSWER_S", 0.0),
        pytest.raises((RendezvousError, IncompatibleWorkersError)) as caught,
    ):
        check_devices(store=store, rank=0, world_size=2, timeout_s=5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"pid": "1"}, "pid is '1'"),
        ({"gpu_ids": [1]}, "gpu_ids is 1"),
        ({"nccl_version": [2, 30]}, "nccl_version is [2, 30]"),
        ({"nccl_available": 1}, "nccl_available is 1"),
        ({"resources": {"GPU": True}}, "resources is True"),
        ({"env": {"NCCL_P2P": None}}, "env is None"),
        ({"devices": [{}]}, "devices is {}"),
        ({"new": 1}, "report is {'rank': 1"),
        ({"rank": 7}, "the ranks are [0, 7]"),
    ],
    ids=str,
)
def test_a_report_of_other_fields_or_types(change, found):
    assert found in told_to_rank_0(json.dumps([VERSION, json.dumps({**INFO, **change})]))


def test_every_field_survives_json():
    """A report with a value of each type is equal after the exchange."""
    network = NetworkInfo(interfaces={"eth0": ("10.0.0.1", "fd88::1")}, store_port=1, master_addrs=("10.0.0.1",))
    info = worker(1, mig("1"), env={"NCCL_DEBUG": "\udcff"}, gpu_ids=("0",), network=network)
    assert from_plain(WorkerInfo, json.loads(json.dumps(asdict(info)))) == info


def host_dies(rank, size, port):
    store = tcp_store(rank, port)
    if rank == 0:
        store.wait(["1"], timedelta(seconds=20))
        return
    store.set("1", "")
    check_devices(store=store, rank=rank, world_size=size, timeout_s=30)
    return


def test_a_store_that_ends():
    """The others do not wait for its answer, and the error names the process."""
    _, error = run_processes(host_dies, 2)
    assert isinstance(error, RendezvousError)
    assert re.match(r"check_devices: the store failed on rank 1 \(.*The process that hosts it must run", str(error))


def in_groups(rank, size, port):
    """The default group, and a group of its ranks 1 and 2; rank 0 is only in the first one."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    part = dist.new_group([1, 2])
    mine = worker(rank, gpu("a" if rank else "b"))
    with mock.patch.object(device_check, "_probe_process", lambda own, device: worker(own, *mine.devices)):
        whole = check_devices()
        try:
            found = check_devices(part)
        except ValueError as error:
            found = str(error)
    dist.barrier()
    return whole, found


def test_groups():
    """Ranks are those of the group that was passed."""
    results = run_processes(in_groups, 3)
    assert [[group.ranks for group in whole.share_groups] for whole, _ in results] == [[(1, 2)]] * 3
    assert "this rank is not in it" in results[0][1]
    assert [[group.ranks for group in found.share_groups] for _, found in results[1:]] == [[(0, 1)]] * 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs a store or a process group: pass store="),
        ({"rank": 0}, "needs a group, or store=, rank= and world_size= together"),
        ({"store": dist.Store()}, "needs a group, or store=, rank= and world_size= together"),
        ({"store": dist.Store(), "group": object(), "rank": 0, "world_size": 2}, "needs a group, or store=, rank= and"),
        ({"store": dist.Store(), "rank": 2, "world_size": 2}, r"\(rank=2, world_size=2\)"),
        ({"store": dist.Store(), "rank": -1, "world_size": 2}, r"\(rank=-1, world_size=2\)"),
        ({"timeout_s": 0}, r"timeout_s=0\): timeout_s must be a number of seconds above 0"),
        ({"device": "cpu"}, r"device='cpu'\): device must be a CUDA device, such as 'cuda:1' or 1\.$"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_arguments(arguments, text):
    """Each argument has a rule; the error contains the rule and the value."""
    with pytest.raises(ValueError, match=text):
        check_devices(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_cuda_or_ray():
    """torch finds no CUDA in this process, and the error says so; Ray is not imported."""
    code = (
        "import sys; sys.modules['ray'] = None; import torch.distributed as dist; from ray_fracbackend import check_devices\n"
        "store = dist.TCPStore('127.0.0.1', 0, 1, True, use_libuv=False)\n"
        "try: check_devices(store=store, rank=0, world_size=1)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("MissingDeviceError rank 0 cannot use a CUDA device (rank 0 (node ")
    cpu_build = "CPU-only build; install a CUDA build of torch to use GPUs"
    assert (cpu_build if torch.version.cuda is None else "finds no NVIDIA driver") in done.stdout
