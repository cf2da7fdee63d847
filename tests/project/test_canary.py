"""The record of ci/canary.py has every private name of Ray in use."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "ci"))

import canary


def test_every_name_is_known():
    """The record has exactly the names in use; after a change run `python3 ci/canary.py --record`."""
    assert sorted(json.loads(canary.KNOWN.read_text())["names"]) == canary.names()


@pytest.mark.full
def test_record_holds_for_its_ray():
    known = json.loads(canary.KNOWN.read_text())
    if version("ray") != known["ray"]:
        pytest.skip(f"needs Ray {known['ray']}, the one of the record")
    train = {name: canary.describe(name) for name in canary.names() if ".rllib." not in name}
    assert canary.differences(known, {"ray": known["ray"], "names": train}) == []
