"""A user's script, for type checkers only. A line with ``# error: CODE`` is an error of that code in mypy; all others are not."""

from ray.train.torch import TorchTrainer

from ray_fracbackend import FracTorchConfig, StartReport, get_start_report, verify_process_group


def train_func() -> None:
    report: StartReport | None = get_start_report()
    if report is not None:
        print(report.backend, report.reason, report.workers[0].node_ip)
    print(verify_process_group(timeout_s=30).latency_s)


TorchTrainer(train_func, torch_config=FracTorchConfig())
FracTorchConfig("gloo", "env", 600, on_shared_device="ipc", on_missing_cuda="cpu", verify=False)
FracTorchConfig(start_timeout_s=60.0, master_addr="10.0.0.3", master_port=(29500, 29600), limit_gpu_memory=True)
FracTorchConfig("gloo", "env", 600, "gloo")  # error: call-arg
FracTorchConfig(on_missing_cuda="cup")  # error: arg-type
FracTorchConfig(on_shared_device="nccl2")  # error: arg-type
FracTorchConfig(init_method="file")  # error: arg-type
FracTorchConfig(on_missing_gpu="cpu")  # error: call-arg
FracTorchConfig(verify="yes")  # error: arg-type
FracTorchConfig().on_mising_cuda = "cpu"  # error: attr-defined
