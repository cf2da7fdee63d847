"""The torch backend of a job with GPUs that does not set one."""

import pytest
import torch
import torch.distributed as dist

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2.api.exceptions import TrainingFailedError

needs_torch_without_nccl = pytest.mark.skipif(
    dist.is_nccl_available(), reason="needs a torch without NCCL"
)
needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="needs a CUDA device and a torch with NCCL",
)


def train_func():
    tensor = torch.ones(1)
    if dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor)
    return {"backend": dist.get_backend(), "sum": tensor.item()}


def fit(tmp_path, num_gpus_per_worker=1, **kwargs):
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=2,
            use_gpu=True,
            resources_per_worker={"CPU": 1, "GPU": num_gpus_per_worker},
        ),
        run_config=RunConfig(storage_path=str(tmp_path)),
        **kwargs,
    )
    return trainer.fit().return_value


@pytest.mark.parametrize("use_gpu", [False, True])
def test_open_backend_stays_open(use_gpu):
    """The trainer does not write its choice into the user's config."""
    config = TorchConfig()
    TorchTrainer(
        train_func, torch_config=config, scaling_config=ScalingConfig(use_gpu=use_gpu)
    )
    assert config.backend is None


@needs_torch_without_nccl
def test_gloo_where_nccl_is_missing(ray_start_4_cpus_2_gpus, tmp_path):
    """The script of ray-project/ray#49778: it asks for GPUs and sets no backend."""
    assert fit(tmp_path) == {"backend": "gloo", "sum": 2.0}


@needs_torch_without_nccl
def test_explicit_nccl_is_kept(ray_start_4_cpus_2_gpus, tmp_path):
    """An explicit backend is not replaced."""
    with pytest.raises(TrainingFailedError, match="doesn't have NCCL built in"):
        fit(tmp_path, torch_config=TorchConfig(backend="nccl"))


def pretend_one_gpu(env):
    """Make this worker report CUDA device GPU-1b2c."""
    import os
    from types import SimpleNamespace
    from unittest import mock

    import torch

    import ray.train.torch

    os.environ.update(env)
    device, properties = torch.device("cuda:0"), SimpleNamespace(uuid="1b2c")
    mock.patch.object(ray.train.torch, "get_device", lambda: device).start()
    for name, value in {
        "is_available": True,
        "get_device_properties": properties,
    }.items():
        mock.patch(f"torch.cuda.{name}", lambda *_, value=value: value).start()


def pretend_no_more():
    from unittest import mock

    mock.patch.stopall()


class OneGpuBackend(_TorchBackend):
    def on_start(self, worker_group, backend_config):
        worker_group.execute(pretend_one_gpu, backend_config.env)
        super().on_start(worker_group, backend_config)
        worker_group.execute(pretend_no_more)


class OneGpuConfig(TorchConfig):
    """Workers that all report the same CUDA device."""

    def __init__(self, backend=None, env=()):
        super().__init__(backend)
        self.env = dict(env)

    @property
    def backend_cls(self):
        return OneGpuBackend


def test_gloo_on_a_shared_device(ray_start_4_cpus_2_gpus, tmp_path):
    """Workers on one device use gloo instead of NCCL."""
    result = fit(tmp_path, 0.5, torch_config=OneGpuConfig())
    assert result == {"backend": "gloo", "sum": 2.0}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_explicit_nccl_on_a_shared_device(ray_start_4_cpus_2_gpus, tmp_path, backend):
    """Explicit nccl raises an error that names the ranks, the device and the node."""
    shared = f"ranks 0, 1 share GPU-1b2c on node {ray.util.get_node_ip_address()}"
    with pytest.raises(TrainingFailedError, match=shared):
        fit(tmp_path, 0.5, torch_config=OneGpuConfig(backend))


@needs_torch_without_nccl
def test_nccl_that_may_share(ray_start_4_cpus_2_gpus, tmp_path):
    """NCCL is used if the user allows it to share devices."""
    config = OneGpuConfig("nccl", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    with pytest.raises(TrainingFailedError, match="doesn't have NCCL built in"):
        fit(tmp_path, 0.5, torch_config=config)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([("a", "10.0.0.1"), ("b", "10.0.0.1")], ""),
        ([None, None], ""),
        ([("a", "10.0.0.1"), None, ("a", "10.0.0.1")], "ranks 0, 2 share GPU-a"),
        # Two containers of one machine can be separate nodes.
        ([("a", "10.0.0.1"), ("a", "10.0.0.2")], "ranks 0, 1 share GPU-a"),
        (
            [(uuid, "10.0.0.1") for uuid in "abab"],
            "ranks 0, 2 share GPU-a on node 10.0.0.1; "
            "ranks 1, 3 share GPU-b on node 10.0.0.1",
        ),
    ],
)
def test_description_of_shared_devices(devices, expected):
    """Ranks are grouped by UUID; ranks without a device share none."""
    from ray.train.torch.config import _describe_shared_devices

    described = _describe_shared_devices(devices)
    assert described.startswith(expected)
    assert bool(described) == bool(expected)


@needs_gpu
def test_half_a_gpu(ray_start_4_cpus_2_gpus, tmp_path):
    """The script of ray-project/ray#48012: two workers on a real device."""
    assert fit(tmp_path, 0.5) == {"backend": "gloo", "sum": 2.0}
