"""Misspelled names, a class in place of an object, and what print() shows."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest
from ray.train.torch import TorchConfig

import ray_fracbackend
from ray_fracbackend import FracTorchConfig, VerificationResult
from ray_fracbackend.decide.settings import CHOICES, setting_names
from ray_fracbackend.integrations.trainers import frac_config
from tests.unit.builders import worker


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (
            (),
            {"on_missing_gpu": "cpu"},
            r"FracTorchConfig\(on_missing_gpu='cpu'\): there is no setting .* did you mean on_missing_cuda\?",
        ),
        ((), {"zzz": 1}, r"the settings are backend, init_method, timeout_s, on_shared_device"),
        (
            ("gloo", "env", 100, "gloo"),
            {},
            r"only backend, init_method, timeout_s can be given by position.*on_shared_device='gloo'",
        ),
    ],
)
def test_a_wrong_name_of_a_setting(arguments, settings, message):
    """The error is Python's TypeError, with the value and the fix."""
    with pytest.raises(TypeError, match=message):
        FracTorchConfig(*arguments, **settings)


def test_a_choice_that_is_misspelled():
    """The error suggests the nearest choice."""
    with pytest.raises(ValueError, match=r"on_shared_device='glo'.*must be one of .*did you mean 'gloo'\?"):
        FracTorchConfig(on_shared_device="glo")


def test_any_attribute_can_be_set():
    """As on TorchConfig."""
    config = FracTorchConfig()
    config.backend, config._private, config.verified = "gloo", 1, True
    for other in (copy.copy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other.backend == "gloo"


def test_a_copy_with_a_misspelled_setting():
    """dataclasses.replace() raises the same error."""
    with pytest.raises(TypeError, match=r"there is no setting verfy; did you mean verify\?"):
        dataclasses.replace(FracTorchConfig(), verfy=False)


def test_signature():
    """help() and editors show names, types and defaults; all settings after TorchConfig's three are keyword-only."""
    parameters = inspect.signature(FracTorchConfig).parameters
    assert tuple(parameters) == setting_names()
    assert {name: each.default for name, each in parameters.items()} == FracTorchConfig().to_dict()
    assert [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY] == list(setting_names()[3:])
    assert parameters["on_missing_cuda"].annotation == "Literal['error', 'cpu']"


def test_choices_are_those_of_the_types():
    """The command line and the checks of values read them from the types."""
    assert CHOICES == {
        "init_method": ("env", "tcp"),
        "on_shared_device": ("auto", "ipc", "staged", "gloo", "nccl", "error"),
        "on_missing_cuda": ("error", "cpu"),
    }


@pytest.mark.parametrize("name", ["backend_cls", "train_func_context"])
def test_the_class_in_place_of_an_object(name):
    """What Ray reads of it raises with the fix. inspect.getmembers(), which completion uses, does not fail."""
    assert name in dict(inspect.getmembers(FracTorchConfig))
    with pytest.raises(TypeError, match=r"torch_config=FracTorchConfig: it must be an object .*FracTorchConfig\(\)"):
        getattr(FracTorchConfig, name)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"backend": "gloo"}, r"FracTorchConfig\(backend='gloo'\)"),
        (TorchConfig, r"torch_config=TorchConfig\(\)"),
        ("gloo", r"torch_config='gloo': it must be a TorchConfig"),
    ],
)
def test_run_and_the_callback_refuse_what_is_no_config(given, fix):
    """A dict and a class are errors with the fix."""
    with pytest.raises(TypeError, match=fix):
        frac_config(given, {})


def test_values_that_ray_replaces_by_a_default():
    """TorchTrainer creates a TorchConfig in place of None and of any other false value; ours is a FracTorchConfig."""
    assert frac_config({}, {"verify": False}) == frac_config(None, {"verify": False}) == FracTorchConfig(verify=False)


@pytest.mark.full(but="win32")
def test_completion_after_all_names_are_used():
    """In a new process: the modules that the names import are not offered, only those that a script imports itself."""
    script = (
        "import ray_fracbackend, ray_fracbackend.ipc\n"
        "for name in ray_fracbackend.__all__: getattr(ray_fracbackend, name)\n"
        "print(*(name for name in dir(ray_fracbackend) if not name.startswith('__')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {*ray_fracbackend.__all__, "ipc"}


def test_a_module_that_is_not_imported(monkeypatch):
    """The error names the import."""
    monkeypatch.delitem(vars(ray_fracbackend), "integrations", raising=False)
    with pytest.raises(AttributeError, match=r"import ray_fracbackend\.integrations first"):
        ray_fracbackend.integrations  # noqa: B018


def test_names_of_the_module():
    """Completion offers public names only, and a misspelled one is suggested."""
    names = [name for name in dir(ray_fracbackend) if not name.startswith("__")]
    assert set(names) <= {*ray_fracbackend.__all__, "integrations", "ipc", "staged"}
    with pytest.raises(AttributeError, match=r"did you mean FracTorchConfig\?"):
        ray_fracbackend.FracTorchConfg  # noqa: B018


def test_repr_is_the_call():
    """Settings with their defaults are left out."""
    assert repr(FracTorchConfig()) == "FracTorchConfig()"
    assert eval(repr(FracTorchConfig("gloo", verify=False))) == FracTorchConfig("gloo", verify=False)


def test_print():
    """Aligned lines with units."""
    result = VerificationResult(
        backend="gloo",
        device="cpu",
        world_size=2,
        latency_s=5e-4,
        bandwidth_bytes_per_s=1e9,
        rank_seconds=(2e-3, 3e-3),
        total_s=0.02,
    )
    assert str(result).splitlines() == [
        "verified  2 ranks over gloo on cpu: every result is exact",
        "speed     all_reduce 0.50 ms at 1 KiB, 1000 MB/s at 1 MiB",
        "slowest   rank 1, 3.00 ms for both sizes (fastest: rank 0, 2.00 ms)",
        "time      20 ms for the whole verification",
    ]
    assert str(worker(0)).splitlines()[0].startswith("rank 0")
