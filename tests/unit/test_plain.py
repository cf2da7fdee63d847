"""Answers of the probe from workers with another version of the package."""

from dataclasses import asdict

import pytest

from ray_fracbackend import IncompatibleWorkersError, __version__
from ray_fracbackend.decide.plain import workers_of
from tests.unit.builders import worker


@pytest.mark.parametrize(
    ("version", "ranks", "text"),
    [
        ("0.0.9", (1, 2), "ranks 1,2: version 0.0.9 of"),
        (__version__, (), f"a worker: another build of version {__version__} (report is {{'rank': 1"),
    ],
    ids=["version", "fields"],
)
def test_other_versions(version, ranks, text):
    """The error names the ranks and both versions, before the report is interpreted."""
    others = [(version, asdict(worker(rank)) | {"cgroup": ""}) for rank in (1, 2)]
    with pytest.raises(IncompatibleWorkersError) as caught:
        workers_of([(__version__, asdict(worker(0))), *others])
    assert caught.value.ranks == ranks
    assert str(caught.value).startswith(text)
    assert f"and the controller has {__version__}. Install one version on every node" in str(caught.value)
