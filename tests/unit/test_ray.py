"""Missing private Ray names: the package still imports, and only the function that needs the name fails."""

import ast
import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from ray_fracbackend import _ray
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.checkpoints.turns import copy_in_turn

_SOURCE = Path(_ray.__file__).read_text()


def lazy_names():
    """Return function, module and name of every private name that _ray imports."""
    for function in ast.parse(_SOURCE).body:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "_private":
                module, *names = map(ast.literal_eval, node.args)
                yield from ((function.name, module, name) for name in names)


class V1Group:
    """A V1 worker group with the parts that _ray uses."""


class V2Group:
    """A V2 worker group without a run."""

    def get_workers(self):
        return []


def learners():
    with _ray.learner_backend_config(None):
        pass


def copies():
    """Copy files with the storage of each engine."""
    for is_v2 in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ray, "v2_enabled", lambda is_v2=is_v2: is_v2)
            with suppress(ModuleNotFoundError):  # Ray 2.40 has no V2
                for name in ("ray.train._internal.storage", "ray.train.v2._internal.execution.storage"):
                    copy_files = getattr(importlib.import_module(name), "_pyarrow_fs_copy_files", None)
                    if copy_files is not None:  # restored together with the patch
                        patch.setattr(sys.modules[name], "_pyarrow_fs_copy_files", copy_files)
            _ray.wrap_checkpoint_copies(copy_in_turn)


_CALLS = {
    "wrap_checkpoint_copies": copies,
    "set_torch_distributed_env": _ray.set_torch_distributed_env,
    "worker_devices": _ray.worker_devices,
    "train_on_cpu": _ray.train_on_cpu,
    "worker_group_callback_class": _ray.worker_group_callback_class,
    "replace_backend_config": lambda: _ray.replace_backend_config(V2Group(), lambda config: config),
    "learner_backend_config": learners,
    "send_token": _ray.send_token,
    "results_folder": lambda: _ray.results_folder(V1Group()),
    "started_here": _ray.started_here,
}
_NAMES = sorted(lazy_names())

# Without V1's worker groups, with another name for stock Ray's backend class, and without all lazily imported names.
_WITHOUT_PRIVATE_NAMES = f"""
import importlib, sys
import ray.train.torch, ray.tune, ray.train.torch.config as config

stock = config._TorchBackend
del config._TorchBackend
ray.train.torch.TorchConfig.backend_cls = property(lambda self: stock)
import ray.train._internal.worker_group
del ray.train._internal.worker_group.WorkerGroup
for _, module, name in {_NAMES}:
    if module in sys.modules and hasattr(sys.modules[module], name):
        delattr(sys.modules[module], name)

import ray_fracbackend
assert issubclass(ray_fracbackend.FracTorchConfig().backend_cls, stock)
"""


def test_the_package_imports_without_private_names():
    subprocess.run([sys.executable, "-c", _WITHOUT_PRIVATE_NAMES], check=True, timeout=200)


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from types import SimpleNamespace
from ray.train.v2._internal.callbacks import BackendSetupCallback
from ray_fracbackend.integrations.callback import FracTorchCallback

config = SimpleNamespace(backend_cls=lambda: None)
group = SimpleNamespace(_callbacks=[BackendSetupCallback(config)])
FracTorchCallback().after_worker_group_start(group)
assert group._callbacks[0]._backend_config is config
"""


@pytest.mark.skipif(not v2_enabled(), reason="callbacks are of the V2 engine")
def test_a_callback_for_all_runs_of_a_cluster_needs_no_torch():
    """Jobs of XGBoost or JAX on images without torch start with the callback."""
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=200)


def test_every_function_is_called_here():
    assert {function for function, _, _ in _NAMES} == set(_CALLS)


@pytest.mark.parametrize("module_is_gone", [False, True], ids=["name", "module"])
@pytest.mark.parametrize(("function", "module", "name"), _NAMES)
def test_a_name_that_is_gone(monkeypatch, function, module, name, module_is_gone):
    """The function fails with Ray's version, the name, the function, the checked versions and the advice."""
    if ".rllib." in module:
        pytest.importorskip("gymnasium", reason="needs Ray's extra rllib")
    with suppress(ModuleNotFoundError):  # Ray 2.40 has no V2
        monkeypatch.delattr(importlib.import_module(module), name)
    if module_is_gone:
        monkeypatch.setitem(sys.modules, module, None)
    first = next(other for other_function, _, other in lazy_names() if other_function == function)
    with pytest.raises(
        ImportError, match=r"install one of these, or a ray-fracbackend that supports this Ray"
    ) as caught:
        _CALLS[function]()
    assert f"Ray {ray.__version__} has no {module}.{first if module_is_gone else name}, " in str(caught.value)
    assert f" which {function}() of ray_fracbackend/_ray.py needs" in str(caught.value)
    assert "to 2.60" in str(caught.value)


def test_a_package_that_ray_needs_is_not_a_private_name(monkeypatch):
    """If an extra of Ray is not installed, Python's own error is kept."""
    missing = ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")

    def needs_gymnasium(module):
        raise missing

    monkeypatch.setattr(_ray.importlib, "import_module", needs_gymnasium)
    with pytest.raises(ModuleNotFoundError) as caught:
        learners()
    assert caught.value is missing


def test_v2_needs_nothing_of_v1(monkeypatch):
    """A V2 group without a run has no results folder, with or without V1's session in Ray."""
    monkeypatch.setitem(sys.modules, "ray.train._internal.session", None)
    assert _ray.results_folder(V2Group()) is None


@pytest.mark.parametrize("accelerator", ["HPU", "neuron_cores"])
def test_resources_of_an_old_v1_group(accelerator):
    """Before Ray 2.49 the group has no method for them; accelerators that Ray starts itself are included."""

    class Base:
        pass

    class OldGroup:
        num_gpus_per_worker = 0
        workers = ()
        _remote_cls = ray.remote(num_cpus=1, num_gpus=0, memory=0, resources={accelerator: 2})(Base)

    assert _ray.resources_per_worker(OldGroup()) == {"GPU": 0, accelerator: 2}
