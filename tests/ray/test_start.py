"""The backend on real workers: what a start does, and what it says when it cannot."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import time
from dataclasses import dataclass

import psutil
import pytest
import ray
from ray.exceptions import RayActorError
from ray.train._internal.worker_group import WorkerGroup

from ray_fracbackend import (
    FracBackendError,
    FracTorchConfig,
    MissingDeviceError,
    OutOfMemoryError,
    RendezvousError,
    SharedDeviceError,
    StartTimeoutError,
    VerificationError,
    WorkerDiedError,
)
from ray_fracbackend import backend as backend_module
from ray_fracbackend.backend import FracTorchBackend
from ray_fracbackend.gather import Deadline
from ray_fracbackend.ipc import host_memory_support
from ray_fracbackend.isolation_run import find_faults
from ray_fracbackend.ray_compat import worker_addresses
from ray_fracbackend.rendezvous import RendezvousPlan
from ray_fracbackend.report import StartReport
from ray_fracbackend.sharing import shared_devices
from ray_fracbackend.start_plan import StartPlan
from tests.ray.conftest import HALF_GPU, ONE_CPU, import_package, wait_until
from tests.unit.builders import gpu, job
from tests.unit.test_nccl_words import DUPLICATE, torch_text

# Enough for a rendezvous on a busy machine; what hangs takes as long.
START_S = 8.0


def start(group, **settings):
    FracTorchBackend().on_start(group, FracTorchConfig(**settings))


def stop(group):
    FracTorchBackend().on_shutdown(group, FracTorchConfig())


def group_state():
    """What a train function would see of its group."""
    import torch.distributed as dist

    options = dist.group.WORLD._get_backend(__import__("torch").device("cpu")).options
    return {
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "timeout_s": options._timeout.total_seconds(),
        "addr": os.environ.get("MASTER_ADDR"),
        "port": os.environ.get("MASTER_PORT"),
    }


def initialized():
    import torch.distributed as dist

    return dist.is_initialized()


def replace_in_worker(module, name, action, times=1_000_000):
    """Puts an action in place of a function of the package, in the worker that runs this, for so many calls."""
    import importlib
    import os
    import signal
    import time

    owner = importlib.import_module(module)
    original = getattr(owner, name)
    left = times

    def replaced(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            return original(*args, **kwargs)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if action == "raise":
            raise OSError("the disk is on fire")
        if action == "sleep":
            time.sleep(3600)
        if action == "nap":
            time.sleep(3)
        if action == "starve":
            import torch

            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        result = original(*args, **kwargs)
        if action == "corrupt":
            result.wait()
            args[0][3] += 1
        return result

    setattr(owner, name, replaced)


def warm_workers(resources):
    """Two workers that have imported what a start needs."""
    group = WorkerGroup(num_workers=2, resources_per_worker=resources)
    group.execute(import_package)
    yield group
    group.shutdown(patience_s=0)


@pytest.fixture(scope="module")
def two_workers(cluster):
    yield from warm_workers(ONE_CPU)


@pytest.fixture
def pair(two_workers):
    """Two workers that the module's tests share, without a group and without what a start sets."""
    yield two_workers
    stop(two_workers)
    two_workers.execute(forget_address)


def forget_address():
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


