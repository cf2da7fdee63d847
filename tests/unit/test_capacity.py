"""Whether workers fit the nodes of a cluster, and the message if they do not."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from ray_fracbackend.cli.placement import cluster_too_small, request_text, resources_in_use

NODE = {"CPU": 8.0, "GPU": 2.0}
FRACTION = {"CPU": 1.0, "GPU": 0.6}


def too_small(nodes, worker, num_workers, strategy="PACK", **own):
    with mock.patch.object(ray, "nodes", return_value=[{"Alive": True, "Resources": node} for node in nodes]):
        return cluster_too_small([worker] * num_workers, strategy, **own)


def packed(gpus: int, fraction: float) -> int:
    """Return the number of workers that fit if each uses part of one GPU, by simulation of Ray's rule in ten-thousandths."""
    free, part = [10_000] * gpus, round(fraction * 10_000)
    for count in itertools.count():
        fitting = [gpu for gpu, left in enumerate(free) if left >= part]
        if not fitting:
            return count
        free[fitting[0]] -= part
    raise AssertionError


@given(st.integers(0, 4), st.integers(400, 9999))
def test_fractions_do_not_add_up_over_devices(gpus: int, parts: int) -> None:
    """The capacity is that of a packing device by device."""
    node, worker, fit = {"GPU": float(gpus)}, {"GPU": parts / 10_000}, packed(gpus, parts / 10_000)
    assert not fit or too_small([node], worker, fit) is None
    assert f"room for {fit} of them" in too_small([node], worker, fit + 1)


@pytest.mark.parametrize(
    ("nodes", "worker", "num_workers", "strategy", "said"),
    [
        ([NODE], {"CPU": 1.0, "GPU": 0.5}, 4, "PACK", None),
        ([NODE, NODE], {"CPU": 1.0}, 2, "STRICT_SPREAD", None),
        ([NODE, NODE], {"GPU": 1.0}, 4, "SPREAD", None),
        ([NODE], FRACTION, 3, "PACK", "1 x (8 CPU and 2 GPU): room for 2 of them, 1 on each GPU."),
        ([NODE, NODE], {"GPU": 1.0}, 3, "STRICT_PACK", "2 x (2 GPU): room for 2 of them."),
        ([NODE], {"CPU": 1.0}, 2, "STRICT_SPREAD", "1 x (8 CPU): room for 1 of them."),
        ([{"CPU": 8.0}, NODE], {"GPU": 3.0}, 1, "PACK", "1 x (0 GPU), 1 x (2 GPU): room for 0 of them."),
    ],
)
def test_room(nodes, worker, num_workers, strategy, said) -> None:
    """The text has the nodes and the number of workers that fit them."""
    text = too_small(nodes, worker, num_workers, strategy)
    assert text is None if said is None else said in text
    assert said is None or "--num-gpus" in too_small(nodes, worker, num_workers, strategy, is_own=True)


def test_the_request_and_what_is_free() -> None:
    """The request is that of the last bundle; the sum contains V1's trainer too."""
    bundles = [{"CPU": 2.0, "GPU": 0.6}, FRACTION]
    assert request_text(bundles, "PACK") == "2 workers of 1 CPU and 0.6 GPU each (PACK)"
    assert request_text(bundles[1:], "SPREAD") == "one worker of 1 CPU and 0.6 GPU (SPREAD)"
    with mock.patch.object(ray, "available_resources", return_value={"CPU": 2.0}):
        assert "(3 CPU needed and 2 free, 1.2 GPU needed and 0 free)" in resources_in_use(bundles)
