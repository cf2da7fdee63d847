"""Capacity for workers, and the advice if it is too small."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_fracbackend.cli.workers.capacity import places, why_no_place

NODE = {"CPU": 8.0, "GPU": 2.0}


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
    fraction = parts / 10_000
    assert places({"GPU": float(gpus)}, {"GPU": fraction}) == packed(gpus, fraction)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 30), st.integers(400, 9999))
def test_the_advice_fits(gpus: int, num_nodes: int, num_workers: int, parts: int) -> None:
    """With the fraction or the number of workers that the text advises, all workers fit."""
    nodes = [{"CPU": 1000.0, "GPU": float(gpus)}] * num_nodes
    worker = {"CPU": 1.0, "GPU": parts / 10_000}
    text = why_no_place(nodes, worker, num_workers, "PACK")
    assert (text is None) == (sum(places(node, worker) for node in nodes) >= num_workers)
    if text is not None:
        if fraction := re.search(r"Ask for ([\d.]+) GPU per worker", text):
            assert why_no_place(nodes, {**worker, "GPU": float(fraction[1])}, num_workers, "PACK") is None
        if fewer := re.search(r"ask for (\d+) workers?,", text):
            assert why_no_place(nodes, worker, int(fewer[1]), "PACK") is None


@pytest.mark.parametrize(
    ("nodes", "worker", "num_workers", "strategy", "said"),
    [
        ([NODE], {"CPU": 1, "GPU": 0.5}, 4, "PACK", None),
        ([NODE, NODE], {"CPU": 1}, 2, "STRICT_SPREAD", None),
        (
            [NODE],
            {"CPU": 1, "GPU": 0.6},
            3,
            "PACK",
            "room for 2 of them: 1 of 0.6 GPU fits on one GPU. Ask for 0.5 GPU",
        ),
        (
            [NODE],
            {"CPU": 1},
            2,
            "STRICT_SPREAD",
            "each worker on a separate node, and one node has room for 1 of them. Use SPREAD or PACK, ask for 1 worker, or",
        ),
        (
            [NODE, NODE],
            {"GPU": 1},
            3,
            "STRICT_PACK",
            "the largest of 2 nodes has room for 2 of them.* ask for 0.5|Ask for 0.5 GPU per worker, use PACK, ask for 2 workers",
        ),
        (
            [{"CPU": 8.0}],
            {"GPU": 0.5},
            1,
            "PACK",
            "no node of this cluster has a GPU in Ray. Start Ray with --num-gpus",
        ),
        ([NODE], {"CPU": 16}, 1, "PACK", r"one node has no room for it\. Add nodes with CPU"),
        ([NODE], {"CPU": 4}, 3, "SPREAD", "Ask for 2 workers, or add nodes with CPU"),
        (
            [{"CPU": 1.0}] * 2,
            {"CPU": 1},
            5,
            "STRICT_SPREAD",
            r"2 nodes have room for 2 of them\. Ask for 2 workers, or add",
        ),
        (
            [NODE],
            {"CPU": 100, "GPU": 0.5},
            1,
            "STRICT_SPREAD",
            r"one node has no room for it\. Add nodes with CPU",
        ),
    ],
)
def test_texts(nodes, worker, num_workers, strategy, said) -> None:
    """The text states which packing is possible, and what to request instead."""
    text = why_no_place(nodes, worker, num_workers, strategy)
    assert text is None if said is None else re.search(said, text)


_HALF = {"CPU": 1.0, "GPU": 0.5}
_LAPTOP = {"CPU": 2.0}


@pytest.mark.parametrize(
    ("nodes", "worker", "num_workers", "strategy", "trainer", "said"),
    [
        ([_LAPTOP], _HALF, 2, "PACK", {}, "this Ray has no GPU. Declare logical GPUs with --num-gpus 1, with"),
        ([_LAPTOP], _HALF, 3, "PACK", {}, "Declare logical GPUs with --num-gpus 2 --num-cpus 3, with"),
        ([_LAPTOP], _HALF, 2, "PACK", {"CPU": 1.0}, "Declare logical GPUs with --num-gpus 1 --num-cpus 3, with"),
        ([_LAPTOP], {"CPU": 1.0, "GPU": 2.0}, 2, "PACK", {}, "Declare logical GPUs with --num-gpus 4, with"),
        ([_LAPTOP], {"CPU": 1.0}, 3, "PACK", {}, "Declare more with --num-cpus 3, or ask for 2 workers"),
        (
            [NODE],
            {"CPU": 1.0, "GPU": 0.6},
            3,
            "PACK",
            {},
            "Ask for 0.5 GPU per worker, ask for 2 workers, or declare more logical GPUs with --num-gpus 3",
        ),
        ([_LAPTOP], {"CPU": 1.0}, 2, "STRICT_SPREAD", {}, "or add nodes with CPU"),
        ([_LAPTOP], {"CPU": 1.0, "TPU": 1.0}, 1, "PACK", {}, "Add nodes with TPU"),
        ([NODE] * 2, {"GPU": 1.0}, 5, "PACK", {}, "or add nodes with GPU"),
    ],
)
def test_a_ray_of_ones_own(nodes, worker, num_workers, strategy, trainer, said) -> None:
    """The options with which its one node has the places; nodes where an option does not help."""
    text = why_no_place(nodes, worker, num_workers, strategy, trainer, is_own=True)
    assert said in text
    declared = {name.upper()[:-1]: float(number) for name, number in re.findall(r"--num-(\w+) (\d+)", text)}
    if declared:
        assert why_no_place([{**nodes[0], **declared}], worker, num_workers, strategy, trainer) is None
