"""Ray as it is and as if the pieces were merged.

A test that takes ``ray_as`` runs on both. The pieces that act on every run are in; the
knob of RLlib and the probe do nothing until they are asked for and have own tests.
"""

import os

import pytest
from packaging.version import Version

from upstream.install import as_if_merged

import ray

ALWAYS_ON = ("gloo_default", "shared_device", "bounded_start")

# The pieces are written against this version of Ray and its V2 engine. In others the
# test modules cannot even be imported.
_FITS = Version(ray.__version__) >= Version("2.60") and (
    os.environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() in ("1", "true")
)
collect_ignore_glob = [] if _FITS else ["test_*.py"]


def pytest_report_header():
    if not _FITS:
        return "upstream/tests left out: they need Ray 2.60 or newer and its V2 engine"


@pytest.fixture(scope="module", params=["stock", "merged"])
def ray_as(request):
    """A local Ray, once as it is and once as if merged."""
    if request.param == "stock":
        ray.init("local", num_cpus=4, include_dashboard=False)
        yield request.param
        ray.shutdown()
        return
    with as_if_merged(*ALWAYS_ON) as runtime_env:
        ray.init("local", num_cpus=4, include_dashboard=False, runtime_env=runtime_env)
        yield request.param
        ray.shutdown()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    """The controller looks at its workers often, so that short runs end soon."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
