"""The master address of a torch process group."""

import os
import sys
from types import SimpleNamespace

import pytest

import ray
import ray.train.torch.config
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend


class AddressBackend(_TorchBackend):
    """Start as on the given platform, with a node address like that of a VPN."""

    def on_start(self, worker_group, backend_config):
        # Ray uses this address only if RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 is set.
        ray.train.torch.config.sys = SimpleNamespace(platform=backend_config.platform)
        super().on_start(worker_group, backend_config)


class AddressConfig(TorchConfig):
    def __init__(self, platform, init_method):
        super().__init__("gloo", init_method)
        self.platform = platform

    @property
    def backend_cls(self):
        return AddressBackend


def get_master_address():
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return os.environ.get("MASTER_ADDR"), store.host


@pytest.mark.skipif(sys.platform == "win32", reason="its nodes are at 127.0.0.1")
@pytest.mark.parametrize("init_method", ["env", "tcp"])
@pytest.mark.parametrize("platform", ["win32", "linux"])
def test_master_address_on_one_node(ray_start_4_cpus, tmp_path, platform, init_method):
    """On the only node of a Windows cluster it is the loopback address."""
    trainer = TorchTrainer(
        get_master_address,
        torch_config=AddressConfig(platform, init_method),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    node = ray.util.get_node_ip_address()
    assert node != "127.0.0.1"
    address = "127.0.0.1" if platform == "win32" else node
    expected = address if init_method == "env" else None
    assert trainer.fit().return_value == (expected, address)