class TestGoodPath:
    """A start that works."""

    @pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.full)])
    def test_world_sizes(self, make_group, num_workers):
        """The group has every rank once, the backend of the plan, and the user's own timeout once it runs."""
        group = make_group(num_workers)
        start(group, timeout_s=1234)
        found = group.execute(group_state)
        assert [state["rank"] for state in found] == list(range(num_workers))
        assert {(s["backend"], s["world_size"], s["timeout_s"]) for s in found} == {("gloo", num_workers, 1234.0)}
        assert {(s["addr"], s["port"]) for s in found} == {(found[0]["addr"], found[0]["port"])}
        stop(group)

    def test_two_remote_rounds(self, pair, monkeypatch):
        """Probe, then start and verify: no worker is called a third time."""
        calls = []
        original = pair.execute_single_async

        def counted(rank, function, *args, **kwargs):
            calls.append((rank, function.__name__))
            return original(rank, function, *args, **kwargs)

        monkeypatch.setattr(pair, "execute_single_async", counted)
        for other in ("execute", "execute_async", "execute_single"):
            monkeypatch.setattr(pair, other, None)
        start(pair)
        monkeypatch.undo()
        assert calls == [
            (0, "probe_worker"),
            (1, "probe_worker"),
            (0, "start_worker_of_many"),
            (1, "start_worker_of_many"),
        ]

    def test_the_probe_does_not_use_up_the_starts_time(self, pair, monkeypatch):
        """Imports on a slow file system, in the probe, leave the start its whole budget."""
        budgets = []
        original = pair.execute_single_async

        def recorded(rank, function, *args, **kwargs):
            budgets.extend(args[0].budget_s for _ in [0] if function.__name__ == "start_worker_of_many")
            return original(rank, function, *args, **kwargs)

        pair.execute_single(1, replace_in_worker, "ray_fracbackend.probe", "probe_devices", "nap", 1)
        monkeypatch.setattr(pair, "execute_single_async", recorded)
        start(pair, start_timeout_s=30, verify=False)
        monkeypatch.undo()
        assert min(budgets) > 30 - 2.9

    def test_nothing_of_ipc_is_loaded_unasked(self, make_group):
        """A start that does not ask for ipc neither registers it nor loads its parts."""

        def loaded():
            import sys

            import torch.distributed as dist

            return "ipc" in dist.Backend.backend_list or "ray_fracbackend.ipc" in sys.modules

        group = make_group(1)
        start(group)
        assert group.execute(loaded) == [False]

    @pytest.mark.full
    def test_instructions_do_not_grow_with_the_job(self, make_group):
        """A worker is sent its own instruction, never the facts of all others, and answers without the times of all others."""
        sizes, answers = {}, {}
        for num_workers in (1, 4):
            group = make_group(num_workers)
            original = group.execute_single_async

            def counted(rank, function, *args, _size=num_workers, _original=original, **kwargs):
                sizes[_size] = len(ray.cloudpickle.dumps(args))
                answers[rank] = _original(rank, function, *args, **kwargs)
                return answers[rank]

            group.execute_single_async = counted
            start(group)
        assert sizes[4] < sizes[1] + 64
        assert [ray.get(answers[rank]) is None for rank in range(4)] == [False, True, True, True]

    def test_tcp_needs_no_environment(self, pair):
        """init_method='tcp' sets no MASTER_ADDR, as stock."""
        start(pair, init_method="tcp")
        assert {(s["backend"], s["addr"]) for s in pair.execute(group_state)} == {("gloo", None)}

    def test_stop_and_start_again(self, pair):
        """A group can be stopped and started on the same workers, as after a restart."""
        for _ in range(2):
            start(pair)
            stop(pair)
        assert pair.execute(initialized) == [False, False]

    def test_start_over_a_running_group(self, pair):
        """A start replaces what an earlier one left in the worker."""
        start(pair)
        start(pair, timeout_s=77)
        assert {state["timeout_s"] for state in pair.execute(group_state)} == {77.0}

    @pytest.mark.full
    def test_several_groups_side_by_side(self, make_group):
        """Two groups of one driver get ports of their own: nothing of a run is kept on the backend."""
        one, two = make_group(2), make_group(2)
        start(one)
        start(two)
        assert one.execute(group_state)[0]["port"] != two.execute(group_state)[0]["port"]

    def test_workers_get_the_report(self, pair):
        """get_start_report() in a worker has the plan, every worker's facts and the figures of the group."""
        start(pair)

        def fetch():
            from ray_fracbackend import get_start_report

            return get_start_report()

        reports = pair.execute(fetch)
        assert {report.backend for report in reports} == {"gloo"}
        assert [worker.rank for worker in reports[1].workers] == [0, 1]
        assert len({worker.pid for worker in reports[0].workers}) == 2
        assert {report.verification.world_size for report in reports} == {2}
        assert all(len(report.verification.rank_seconds) == 2 for report in reports)

    def test_verification_can_be_left_out(self, pair):
        """verify=False starts the group and has no figures."""
        start(pair, verify=False)

        def figures():
            from ray_fracbackend import get_start_report

            return get_start_report().verification

        assert pair.execute(figures) == [None, None]

    def test_other_backends_go_to_stock(self, pair):
        """A backend that the user registered is started by Ray's own code, with the user's name."""

        def register():
            import torch.distributed as dist

            dist.Backend.register_backend(
                "mine", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size), devices=["cpu"]
            )

        pair.execute(register)
        start(pair, backend="mine")

        def name():
            import torch.distributed as dist

            return dist.get_backend()

        assert pair.execute(name) == ["mine", "mine"]


