"""The backend on real workers: effects of a start, and its errors."""

from __future__ import annotations

import pytest

from ray_fracbackend import MissingDeviceError, get_start_report
from ray_fracbackend.ipc._torch import HAS_PYTHON_GROUPS
from tests.ray.conftest import HALF_GPU, warm_workers
from tests.ray.starts import group_state, initialized, replace_in_worker, start, stop
from tests.ray.training_runs import NO_IPC


class TestGoodPath:
    """A successful start."""

    @pytest.mark.full
    @pytest.mark.parametrize("num_workers", [1, 3])
    def test_world_sizes(self, make_group, num_workers):
        """The group has every rank once, the backend of the plan, and the user's own timeout in training."""
        group = make_group(num_workers)
        start(group, timeout_s=1234)
        found = group.execute(group_state)
        assert [state["rank"] for state in found] == list(range(num_workers))
        assert {(s["backend"], s["world_size"], s["timeout_s"]) for s in found} == {("gloo", num_workers, 1234.0)}
        assert {(s["addr"], s["port"]) for s in found} == {(found[0]["addr"], found[0]["port"])}
        stop(group)

    @pytest.mark.parametrize(
        ("num_naps", "settings"), [(1, {"start_timeout_s": 30, "verify": False}), (0, {"start_timeout_s": 300})]
    )
    def test_the_workers_have_the_whole_time_limit(self, pair, monkeypatch, num_naps, settings):
        """The workers have the whole start_timeout_s: the probe, with slow imports, and a search after a failure have separate time."""
        budgets = []
        original = pair.execute_single_async

        def recorded(rank, function, *args, **kwargs):
            budgets.extend(args[0].budget_s for _ in [0] if function.__name__ == "start_worker")
            return original(rank, function, *args, **kwargs)

        pair.execute_single(1, replace_in_worker, "ray_fracbackend.worker.probe", "probe_devices", "nap", num_naps)
        monkeypatch.setattr(pair, "execute_single_async", recorded)
        start(pair, **settings)
        monkeypatch.undo()
        assert min(budgets) > settings["start_timeout_s"] - 2.9

    @pytest.mark.full
    @pytest.mark.linux(reason="needs a start that does not ask whether staged works; on Windows each does")
    def test_ipc_is_loaded_only_on_request(self, make_group):
        """A start without ipc neither registers it nor loads its parts."""

        def loaded():
            import sys

            import torch.distributed as dist

            return "ipc" in dist.Backend.backend_list or "ray_fracbackend.ipc" in sys.modules

        group = make_group(1)
        start(group)
        assert group.execute(loaded) == [False]

    def test_tcp_needs_no_environment(self, pair):
        """init_method='tcp' sets no MASTER_ADDR, as with stock."""
        start(pair, init_method="tcp")
        assert {(s["backend"], s["addr"]) for s in pair.execute(group_state)} == {("gloo", None)}

    def test_the_store_of_torchruns_agent(self, pair):
        """A flag from torchrun is removed, because no rank of a later group of the train function is a client of an agent's store."""

        def leave():
            import os

            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

        def own_group():
            from datetime import timedelta

            from torch.distributed.rendezvous import rendezvous

            from tests.processes import free_port

            url = f"tcp://127.0.0.1:{free_port()}?use_libuv=0"
            next(iter(rendezvous(url, 0, 1, timeout=timedelta(seconds=20))))
            return True

        pair.execute(leave)
        start(pair)
        assert pair.execute(own_group) == [True, True]

    def test_stop_and_start_again(self, pair):
        """A group can be stopped and started on the same workers, as after a restart."""
        for _ in range(2):
            start(pair)
            stop(pair)
        assert pair.execute(initialized) == [False, False]

    @pytest.mark.parametrize("verify", [True, False])
    def test_workers_get_the_report(self, pair, verify):
        """get_start_report() in a worker returns the plan and every worker's WorkerInfo; the measurements unless they are left out."""
        start(pair, verify=verify)
        reports = pair.execute(get_start_report)
        assert {report.backend for report in reports} == {"gloo"}
        assert len({worker.pid for worker in reports[0].workers}) == 2
        assert {report.verification and report.verification.world_size for report in reports} == {2 if verify else None}


@pytest.fixture(scope="class")
def halves(cluster):
    """Two workers with half a logical GPU each."""
    yield from warm_workers(HALF_GPU)


class TestLogicalGpus:
    """Workers whose GPU is only a logical resource."""

    def test_error_names_rank_node_and_cause(self, halves):
        """The default refuses the start with the cause and the setting that helps."""
        with pytest.raises(MissingDeviceError, match=r"ranks 0,1 GPUs .*node .*CPU.*on_missing_cuda='cpu'"):
            start(halves)
        assert halves.execute(initialized) == [False, False]

    def test_gloo_by_name_starts_as_with_stock(self, halves, caplog):
        """Gloo needs no CUDA: there is a warning, and Ray's own device lookup is unchanged."""
        with caplog.at_level("WARNING", logger="ray.train"):
            start(halves, backend="gloo")
        assert [r.getMessage() for r in caplog.records if "on_missing_cuda='cpu' trains on the CPU" in r.getMessage()]
        assert {state["backend"] for state in halves.execute(group_state)} == {"gloo"}

        def manager():
            from ray.air._internal import device_manager

            return type(device_manager.get_torch_device_manager_by_context()).__name__

        assert halves.execute(manager) == ["CUDATorchDeviceManager"] * 2
        stop(halves)

    def test_cpu(self, halves, caplog):
        """on_missing_cuda='cpu' starts Gloo with a warning, and Ray's own device lookup returns cpu in every worker."""
        with caplog.at_level("INFO", logger="ray.train"):
            start(halves, on_missing_cuda="cpu")
        (line,) = [record for record in caplog.records if "training on the CPU" in record.getMessage()]
        assert line.levelname == "WARNING"
        assert line.getMessage().startswith("ray_fracbackend: Ray assigned ranks 0,1 GPUs that torch cannot use")

        def devices():
            from ray.air._internal.torch_utils import get_devices

            return [str(device) for device in get_devices()]

        assert halves.execute(devices) == [["cpu"], ["cpu"]]


def ipc_state():
    import torch.distributed as dist

    return dist.get_backend(), dist.group.WORLD._timeout_s


@pytest.mark.skipif(not HAS_PYTHON_GROUPS, reason="needs a torch with process groups written in Python: 2.7")
@pytest.mark.parametrize("backend", [pytest.param("ipc", marks=NO_IPC), "staged", "cpu:gloo,cuda:staged"])
def test_ipc_and_staged_by_name(pair, backend):
    """By itself or in torch's pair; verified, with the user's own timeout in training, and started again."""
    for timeout_s in (77, 78):
        start(pair, backend=backend, timeout_s=timeout_s)
        assert pair.execute(ipc_state) == [(backend, float(timeout_s))] * 2
