"""Variables that a start set are distinguished from the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from ray_fracbackend.worker import environment
from ray_fracbackend.worker.state import STATE

NAME = "RFB_TEST_VARIABLE"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(STATE, "variables", {})
    with mock.patch.dict(os.environ):
        yield


def test_defaults_leave_the_users_value() -> None:
    os.environ[NAME] = "user"
    environment.set_default({NAME: "ours"})
    assert os.environ[NAME] == "user"


def test_a_second_start_does_not_treat_the_first_ones_variables_as_the_users() -> None:
    """The second start may set the first one's variables again, and they are not reported as the user's."""
    environment.set_default({NAME: "first"})
    assert NAME not in environment.user_environment()
    environment.set_default({NAME: "second"})
    assert os.environ[NAME] == "second"


def test_a_value_that_the_user_changed_is_the_users() -> None:
    environment.set_default({NAME: "ours"})
    os.environ[NAME] = "user"
    assert environment.user_environment()[NAME] == "user"
    environment.clear()
    assert os.environ[NAME] == "user"


def test_variables_of_the_start_are_removed() -> None:
    """Those that are named, or all: a start that sets fewer variables than the previous one does not inherit the rest."""
    os.environ[f"{NAME}_USER"] = "same"
    environment.set_always({NAME: "ours", f"{NAME}_USER": "same", f"{NAME}_2": "stays"})
    assert os.environ[NAME] == "ours"
    environment.clear([NAME, f"{NAME}_USER"])
    assert os.environ[f"{NAME}_2"] == "stays"
    assert NAME not in os.environ
    assert os.environ[f"{NAME}_USER"] == "same"
    environment.clear()
    assert f"{NAME}_2" not in os.environ