@pytest.fixture(scope="class")
def halves(cluster):
    """Two workers with half a logical GPU each."""
    yield from warm_workers(HALF_GPU)


class TestLogicalGpus:
    """Workers whose GPU is a logical resource of Ray only."""

    def test_error_names_rank_node_and_cause(self, halves):
        """The default refuses with the cause and the setting that helps."""
        with pytest.raises(MissingDeviceError, match=r"ranks 0,1 GPUs .*node .*CPU.*on_missing_cuda='cpu'"):
            start(halves)
        assert halves.execute(initialized) == [False, False]

    def test_gloo_by_name_starts_as_with_stock(self, halves, caplog):
        """Gloo needs no CUDA: a warning, and Ray's own device look-up is left to Ray."""
        with caplog.at_level("WARNING", logger="ray.train"):
            start(halves, backend="gloo")
        assert [r.getMessage() for r in caplog.records if "on_missing_cuda='cpu' trains on the CPU" in r.getMessage()]
        assert {state["backend"] for state in halves.execute(group_state)} == {"gloo"}

        def manager():
            from ray.air._internal import device_manager

            return type(device_manager.get_torch_device_manager_by_context()).__name__

        assert halves.execute(manager) == ["CUDATorchDeviceManager"] * 2
        stop(halves)

    def test_cpu(self, halves):
        """on_missing_cuda='cpu' starts Gloo, and Ray's own device look-up says cpu in every worker."""
        start(halves, on_missing_cuda="cpu")

        def devices():
            from ray.air._internal.torch_utils import get_devices

            return [str(device) for device in get_devices()]

        assert halves.execute(devices) == [["cpu"], ["cpu"]]


@dataclass(frozen=True)
class Failure:
    """What is left to look at of an error that is gone."""

    kind: type[BaseException]
    text: str
    ranks: tuple[int, ...]
    is_own_cause: bool


def failure_of(group, **settings):
    """What a start raises. Not the error itself: with it goes all that it held."""
    try:
        start(group, **settings)
    except FracBackendError as error:
        # V1 follows the causes to their end.
        return Failure(type(error), str(error), error.ranks, is_own_cause=error.__cause__ is error)
    raise AssertionError("the start did not fail")


