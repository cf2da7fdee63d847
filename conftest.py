"""Two levels of the test suite: by default the tests that a change most likely breaks, in minutes; with --full all tests."""

from __future__ import annotations

import functools
import os
import sys

import pytest

# Ray gives its workers nice 15: beside anything else they hardly run at all, and tests reach their limits.
os.environ.setdefault("RAY_worker_niceness", "0")
# A local Ray gives up after 30 s otherwise, which three of them that start workers at one time on two cores have taken.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "80")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full, which ci/test.py passes on."""
    parser.addoption("--full", action="store_true", help="also run the tests marked full: all parameters, long runs")


def pytest_configure(config: pytest.Config) -> None:
    """Make the default suite the same on every run; --full draws new examples each time, and more of them."""
    if not config.pluginmanager.hasplugin("hypothesispytest"):
        return  # ci/matrix.py runs a few tests with pytest alone
    from hypothesis import settings

    settings.register_profile("default", derandomize=True, deadline=None)
    settings.register_profile("full", max_examples=2_000, deadline=None)
    settings.load_profile("full" if config.getoption("full") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of other systems, and leave those marked full out of the default suite."""
    for item in items:
        _skip_elsewhere(item)
    if config.getoption("full"):
        return
    left_out = [item for item in items if _is_full(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]


def _skip_elsewhere(item: pytest.Item) -> None:
    for mark in [mark for name in ("linux", "windows") for mark in item.iter_markers(name)]:
        if not sys.platform.startswith({"linux": "linux", "windows": "win32"}[mark.name]):
            item.add_marker(pytest.mark.skip(reason=f"{mark.name}: {mark.kwargs['reason']}"))


def _is_full(item: pytest.Item) -> bool:
    # ``full(but="V1")``: what is the same with both engines of Ray Train runs by default with the one named; so do systems.
    mark = item.get_closest_marker("full")
    if mark is None:
        return False
    but = mark.kwargs.get("but")
    return but != sys.platform and (but not in ("V1", "V2") or but != _engine())


@functools.cache
def _engine() -> str:
    # Imports Ray and torch: seconds that the tests of decide/ do without.
    from ray_fracbackend._ray import v2_enabled

    return "V2" if v2_enabled() else "V1"


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this run is --full; tests with long tables take pairs of their values otherwise."""
    return bool(request.config.getoption("full"))
