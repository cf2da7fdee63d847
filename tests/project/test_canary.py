"""ci/canary.py: the names that it checks, and its messages."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

_CI = Path(__file__).parents[2] / "ci"


@pytest.fixture(scope="module")
def canary():
    """Import the script as a module."""
    sys.path.insert(0, str(_CI))
    try:
        spec = importlib.util.spec_from_file_location("canary", _CI / "canary.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(_CI))


def test_names_of_a_source(canary):
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


def test_every_name_is_known(canary):
    """The record contains exactly the names in use; after a change run `python3 ci/canary.py --record`."""
    assert sorted(json.loads(canary.KNOWN.read_text())["names"]) == canary.names()


def test_record_holds_for_its_ray(canary):
    """With the recorded Ray there are no differences."""
    known = json.loads(canary.KNOWN.read_text())
    if version("ray") != known["ray"]:
        pytest.skip(f"needs Ray {known['ray']}, the one of the record")
    train = {name: canary.describe(name) for name in canary.names() if ".rllib." not in name}
    assert canary.differences(known, {"ray": known["ray"], "names": train}) == []


def test_differences(canary):
    """A removed name, a name with other parameters and a name that was never checked are distinguished."""
    known = {"ray": "1", "names": {"a:x": "function ()", "a:y": "function ()", "a:z": "class ()", "a:o": "class ()"}}
    found = {"a:x": None, "a:y": "function (self)", "a:z": "class ()", "a:new": "module", "a:o": "not installed: gym"}
    told = canary.differences(known, {"ray": "2", "names": found})
    assert [line.split()[:2] for line in told] == [["VANISHED", "a:x"], ["CHANGED", "a:y"], ["UNKNOWN", "a:new:"]]
    assert "  1: function ()\n  2: function (self)" in told[1]


def test_a_name_that_is_gone(canary):
    """A module or an attribute that Ray no longer has is None, an extra that is not installed is not."""
    assert canary.describe("ray.train.torch.config:_NoSuchBackend") is None
    assert canary.describe("ray.train.no_such_module:name") is None


@pytest.mark.full
@pytest.mark.parametrize("reachable", [False, True])
def test_an_installation_that_fails(tmp_path, monkeypatch, reachable):
    """Without a package index nothing was checked, and the exit code is 2; if an index answers, the failure is reported."""
    index, temporary = tmp_path / "simple", tmp_path / "temporary"
    temporary.mkdir()
    # An index with a Ray, but without the packages that it and the project need.
    (index / "ray").mkdir(parents=True)
    (index / "ray" / "index.html").write_text('<a href="ray-99.0-py3-none-any.whl">ray-99.0-py3-none-any.whl</a>')
    url = index.as_uri() if reachable else "http://127.0.0.1:9/simple"
    environment = {"PIP_INDEX_URL": url, "PIP_RETRIES": "0", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    for name, value in {**environment, "PIP_CONFIG_FILE": os.devnull, "TMPDIR": str(temporary)}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, _CI / "canary.py", "ray"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == (1 if reachable else 2), done.stdout + done.stderr
    assert ("NOTHING WAS CHECKED: no package index could be reached" in done.stdout) != reachable
    assert ("the newest ray cannot be installed" in done.stdout) == reachable
    assert list(temporary.iterdir()) == []
