"""Code of users that type checkers accept. test_typing.py has mypy and pyright check it."""

from __future__ import annotations

import copy
import dataclasses

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from typing_extensions import assert_type

import ray_fracbackend
import ray_fracbackend.ipc
from ray_fracbackend import (
    DeviceCheck,
    FracBackendError,
    FracTorchConfig,
    StartReport,
    VerificationError,
    VerificationResult,
    check_devices,
    get_start_report,
    report_rank0,
    verify_process_group,
)


def train_func(config: dict[str, float]) -> None:
    report = get_start_report()
    assert_type(report, "StartReport | None")
    if report is not None:
        print(report, report.backend.upper(), report.plan.decision.reason, report.rendezvous.master_port + 1)
        assert_type(report.warnings, "tuple[str, ...]")
        for worker in report.workers:
            print(worker, worker.node_ip, worker.device.uuid if worker.device else "cpu")
    report_rank0({"loss": config["lr"]})


# TorchConfig's three settings by position or by name, ours by name.
FracTorchConfig()
FracTorchConfig("gloo", "tcp", 60)
FracTorchConfig("gloo", "env", 0.5, on_shared_device="staged", on_missing_cuda="cpu")
FracTorchConfig(backend=None, verify=False, limit_gpu_memory=True, start_timeout_s=30)
FracTorchConfig(backend="my_backend", master_addr="10.0.0.3", master_port=29500)
config = FracTorchConfig(master_port=(29500, 29600))

config.on_shared_device = "gloo"
config.timeout_s = 60
config.master_port = 29501
print(config, config.to_dict()["backend"], config.init_method.upper())
assert_type(dataclasses.replace(config, verify=False), FracTorchConfig)
assert_type(copy.copy(config), FracTorchConfig)

trainer = TorchTrainer(
    train_func,
    train_loop_config={"lr": 0.1},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5}),
    run_config=RunConfig(name="typed"),
    torch_config=config,
)


def stock_or_ours(is_shared: bool) -> TorchConfig:
    return FracTorchConfig() if is_shared else TorchConfig(backend="nccl")


@dataclasses.dataclass
class OwnConfig(FracTorchConfig):
    """A subclass with a setting of its own."""

    _: dataclasses.KW_ONLY
    team: str = "vision"


OwnConfig("gloo", on_missing_cuda="cpu", team="audio").team.upper()


def without_ray(group: torch.distributed.ProcessGroup | None) -> tuple[float, str]:
    try:
        result = verify_process_group(group, device="cpu", timeout_s=30)
    except VerificationError as error:
        assert_type(error.ranks, "tuple[int, ...]")
        assert_type(error.kind, str)
        raise
    except FracBackendError as error:
        raise RuntimeError(error.found) from error
    assert_type(result, VerificationResult)
    check = check_devices(group)
    assert_type(check, DeviceCheck)
    return result.latency_s, check.backend + ray_fracbackend.__version__


def newest(reports: list[StartReport]) -> str:
    return max(report.date for report in reports)


ray_fracbackend.ipc.register()
