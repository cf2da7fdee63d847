"""What a start set in the environment is told from what the user set."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ray_fracbackend import environment

NAME = "RFB_TEST_VARIABLE"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(environment, "_set_by_us", {})
    before = dict(os.environ)
    yield
    environment.restore(before)


def test_defaults_leave_the_users_value() -> None:
    """A variable of the user is not replaced by a default."""
    os.environ[NAME] = "user"
    environment.set_default({NAME: "ours"})
    assert os.environ[NAME] == "user"


def test_a_second_start_does_not_take_the_first_for_the_user() -> None:
    """What the first start set may be set anew by the second, and is not reported as the user's."""
    environment.set_default({NAME: "first"})
    assert NAME not in environment.user_environment()
    environment.set_default({NAME: "second"})
    assert os.environ[NAME] == "second"


def test_a_value_that_the_user_changed_is_the_users() -> None:
    """A train function that changes the variable makes it its own."""
    environment.set_default({NAME: "ours"})
    os.environ[NAME] = "user"
    assert environment.user_environment()[NAME] == "user"
    environment.clear()
    assert os.environ[NAME] == "user"


def test_clear_removes_what_earlier_starts_set() -> None:
    """A start that sets less than the last does not inherit the rest."""
    environment.set_always({NAME: "ours"})
    environment.clear()
    assert NAME not in os.environ


def test_setting_the_users_own_value_leaves_it_his() -> None:
    """Where user and start agree, the variable is not removed with the start's."""
    os.environ[NAME] = "same"
    environment.set_always({NAME: "same"})
    environment.clear()
    assert os.environ[NAME] == "same"
