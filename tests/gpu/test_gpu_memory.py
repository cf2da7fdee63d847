"""limit_gpu_memory on a GPU: a worker that takes too much gets an error, and its neighbour goes on."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_engine import gpu_missing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_missing() is not None, reason=str(gpu_missing()))]

SETTINGS = {"limit_gpu_memory": True, "on_shared_device": "gloo"}


def test_neighbour_survives(engines):
    """A worker is refused at its fraction of the device, and the other still gets and uses memory of its own."""
    answer = engines("v2").run("memory", settings=SETTINGS, fraction=0.25, catch=True)
    assert answer["errors"] == []
    greedy, neighbour = answer["ranks"]
    assert greedy["refused_at"] == pytest.approx(0.25, abs=0.02)
    assert (greedy["works"], neighbour["works"], neighbour["refused_at"]) == (True, True, None)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_error_says_why(engines, version):
    """An uncaught out of memory reaches the user of fit() with the cap, the fraction and what to do."""
    answer = engines(version).run("memory", settings=SETTINGS, fraction=0.25, catch=False)
    text = "\n".join(error["text"] for error in answer["errors"])
    assert "limit_gpu_memory=True caps this worker at its fraction 0.25" in text
    assert "ask for a larger GPU fraction per worker" in text
