"""Run Ray's own tests from a checkout of Ray with the installed Ray and, if requested, with FracTorchConfig.

Imported at the start of every Python process of a suite, including Ray's workers. It uses only the standard library and does nothing before
a test or Ray imports the modules named here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

# A wheel of Ray has no tests. The tests of Ray Train import helpers from these packages.
_PACKAGES = ("ray.tests", "ray.train.tests", "ray.train.v2.tests", "ray.data.tests", "ray.tune.tests", "ray.air.tests")
_TORCH = "ray.train.torch"
_DATA_PARALLEL = "ray.train.v2.api.data_parallel_trainer"
# A checkout may be older than the installed Ray: only a test that uses a missing name fails, not its file.
_GONE = ("TorchPredictor", "TorchDetectionPredictor")


def provide(checkout: Path) -> None:
    """Make Ray's packages of tests importable.

    Args:
        checkout: Root of a checkout of Ray's repository. Only modules that the installed Ray lacks come from there.
    """
    sys.meta_path.append(_Tests(checkout / "python"))
    sys.meta_path.insert(0, _After(_TORCH, _add_gone_names))


def swap(backend: str | None) -> None:
    """Make every TorchTrainer of this process use FracTorchConfig, after Ray's torch trainers are imported.

    Args:
        backend: ``backend`` of each FracTorchConfig without one; None leaves it to FracTorchConfig.
    """
    sys.meta_path.insert(0, _After(_TORCH, partial(_use_frac_config, backend)))
    # A worker may import a module of the package first, and that module Ray's trainers, which need the whole package.
    sys.meta_path.insert(0, _After("ray_fracbackend", lambda _: import_module(_TORCH)))


def start_groups() -> None:
    """Make every V2 DataParallelTrainer without a backend start a process group, with the TorchConfig of its process.

    Ray's tests of failures, elastic runs and checkpoints train without a backend, so otherwise they would not test ours.
    """
    sys.meta_path.insert(0, _After(_DATA_PARALLEL, _with_a_group))


class _Tests:
    """Find Ray's packages of tests in a checkout, after all finders of the installed Ray."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a package, whose modules Python then finds by its path, or None."""
        if name not in _PACKAGES:
            return None
        folder = self._root.joinpath(*name.split("."))
        init = folder / "__init__.py"
        if init.exists():
            return spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
        if not folder.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


class _After:
    """Call a function for one module after it has been executed, before other code sees it. May be nested."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec from the other finders, with a loader that also calls the function."""
        if name != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def _add_gone_names(module: ModuleType) -> None:
    for name in _GONE:
        vars(module).setdefault(name, None)


def _use_frac_config(backend: str | None, module: ModuleType) -> None:
    # The import does this after the module's code, which includes this function, but the package needs it now.
    sys.modules["ray.train"].torch = module
    # First, so that its base class and its checks for a plain TorchConfig use Ray's own.
    from ray_fracbackend.config import FracTorchConfig
    from ray_fracbackend.integrations.trainers import replace_torch_config

    if backend is not None:
        FracTorchConfig.__post_init__ = _with_default(backend, FracTorchConfig.__post_init__)
    replace_torch_config({})
    module.TorchConfig = FracTorchConfig


def _with_default(backend: str, post_init: Callable[[object], None]) -> Callable[[object], None]:
    def __post_init__(self: object) -> None:
        # FracTorchConfig has not set its own values yet: "auto" is the default of its field.
        if self.backend in (None, "", "auto"):
            self.backend = backend
        post_init(self)

    return __post_init__


def _with_a_group(module: ModuleType) -> None:
    init = module.DataParallelTrainer.__init__

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        if kwargs.get("backend_config") is None:
            kwargs["backend_config"] = import_module(_TORCH).TorchConfig()
        init(self, *args, **kwargs)

    module.DataParallelTrainer.__init__ = __init__
