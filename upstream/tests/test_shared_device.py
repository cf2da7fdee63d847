"""Piece 2. The decision on given facts, the start with them, and a real GPU."""

import logging

import pytest
import torch
import torch.distributed as dist
from ray_fracbackend.errors import SharedDeviceError
from tests.unit.builders import gpu, job, mig, worker

from upstream import shared_device
from upstream.install import as_if_merged
from upstream.shared_device import without_conflict

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train._internal.worker_group import WorkerGroup
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2.api.exceptions import TrainingFailedError

SHARED = job(gpu("a"), gpu("a"), gpu("b"))
APART = job(gpu("a"), gpu("b"))
SHARE_TEXT = "ranks 0,1 share GPU-a \\(NVIDIA H200\\) on node 10.0.0.1"


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_own_devices_change_nothing(backend):
    """Where every rank has its own device the config goes on as it came."""
    config = TorchConfig(backend=backend)
    assert without_conflict(APART, config) is config


def test_default_falls_back_to_gloo(caplog):
    """A backend that was left open becomes gloo, with a warning that says who shares."""
    config = TorchConfig(timeout_s=7)
    with caplog.at_level(logging.WARNING):
        changed = without_conflict(SHARED, config)
    assert (changed.backend, changed.timeout_s, config.backend) == ("gloo", 7, None)
    assert "ranks 0,1 share GPU-a (NVIDIA H200) on node 10.0.0.1" in caplog.text


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_explicit_nccl_is_an_error(backend):
    """NCCL by name on a shared device is an error that says who, and the ways out."""
    with pytest.raises(SharedDeviceError, match=SHARE_TEXT) as raised:
        without_conflict(SHARED, TorchConfig(backend=backend))
    assert raised.value.ranks == (0, 1)
    assert "TorchConfig(backend='gloo')" in str(raised.value)


def test_mig_slices_that_nccl_confuses():
    """Slices of one GPU are one device to an NCCL that compares bus ids."""
    workers = job(mig("x"), mig("y"))
    assert without_conflict(workers, TorchConfig()).backend == "gloo"
    newer = job(mig("x"), mig("y"), nccl_version=(2, 30, 7))
    assert without_conflict(newer, TorchConfig()).backend is None


def test_users_own_flag_wins():
    """Who sets NCCL's flag for all ranks that share gets NCCL, if that NCCL has it."""
    flag = {"env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "nccl_version": (2, 30, 7)}
    config = TorchConfig()
    pair = [worker(0, gpu("a"), **flag), worker(1, gpu("a"), **flag)]
    alone = worker(2, gpu("b"), nccl_version=(2, 30, 7))
    assert without_conflict([*pair, alone], config) is config
    one = [pair[0], worker(1, gpu("a"), nccl_version=(2, 30, 7))]
    assert without_conflict(one, config).backend == "gloo"
    flag["nccl_version"] = (2, 29, 7)
    assert without_conflict(job(gpu("a"), gpu("a"), **flag), config).backend == "gloo"


def test_torch_without_nccl_is_left_alone():
    """Without NCCL there is nothing that could refuse."""
    config = TorchConfig()
    facts = job(gpu("a"), gpu("a"), nccl_available=False)
    assert without_conflict(facts, config) is config


def half_a_gpu(rank):
    """What a worker would find that shares its GPU with the others."""
    return SHARED[0] if rank == 0 else SHARED[1]


@pytest.fixture(scope="module")
def half_gpu_workers():
    """Two real workers at half of a GPU that is a number only."""
    ray.init(
        "local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False
    )
    group = WorkerGroup(num_workers=2, resources_per_worker={"CPU": 1, "GPU": 0.5})
    yield group
    group.shutdown(patience_s=0)
    ray.shutdown()


@pytest.mark.full
def test_start_with_gloo(half_gpu_workers, monkeypatch):
    """A start whose workers find one device under both ends in a gloo group."""
    monkeypatch.setattr(shared_device, "probe_devices", half_a_gpu)
    with as_if_merged("shared_device", "bounded_start"):
        _TorchBackend().on_start(half_gpu_workers, TorchConfig())
    assert half_gpu_workers.execute(dist.get_backend) == ["gloo", "gloo"]
    _TorchBackend().on_shutdown(half_gpu_workers, TorchConfig())


@pytest.mark.full
def test_start_with_explicit_nccl(half_gpu_workers, monkeypatch):
    """The same start with NCCL by name ends before any process group exists."""
    monkeypatch.setattr(shared_device, "probe_devices", half_a_gpu)
    with as_if_merged("shared_device"):
        with pytest.raises(SharedDeviceError, match=SHARE_TEXT):
            _TorchBackend().on_start(half_gpu_workers, TorchConfig(backend="nccl"))
    assert half_gpu_workers.execute(dist.is_initialized) == [False, False]


def train_func():
    tensor = torch.ones(1, device=ray.train.torch.get_device())
    dist.all_reduce(tensor)
    return {"backend": dist.get_backend(), "sum": tensor.item()}


def fit(tmp_path):
    """The user's script of ray-project/ray#48012: two workers at half a GPU each."""
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}
        ),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    return trainer.fit().return_value


needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="needs a CUDA device and a torch with NCCL",
)


@pytest.mark.gpu
@needs_gpu
def test_stock_fails_in_nccl(tmp_path):
    """NCCL refuses in the first collective, by device number and without a node."""
    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False)
    try:
        refused = "Duplicate GPU|Multiple Ranks are using the same GPU|ncclInvalidUsage"
        with pytest.raises(TrainingFailedError, match=refused):
            fit(tmp_path)
    finally:
        ray.shutdown()


@pytest.mark.gpu
@needs_gpu
def test_trains_with_gloo(tmp_path):
    """As if merged the same script trains."""
    with as_if_merged("shared_device") as runtime_env:
        ray.init(
            "local",
            num_cpus=2,
            num_gpus=1,
            include_dashboard=False,
            runtime_env=runtime_env,
        )
        try:
            assert fit(tmp_path) == {"backend": "gloo", "sum": 2.0}
        finally:
            ray.shutdown()