class TestFailures:
    """Starts that cannot work: named, bounded, and nothing left behind."""

    def failed_start(self, group, error, match, **settings):
        """A start that fails; its error has kept no frame that holds the worker group.

        Otherwise the workers would live until the next garbage collection.
        """
        started = time.monotonic()
        settings = {"start_timeout_s": START_S, **settings}
        gc.collect()
        gc.disable()
        try:
            failure = failure_of(group, **settings)
            assert [each for each in gc.get_objects() if isinstance(each, backend_module._Start)] == []
        finally:
            gc.enable()
        assert time.monotonic() - started < settings["start_timeout_s"] + 10  # the design's bound
        assert not failure.is_own_cause
        assert issubclass(failure.kind, error), failure
        assert re.search(match, failure.text), failure
        return failure

    def test_rank_that_never_answers(self, make_group):
        """A worker stuck in something else is named with its node, while the others wait no longer than the bound."""
        group = make_group(2)
        group.execute_single_async(1, time.sleep, 3600)
        failure = self.failed_start(
            group, StartTimeoutError, r"rank 1 \(node .*, pid \d+\) did not answer \(probing", start_timeout_s=2
        )
        assert failure.ranks == (1,)

    @pytest.mark.parametrize(
        "step", [pytest.param("_init_process_group", marks=pytest.mark.full), "verify_process_group"]
    )
    def test_rank_killed_during_start(self, make_group, step):
        """A dead worker is named at once; to V1 as no RayActorError, which would not reach the user."""
        group = make_group(2)
        group.execute_single(1, replace_in_worker, "ray_fracbackend.process_group", step, "kill")
        failure = self.failed_start(
            group, WorkerDiedError, r"rank 1 \(node .*\) died during start-up \(starting gloo at"
        )
        assert not issubclass(failure.kind, RayActorError)
        assert failure.ranks == (1,)

    @pytest.mark.parametrize(
        ("step", "how"),
        [
            ("verify_process_group", "sleep"),
            pytest.param("verify_process_group", "stop", marks=pytest.mark.full),
            pytest.param("_init_process_group", "stop", marks=pytest.mark.full),
        ],
    )
    def test_rank_that_hangs_during_start(self, make_group, step, how):
        """A worker that hangs in the middle is named, not those that wait for it; then no process and no port is left."""
        group = make_group(2)
        pids = [worker.metadata.pid for worker in group.workers]
        port = free_port()
        group.execute_single(1, replace_in_worker, "ray_fracbackend.process_group", step, how)
        failure = self.failed_start(
            group,
            (RendezvousError, VerificationError),
            r"rank 1 \(node .*did not answer",
            master_port=port,
            start_timeout_s=5,
        )
        assert failure.ranks == (1,)
        group.shutdown(patience_s=0)
        assert wait_until(lambda: not any(alive(pid) for pid in pids))
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
            listener.bind(("", port))
            listener.listen()

    def test_rank_that_raises(self, make_group):
        """A worker's own exception is told with its rank; one that is still waiting for it is ended."""
        group = make_group(2)
        group.execute_single(1, replace_in_worker, "ray_fracbackend.process_group", "_prepare", "raise", 1)
        failure = self.failed_start(group, RendezvousError, r"rank 1 \(node .*the disk is on fire", start_timeout_s=60)
        assert failure.ranks == (1,)
        assert group.execute_single(1, initialized) is False
        with pytest.raises(RayActorError):
            group.execute_single(0, initialized)

    def test_out_of_memory_is_told_as_that(self, pair):
        """A full device is named with its rank; the rank that waited for it does not hide it, and no fault is sought."""
        pair.execute_single(1, replace_in_worker, "ray_fracbackend.process_group", "verify_process_group", "starve", 1)
        failure = self.failed_start(
            pair, OutOfMemoryError, r"^rank 1 \(node .*ran out of device memory .*Tried to allocate", start_timeout_s=60
        )
        assert failure.ranks == (1,)

    def test_wrong_answer(self, pair):
        """A collective that computes a wrong sum stops the start, with both numbers."""
        pair.execute_single(1, replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 1)
        self.failed_start(
            pair, VerificationError, r"all_reduce .* wrong answer on rank 1: element 3 is 13 and must be 12"
        )
        assert pair.execute(initialized) == [False, False]

    def test_environment_is_restored(self, pair):
        """A failed start leaves no variable behind."""
        before = pair.execute(lambda: dict(os.environ))
        pair.execute(replace_in_worker, "ray_fracbackend.process_group", "verify_process_group", "raise", 1)
        self.failed_start(pair, RendezvousError, "the disk is on fire")
        assert pair.execute(lambda: dict(os.environ)) == before

    @pytest.mark.full
    def test_what_is_sound_is_told_after_a_failure(self, make_group):
        """With time left every rank, link and pair is tried in processes of their own, which are gone afterwards."""
        group = make_group(3)
        group.execute_single(1, replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 1)
        text = "wrong answer on rank 1.*all 3 ranks, their links and their groups of two work in fresh processes"
        self.failed_start(group, VerificationError, text, start_timeout_s=60)
        assert wait_until(lambda: not helper_processes())
        assert group.execute(initialized) == [False] * 3

    @pytest.mark.full
    def test_a_rank_that_takes_no_part_in_the_search_is_named(self, make_group):
        """A worker that is stuck in something else cannot start its helper."""
        group = make_group(3)
        report = StartReport(
            plan=StartPlan(backend="gloo", device_type="cpu", reason="gloo"),
            workers=tuple(job(None, None, None)),
            rendezvous=RendezvousPlan(
                master_addrs=("127.0.0.1",) * 3,
                master_port=29500,
                init_method="env",
                one_node=True,
                uses_gloo=True,
                reason="one node",
            ),
        )
        group.execute_single_async(1, time.sleep, 3600)
        found = []
        for _ in range(3):  # on a busy machine others are slow too
            found.append(
                [(each.kind, each.ranks) for each in find_faults(group, report, worker_addresses(group), Deadline(30))]
            )
            if found[-1] == [("silent rank", (1,))]:
                break
        assert found[-1] == [("silent rank", (1,))], found
        assert wait_until(lambda: not helper_processes())


