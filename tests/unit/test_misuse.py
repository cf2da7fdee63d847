"""Misspelled names, a class in place of an object, and what print() shows."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from ray.train.torch import TorchConfig

import ray_fracbackend
from ray_fracbackend import FracTorchConfig, VerificationResult
from ray_fracbackend.config import frac_config
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


def test_an_attribute_that_is_misspelled():
    """Assigning to a misspelled setting raises; settings, private and unrelated attributes can be set, as on TorchConfig."""
    config = FracTorchConfig()
    with pytest.raises(AttributeError, match=r"on_mising_cuda = 'cpu': .* did you mean on_missing_cuda\?"):
        config.on_mising_cuda = "cpu"
    config.backend, config._private, config.note = "gloo", 1, "x"
    for other in (copy.copy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other.backend == "gloo"


@pytest.mark.parametrize("name", ["backend_cls", "train_func_context"])
def test_the_class_in_place_of_an_object(name):
    """What Ray reads of it raises with the fix."""
    with pytest.raises(TypeError, match=r"torch_config=FracTorchConfig: it must be an object .*FracTorchConfig\(\)"):
        getattr(FracTorchConfig, name)


@pytest.mark.parametrize(
    ("given", "fix"),
    [({"backend": "gloo"}, r"FracTorchConfig\(backend='gloo'\)"), (TorchConfig, r"torch_config=TorchConfig\(\)")],
)
def test_run_and_the_callback_refuse_what_is_no_config(given, fix):
    """A dict and a class are errors with the fix."""
    with pytest.raises(TypeError, match=fix):
        frac_config(given, {})


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
