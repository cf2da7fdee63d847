"""The public configuration: fields, validation, representations."""

import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.train.torch import TorchConfig

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.integrations.trainers import frac_config
from ray_fracbackend.start.backend import FracTorchBackend

_DEFAULTS = {
    "backend": "auto",
    "init_method": "env",
    "timeout_s": 1800,
    "on_shared_device": "auto",
    "on_missing_cuda": "error",
    "verify": True,
    "start_timeout_s": 300.0,
    "master_addr": None,
    "master_port": None,
    "limit_gpu_memory": False,
}

_BAD = [
    ("backend", "cpu:gloo, cuda:nccl", "without spaces"),
    ("backend", "cpu:ipc,cuda:nccl", "are part of no other pair"),
    ("backend", "cpu:staged,cuda:gloo", "are part of no other pair"),
    ("backend", "nccl,gloo", "a pair such as"),
    ("backend", "cpu:", "a pair such as"),
    ("backend", 3, "must be 'auto'"),
    ("init_method", "file", "must be one of 'env', 'tcp'"),
    ("timeout_s", 0, "above 0"),
    ("timeout_s", float("nan"), "finite"),
    ("timeout_s", "30", "number of seconds"),
    ("timeout_s", True, "number of seconds"),
    ("timeout_s", 1e10, "up to 1e9"),
    ("timeout_s", 10**400, "up to 1e9"),
    ("on_shared_device", "share", "must be one of 'auto', 'ipc', 'staged', 'gloo', 'nccl', 'error'"),
    ("on_shared_device", "glo", "(did you mean 'gloo'?)"),
    ("on_missing_cuda", "gpu", "must be one of 'error', 'cpu'"),
    ("verify", "yes", "must be True or False"),
    ("verify", 1, "must be True or False"),
    ("start_timeout_s", float("inf"), "finite"),
    ("start_timeout_s", None, "number of seconds"),
    ("master_addr", "", "must be an IP address or a host name"),
    ("master_addr", "tcp://10.0.0.1", "without scheme"),
    ("master_addr", "10.0.0.1:29500", "without scheme, port"),
    ("master_addr", "[fd00::1]", "brackets"),
    ("master_port", 0, "from 1 to 65535"),
    ("master_port", 65536, "from 1 to 65535"),
    ("master_port", "29500", "from 1 to 65535"),
    ("master_port", True, "from 1 to 65535"),
    ("master_port", (29600, 29500), "inclusive range"),
    ("master_port", (1, 2, 3), "inclusive range"),
    ("limit_gpu_memory", 0.5, "must be True or False"),
]


def test_signature():
    """Names, order and defaults are public; TorchConfig's three fields stay positional, ours are keyword-only."""
    parameters = inspect.signature(FracTorchConfig).parameters
    assert [(name, each.default) for name, each in parameters.items()] == list(_DEFAULTS.items())
    assert [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY] == list(_DEFAULTS)[3:]
    assert parameters["on_missing_cuda"].annotation == "Literal['error', 'cpu']"
    with pytest.raises(TypeError, match="on_missing_gpu"):
        FracTorchConfig(on_missing_gpu="cpu")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, "auto"),
        ("", "auto"),
        ("GLOO", "gloo"),
        ("Nccl", "nccl"),
        ("CPU:gloo,CUDA:NCCL", "cpu:gloo,cuda:nccl"),
        ("Mine", "mine"),
    ],
)
def test_spellings_of_a_backend(given, taken):
    """Those that torch accepts, also in another script's TorchConfig. TorchTrainer would replace a falsy one by nccl or gloo."""
    assert FracTorchConfig(backend=given).backend == taken
    assert frac_config(TorchConfig(backend=given), {}).backend == taken