class TestFallback:
    """The failure ladder, on a plan that has one."""

    @pytest.mark.parametrize("fixed_port", [False, True])
    def test_second_choice_after_a_failed_verification(self, pair, monkeypatch, fixed_port):
        """The first backend fails its verification, the second is started, verified and reported; on the same port too."""
        plan = StartPlan(backend="cpu:gloo", device_type="cpu", reason="first choice", fallback="gloo")
        monkeypatch.setattr(backend_module, "plan_start", lambda *args: plan)
        pair.execute_single(0, replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 1)
        start(pair, **({"master_port": free_port()} if fixed_port else {}))

        def fetch():
            from ray_fracbackend import get_start_report

            return get_start_report()

        report = pair.execute(fetch)[1]
        assert report.backend == "gloo"
        assert "cpu:gloo failed its verification, fell back to gloo" in report.plan.warnings[0]
        assert report.verification is not None

    def test_second_choice_after_a_stall(self, pair, monkeypatch, caplog):
        """A first choice that hangs in its first collective, and that only an abort ends, is left in time; told once."""
        plan = StartPlan(backend="stall", device_type="cpu", reason="first choice", fallback="gloo")
        monkeypatch.setattr(backend_module, "plan_start", lambda *args: plan)
        pair.execute(register_stalling)
        with caplog.at_level("WARNING", logger="ray.train"):
            start(pair, start_timeout_s=12)
        assert {state["backend"] for state in pair.execute(group_state)} == {"gloo"}
        told = [record.getMessage() for record in caplog.records if "fell back to gloo" in record.getMessage()]
        assert len(told) == 1
        assert re.search(r"stall failed its verification, fell back to gloo, .*barrier failed on rank", told[0])

    def test_gloo_after_a_refusal_of_nccl(self, pair, monkeypatch):
        """What NCCL says when ranks share a GPU is told with the ranks, and a plan with a way out takes it."""
        groups = shared_devices(job(gpu(), gpu()))
        plan = StartPlan(backend="nccl", device_type="cpu", reason="first choice", share_groups=groups, fallback="gloo")
        monkeypatch.setattr(backend_module, "plan_start", lambda *args: plan)
        pair.execute(refuse_once, torch_text(DUPLICATE))
        start(pair)

        def fetch():
            from ray_fracbackend import get_start_report

            return get_start_report()

        report = pair.execute(fetch)[1]
        assert report.backend == "gloo"
        assert re.search(r"nccl failed .*ranks 0,1 share GPU-a .*Duplicate GPU detected", report.warnings[0])

    def test_refusal_of_nccl_without_a_way_out(self, pair, monkeypatch):
        """An explicit choice of NCCL ends in one error that names the ranks and the way out."""
        plan = StartPlan(
            backend="nccl", device_type="cpu", reason="nccl", share_groups=shared_devices(job(gpu(), gpu()))
        )
        monkeypatch.setattr(backend_module, "plan_start", lambda *args: plan)
        pair.execute(refuse_once, torch_text())
        with pytest.raises(SharedDeviceError, match=r"ranks 0,1 share .*\(ncclInvalidUsage\)\. .*gloo"):
            start(pair, start_timeout_s=START_S)


def register_stalling():
    """Registers a backend whose calls and whose shutdown end with its abort alone, as NCCL's where a peer hangs."""
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
    """Lets the next group of this worker fail as NCCL fails where ranks share a GPU."""
    import torch.distributed as dist

    original = dist.init_process_group

    def refuse(*args, **kwargs):
        dist.init_process_group = original
        raise dist.DistBackendError(text)

    dist.init_process_group = refuse


def helper_processes():
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if "ray_fracbackend.isolation_helper" in process.cmdline()]


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def alive(pid):
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return True


def ipc_state():
    import torch.distributed as dist

    return dist.get_backend(), dist.group.WORLD._timeout_s


@pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}")
def test_ipc_by_name(pair):
    """backend='ipc' starts the shared-memory group, verified, with the user's own timeout once it runs."""
    start(pair, backend="ipc", timeout_s=77)
    assert pair.execute(ipc_state) == [("ipc", 77.0)] * 2
