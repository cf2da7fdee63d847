"""Old names of modules, which still work and say where the new ones are."""

import importlib
import sys

import pytest

from ray_fracbackend._ray import v2_enabled

_MOVED = [
    pytest.param(
        "callback",
        "integrations.callback",
        "FracTorchCallback",
        marks=pytest.mark.skipif(not v2_enabled(), reason="callbacks are of the V2 engine"),
    ),
    ("rllib", "integrations.rllib", "learners_use"),
    ("placement", "cli.plan", "plan_workers"),
]


@pytest.mark.parametrize(("old", "new", "name"), _MOVED)
def test_old_modules_warn_and_have_the_same_names(old, new, name):
    """A script of yesterday runs, with a DeprecationWarning that names the new module."""
    sys.modules.pop(f"ray_fracbackend.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"import {name} from ray_fracbackend.{new}"):
        found = importlib.import_module(f"ray_fracbackend.{old}")
    assert getattr(found, name) is getattr(importlib.import_module(f"ray_fracbackend.{new}"), name)
