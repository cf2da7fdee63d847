"""Ray's own tests from a checkout of Ray, against the Ray that is installed and, if asked, with FracTorchConfig.

Imported at the start of every Python process of a suite, Ray's workers included: the standard library alone, and no work
before a test or Ray imports what is named here.
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

# A wheel of Ray has no tests. What the tests of Ray Train import from these is helpers.
_PACKAGES = ("ray.tests", "ray.train.tests", "ray.train.v2.tests", "ray.data.tests", "ray.tune.tests", "ray.air.tests")
_TORCH = "ray.train.torch"
_DATA_PARALLEL = "ray.train.v2.api.data_parallel_trainer"
# A checkout may be older than the Ray that is installed: a test that uses a name which has gone fails, and not its file.
_GONE = ("TorchPredictor", "TorchDetectionPredictor")


def provide(checkout: Path) -> None:
    """Makes Ray's packages of tests importable.

    Args:
        checkout: Root of a checkout of Ray's repository. Only what the installed Ray lacks comes from there.
    """
    sys.meta_path.append(_Tests(checkout / "python"))
    sys.meta_path.insert(0, _After(_TORCH, _add_gone_names))


def swap(backend: str | None) -> None:
    """Makes every TorchTrainer of this process start with FracTorchConfig, once Ray's torch trainers are imported.

    Args:
        backend: The ``backend`` of each FracTorchConfig that says None or nothing; None leaves it to FracTorchConfig.
    """
    sys.meta_path.insert(0, _After(_TORCH, partial(_use_frac_config, backend)))
    # A worker may import a module of the package first, and that one Ray's trainers, which need the whole package.
    sys.meta_path.insert(0, _After("ray_fracbackend", lambda _: import_module(_TORCH)))


def start_groups() -> None:
    """Makes every DataParallelTrainer of V2 that has no backend start a process group, with the TorchConfig of its process.

    Ray's tests of failures, of elastic runs and of what is kept train without one, so that they would say nothing of it.
    """
    sys.meta_path.insert(0, _After(_DATA_PARALLEL, _with_a_group))


class _Tests:
    """Finds Ray's packages of tests in a checkout, after all finders that know the installed Ray."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """What importlib asks: a package, whose modules Python then finds by its path, or None."""
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
    """Does something to one module when it has been executed, before any other code sees it. May be nested."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """What importlib asks: the spec that the finders behind this one have, with a loader that does more."""
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
    # Import does this once the module's code has run, which includes this function; the package needs it now.
    sys.modules["ray.train"].torch = module
    # First, so that its base class and its tests for a plain TorchConfig have Ray's own.
    from ray_fracbackend.config import FracTorchConfig
    from ray_fracbackend.integrations.trainers import replace_torch_config

    if backend is not None:
        FracTorchConfig.__post_init__ = _with_default(backend, FracTorchConfig.__post_init__)
    replace_torch_config({})
    module.TorchConfig = FracTorchConfig


def _with_default(backend: str, post_init: Callable[[object], None]) -> Callable[[object], None]:
    def __post_init__(self: object) -> None:
        # FracTorchConfig has written neither of its own yet: "auto" is the default of its field.
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