_NEWER_RAY = """
import dataclasses, ray.train.torch, ray.train.torch.config as config
@dataclasses.dataclass
class TorchConfig(config.TorchConfig):
    bind_device: bool = False
ray.train.torch.TorchConfig = config.TorchConfig = TorchConfig
from ray_fracbackend import FracTorchConfig
from ray_fracbackend.integrations.trainers import frac_config
from ray_fracbackend.decide.settings import unknown_fields_warning
taken = frac_config(TorchConfig(backend="gloo", bind_device=True), {"verify": False})
print(taken, *(unknown_fields_warning(each, TorchConfig()) for each in (taken, FracTorchConfig(verify=False))), sep="\\n")
"""


def test_a_field_that_a_newer_ray_adds():
    """It is taken from the script's TorchConfig; a value that is not the default is in the warning, and no other setting."""
    command = [sys.executable, "-c", _NEWER_RAY]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert lines == [
        "FracTorchConfig(backend='gloo', bind_device=True, verify=False)",
        "bind_device=True of this Ray's TorchConfig has no effect with FracTorchConfig; omit it, or use TorchConfig",
        "None",
    ]


@pytest.mark.parametrize(
    ("backend", "handed_over", "level", "said"),
    [
        ("glo", "glo", "WARNING", "backend 'glo' is left to Ray Train (did you mean 'gloo'?)"),
        ("mine", "mine", "WARNING", "backend 'mine' is left to Ray Train"),
        ("auto", None, "INFO", "TPU workers are left to Ray Train"),
    ],
)
def test_a_start_left_to_ray_gets_the_whole_config(monkeypatch, caplog, backend, handed_over, level, said):
    """Also a field that a later Ray adds to TorchConfig. An unknown name is a warning: torch would refuse it later."""
    caplog.set_level("INFO", logger="ray.train.fracbackend")
    seen = []
    monkeypatch.setattr(TorchConfig().backend_cls, "on_start", lambda self, group, config: seen.append(config))
    config = FracTorchConfig(backend=backend, init_method="tcp", timeout_s=7)
    config.field_of_a_later_ray = 3
    group = SimpleNamespace(get_resources_per_worker=lambda: {"TPU": 1})
    FracTorchBackend().on_start(group, config)
    (stock,) = seen
    assert (stock.backend, stock.init_method, stock.timeout_s, stock.field_of_a_later_ray) == (handed_over, "tcp", 7, 3)
    assert config.backend == backend
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, f"ray_fracbackend: {said}")


@pytest.mark.parametrize(("name", "value", "rule"), _BAD, ids=[f"{n}={v!r}" for n, v, _ in _BAD])
def test_wrong_values(name, value, rule):
    with pytest.raises(ValueError, match="must be") as caught:
        FracTorchConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("master_port", (1, 1)), ("master_addr", "fd00::3"), ("timeout_s", 0.5)])
def test_right_values(name, value):
    assert getattr(FracTorchConfig(**{name: value}), name) == value


def test_a_change_after_construction_is_checked_by_the_start():
    config = FracTorchConfig()
    config.on_shared_device = "maybe"
    with pytest.raises(ValueError, match="on_shared_device='maybe'"):
        config.checked_copy()


@pytest.mark.parametrize("given", [TorchConfig, {"backend": "gloo"}, "gloo"])
def test_what_is_no_config_is_refused(given):
    """By the command ``run`` and by the callback."""
    with pytest.raises(TypeError, match=r"torch_config=.* must be an object"):
        frac_config(given, {})


def test_values_that_ray_replaces_by_a_default():
    """TorchTrainer creates a TorchConfig in place of None and of any other false value; ours is a FracTorchConfig."""
    assert frac_config({}, {"verify": False}) == frac_config(None, {"verify": False}) == FracTorchConfig(verify=False)


def test_repr_is_the_call():
    """Settings with their defaults are left out."""
    assert repr(FracTorchConfig()) == "FracTorchConfig()"
    assert repr(FracTorchConfig("gloo", verify=False)) == "FracTorchConfig(backend='gloo', verify=False)"


def test_to_dict_is_json_ready_and_whole():
    assert json.loads(json.dumps(FracTorchConfig(master_port=(1, 2)).to_dict())) == {**_DEFAULTS, "master_port": [1, 2]}
