"""ci/canary.py: the names that it checks, and its messages."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "ci"))

import canary


def test_names_of_a_source():
    """Imports from Ray count, at the top or inside a function, and private attributes of imported modules; nothing else."""
    source = """
from ray.air._internal import device_manager as _dm
from ray.train.torch.config import _TorchBackend
from torch import nn
def call(group):
    _dm._lock, _dm.public, group._own, nn._private
    module = _private("ray.lazy", "first", "_second", since="2.48")
    module.first, module._third, module.public, module._second
    return _private("ray.direct", "_function")._function(), other("ray.no", "name")
"""
    assert set(canary.compat_names(source)) == {
        "ray.air._internal:device_manager",
        "ray.train.torch.config:_TorchBackend",
        "ray.air._internal.device_manager:_lock",
        "ray.lazy:first",
        "ray.lazy:_second",
        "ray.lazy:_third",
        "ray.direct:_function",
    }


def test_every_name_is_known():
    """The record has exactly the names in use; after a change run `python3 ci/canary.py --record`."""
    assert sorted(json.loads(canary.KNOWN.read_text())["names"]) == canary.names()


@pytest.mark.full
def test_record_holds_for_its_ray():
    """With the recorded Ray there are no differences."""
    known = json.loads(canary.KNOWN.read_text())
    if version("ray") != known["ray"]:
        pytest.skip(f"needs Ray {known['ray']}, the one of the record")
    train = {name: canary.describe(name) for name in canary.names() if ".rllib." not in name}
    assert canary.differences(known, {"ray": known["ray"], "names": train}) == []


def test_differences():
    """A removed name, a name with other parameters and a name that was never checked are distinguished."""
    known = {"ray": "1", "names": {"a:x": "function ()", "a:y": "function ()", "a:z": "class ()", "a:o": "class ()"}}
    found = {"a:x": None, "a:y": "function (self)", "a:z": "class ()", "a:new": "module", "a:o": "not installed: gym"}
    told = canary.differences(known, {"ray": "2", "names": found})
    assert [line.split()[:2] for line in told] == [["VANISHED", "a:x"], ["CHANGED", "a:y"], ["UNKNOWN", "a:new:"]]


@pytest.mark.full
@pytest.mark.parametrize("name", ["ray.train.torch.config:_NoSuchBackend", "ray.train.no_such_module:name"])
def test_a_name_that_is_gone(name):
    """A module or an attribute that Ray no longer has is None."""
    assert canary.describe(name) is None
