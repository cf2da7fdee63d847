"""The backends ipc and staged in Ray Train: chosen explicitly, started, verified, and with Gloo's results."""

from __future__ import annotations

import pytest
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from examples import fashion_mnist_like
from ray_fracbackend import FracTorchConfig
from ray_fracbackend.ipc import host_memory_support
from tests.ray.conftest import HALF_GPU

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}"),
]


def train(config):
    """The documentation's script with a fixed seed; it reports its backend and timeout."""
    import torch.distributed as dist

    from ray_fracbackend import get_start_report

    torch.manual_seed(0)
    report = get_start_report()
    assert (dist.get_backend(), report.backend) == (config["backend"], config["backend"])
    assert report.verification.backend == config["backend"]
    # Adam makes the rounding of a zero gradient (a bias before a batch norm) as large as any other step.
    fashion_mnist_like.Adam = torch.optim.SGD
    fashion_mnist_like.train_func()


def weights(tmp_path, expected_backend, scaling=None, **settings):
    result = TorchTrainer(
        train,
        train_loop_config={"backend": expected_backend},
        torch_config=FracTorchConfig(on_missing_cuda="cpu", **settings),
        scaling_config=scaling or ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=HALF_GPU),
        run_config=RunConfig(name=expected_backend.partition(":")[0], storage_path=str(tmp_path)),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        return torch.load(f"{folder}/model.pt")


@pytest.mark.full
def test_same_weights_as_gloo(tmp_path):
    """Two ranks train with ipc, by backend and by on_shared_device, and with staged to the same weights as with Gloo."""
    expected = weights(tmp_path / "gloo", "gloo")
    # Without CUDA a start with GPUs trains with Gloo instead of staged.
    staged = {"backend": "cpu:gloo,cuda:staged", "scaling": ScalingConfig(num_workers=2)}
    for number, settings in enumerate(({"backend": "ipc"}, {"on_shared_device": "ipc"}, staged)):
        found = weights(tmp_path / str(number), settings.get("backend", "ipc"), **settings)
        assert found.keys() == expected.keys()
        # Both ranks write the single file of this script, and batch norm's running statistics differ between ranks.
        for name in (name for name in expected if "running" not in name):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
