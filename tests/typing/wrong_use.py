"""Mistakes of users that type checkers find, on each line with the comment `error`. test_typing.py has mypy and pyright check it."""

from ray.train.torch import TorchTrainer

import ray_fracbackend
from ray_fracbackend import FracTorchConfig, get_start_report, verify_process_group


def train_func() -> None:
    print(get_start_report().backend)  # error: None where the start was Ray's own
    report = get_start_report()
    if report is not None:
        print(report.bakend)  # error: misspelled
        report.date = "today"  # error: frozen


def misspelled_import() -> object:
    """Import a name that the package does not have."""
    from ray_fracbackend import FracTorchConfg  # error: misspelled

    return FracTorchConfg


# By position only what TorchConfig has.
FracTorchConfig("gloo", "env", 100, "gloo")  # error: by name only
FracTorchConfig(3)  # error: a number

# Misspelled settings, and values that are none of the choices.
FracTorchConfig(on_missing_gpu="cpu")  # error: on_missing_cuda
FracTorchConfig(on_missing_cuda="cup")  # error: cpu
FracTorchConfig(on_shared_device="share")  # error: no choice
FracTorchConfig(init_method="file")  # error: env or tcp
FracTorchConfig(timeout_s="30")  # error: a string
FracTorchConfig(master_port="29500")  # error: a string
FracTorchConfig(master_port=(29500, 29550, 29600))  # error: three ports
FracTorchConfig(verify="no")  # error: a string
FracTorchConfig(master_addr=10)  # error: a number

config = FracTorchConfig()
config.on_mising_cuda = "cpu"  # error: misspelled
config.on_missing_cuda = "cup"  # error: cpu
print(config.on_shared_devices)  # error: misspelled

# The class, and a dict, in place of an object.
TorchTrainer(train_func, torch_config=FracTorchConfig)  # error: the class
TorchTrainer(train_func, torch_config={"backend": "gloo"})  # error: a dict

# Names that the package does not have.
print(ray_fracbackend.FracTorchConfg)  # error: misspelled
print(ray_fracbackend.importlib)  # error: not ours
print(verify_process_group().latency_ms)  # error: latency_s
